"""Which parts of a fixed stretch of bytes are taken: best fit, and neighbours that are free merge.

The smallest gap that is large enough is cut, the lowest of equals: training steps ask for the same
sizes in the same order, and so find the same slots again.
"""

from bisect import bisect_left

from bayplan.data.units import round_up

__all__ = ["Slots"]


class Slots:
    """Slots of whole granules between 0 and `capacity_bytes`.

    Example:
        >>> slots = Slots(capacity_bytes=3 * 4096, granularity_bytes=4096)
        >>> slots.take(5000), slots.take(4096), slots.take(1)
        (0, 8192, None)
        >>> slots.release(0, 5000)
        >>> slots.free_bytes, slots.largest_free_bytes
        (8192, 8192)
    """

    def __init__(self, *, capacity_bytes: int, granularity_bytes: int) -> None:
        assert capacity_bytes >= 0, f"a capacity of {capacity_bytes} bytes"
        assert capacity_bytes % granularity_bytes == 0, f"{capacity_bytes} is not whole granules"
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._granularity_bytes = granularity_bytes
        # The gaps in order of their offsets; never two that touch, never an empty one.
        self._offsets = [0] if capacity_bytes else []
        self._sizes = [capacity_bytes] if capacity_bytes else []

    @property
    def largest_free_bytes(self) -> int:
        """The largest slot that `take` would give now."""
        return max(self._sizes, default=0)

    def take(self, size_bytes: int) -> int | None:
        """Return the offset of a slot of at least this size; None if there is no such gap.

        A slot for no bytes takes nothing and is always there.
        """
        needed = round_up(size_bytes, self._granularity_bytes)
        if needed == 0:
            return 0
        fitting = [(size, index) for index, size in enumerate(self._sizes) if size >= needed]
        if not fitting:
            return None
        size, index = min(fitting)
        offset = self._offsets[index]
        if size == needed:
            del self._offsets[index], self._sizes[index]
        else:
            self._offsets[index] += needed
            self._sizes[index] -= needed
        self.free_bytes -= needed
        return offset

    def release(self, offset_bytes: int, size_bytes: int) -> None:
        """Give back a slot, with the size it was taken for."""
        size = round_up(size_bytes, self._granularity_bytes)
        if size == 0:
            return
        index = bisect_left(self._offsets, offset_bytes)
        self._check_is_taken(index, offset_bytes, size)
        self.free_bytes += size
        self._offsets.insert(index, offset_bytes)
        self._sizes.insert(index, size)
        self._merge_with_next(index)
        if index > 0:
            self._merge_with_next(index - 1)

    def _check_is_taken(self, index: int, offset: int, size: int) -> None:
        previous_end = self._offsets[index - 1] + self._sizes[index - 1] if index else 0
        is_last = index == len(self._offsets)
        next_start = self.capacity_bytes if is_last else self._offsets[index]
        assert previous_end <= offset <= offset + size <= next_start, (
            f"slot {offset}+{size} was not taken: between gaps it is {previous_end}..{next_start}"
        )

    def _merge_with_next(self, index: int) -> None:
        end = self._offsets[index] + self._sizes[index]
        if index + 1 < len(self._offsets) and self._offsets[index + 1] == end:
            self._sizes[index] += self._sizes[index + 1]
            del self._offsets[index + 1], self._sizes[index + 1]
