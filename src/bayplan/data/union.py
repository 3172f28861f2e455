"""`Union`: which of some numbers belong together, as more and more of them are joined."""

from collections.abc import Iterable

__all__ = ["Union"]


class Union:
    """Groups of the numbers from 0; at first each is alone.

    Example:
        >>> groups = Union(4)
        >>> groups.unite((2, 0)), groups.unite((0, 2))
        (True, False)
        >>> groups.groups()
        ((0, 2), (1,), (3,))
    """

    def __init__(self, size: int) -> None:
        self._above = list(range(size))

    def find(self, number: int) -> int:
        """The number that stands for a number's group."""
        above = self._above
        while above[number] != number:
            above[number] = above[above[number]]  # half the way is enough for the next one
            number = above[number]
        return number

    def unite(self, numbers: Iterable[int]) -> bool:
        """Put the groups of some numbers together, and say whether they were not."""
        changed = False
        first: int | None = None
        for number in numbers:
            found = self.find(number)
            if first is None:
                first = found
            elif found != first:
                # The smaller stands for both, so that groups come in order.
                low, high = min(first, found), max(first, found)
                self._above[high] = first = low
                changed = True
        return changed

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups, sorted."""
        found: dict[int, list[int]] = {}
        for number in range(len(self._above)):
            found.setdefault(self.find(number), []).append(number)
        return tuple(tuple(numbers) for numbers in found.values())
