"""Which operator of forward a gradient belongs to, by the numbers that torch gives both.

torch numbers an operator when it is called, and its gradient when that is recorded. That is the
same number, but for operators that write in place: recorded first, they make a copy and compute
after it, with a number that is higher. So a gradient belongs to the first operator of its own
number or a higher one.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, TypeVar

__all__ = ["Numbering"]

T = TypeVar("T")


class Numbering(Generic[T]):
    """Something about the first operator of each number.

    Args:
        numbered: pairs of a number and what is known about its operator, in order of execution.

    Example:
        >>> numbering = Numbering([(3, "add"), (5, "mul"), (5, "view")])
        >>> numbering.of_gradient(4), numbering.of_gradient(9)
        ('mul', 'mul')
    """

    def __init__(self, numbered: Iterable[tuple[int, T]]) -> None:
        first: dict[int, T] = {}
        for number, known in numbered:
            first.setdefault(number, known)
        self._numbers = sorted(first)
        self._first = first

    def of_gradient(self, number: int) -> T:
        """What is known of the operator whose gradient has a number."""
        at = min(bisect_left(self._numbers, number), len(self._numbers) - 1)
        return self._first[self._numbers[at]]
