"""`Tier`: a place outside the device where activations wait, behind begin and end of two copies.

The smallest gap that is large enough is cut, the lowest of equals: training steps ask for the same
sizes in the same order, and so find the same slots again.

```
ticket = tier.begin_out(tensor)   copy out starts; the ticket holds the tensor
tier.end_out(ticket)              the bytes are safe; the ticket has let go of the tensor
tensor = tier.begin_in(ticket)    memory is taken, copy in starts
tier.end_in(ticket)               the tensor is filled; its slot is free again
```
A tier decides where bytes lie and what state a ticket is in; a `Lane` moves them, first in, first
out, beside the computation. Between begin and end the tensor's memory belongs to the lane: nobody
may write to it going out, or touch it coming in.
"""

from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

import torch

from bayplan.data.errors import UsageError
from bayplan.data.units import format_bytes, round_up
from bayplan.running.swaps.lanes import (
    Copy,
    FileLane,
    Lane,
    Layout,
    PinnedLane,
    TierError,
    default_directory,
    extent_of,
)

__all__ = ["Slots", "SwapStore", "Ticket", "TicketState", "Tier", "open_tier"]


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
        # (offset, size), in order; never two that touch, never an empty one.
        self._gaps = [(0, capacity_bytes)] if capacity_bytes else []

    @property
    def largest_free_bytes(self) -> int:
        return max((size for _, size in self._gaps), default=0)

    def take(self, size_bytes: int) -> int | None:
        """Return the offset of a slot of at least this size; None if there is no such gap.

        A slot for no bytes takes nothing and is always there.
        """
        needed = round_up(size_bytes, self._granularity_bytes)
        if needed == 0:
            return 0
        fitting = [(size, offset) for offset, size in self._gaps if size >= needed]
        if not fitting:
            return None
        size, offset = min(fitting)
        rest = [] if size == needed else [(offset + needed, size - needed)]
        index = self._gaps.index((offset, size))
        self._gaps[index : index + 1] = rest
        self.free_bytes -= needed
        return offset

    def release(self, offset_bytes: int, size_bytes: int) -> None:
        size = round_up(size_bytes, self._granularity_bytes)
        if size == 0:
            return
        index = bisect_left(self._gaps, (offset_bytes, 0))
        before, after = self._gaps[:index][-1:], self._gaps[index : index + 1]
        begin, end = offset_bytes, offset_bytes + size
        previous_end = sum(before[0]) if before else 0
        next_start = after[0][0] if after else self.capacity_bytes
        assert previous_end <= begin <= end <= next_start, (
            f"slot {begin}+{size} was not taken: between gaps it is {previous_end}..{next_start}"
        )
        self.free_bytes += size
        if before and previous_end == begin:
            index, begin = index - 1, before[0][0]
        if after and next_start == end:
            end = sum(after[0])
        first_kept = bisect_left(self._gaps, (end, 0))
        self._gaps[index:first_kept] = [(begin, end - begin)]


class TicketState(StrEnum):
    GOING_OUT = "going out"
    OUTSIDE = "outside"
    COMING_IN = "coming in"
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """What a swapped tensor leaves behind on its device.

    Attributes:
        tensor: the tensor while a copy of it runs, else None. It stays when the copy out failed,
            so that it can be kept on the device instead.
        offset_bytes: of its slot in the tier.
    """

    tier: "Tier"
    tensor: torch.Tensor | None
    layout: Layout
    offset_bytes: int
    state: TicketState
    copy: Copy | None = field(repr=False)

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes


class Tier:
    """Slots in one lane. One caller at a time; a context manager that closes the lane.

    Attributes:
        num_out, num_in: copies that have ended so far.
        peak_bytes: most bytes of slots taken at once.
    """

    def __init__(self, lane: Lane) -> None:
        self.device = lane.device
        self._lane = lane
        self._slots = Slots(
            capacity_bytes=lane.capacity_bytes, granularity_bytes=lane.granularity_bytes
        )
        self.num_out = self.num_in = self.peak_bytes = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._lane.name

    @property
    def capacity_bytes(self) -> int:
        return self._slots.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._slots.capacity_bytes - self._slots.free_bytes

    def has_room(self, tensor: torch.Tensor) -> bool:
        return self._slots.largest_free_bytes >= Layout.of(tensor).size_bytes

    def begin_out(self, tensor: torch.Tensor) -> Ticket:
        """Start copying a tensor out; of a view, only what it covers goes.

        Raises:
            TierError: No slot is large enough; nothing was started.
        """
        self._check_open()
        assert tensor.device.type == self.device.type, f"{tensor.device} tensor, {self.device} tier"
        # A lazy conjugate or negative is a mark on the tensor, which bytes do not carry.
        plain = tensor.resolve_conj().resolve_neg()
        layout = Layout.of(plain)
        offset_bytes = self._slots.take(layout.size_bytes)
        if offset_bytes is None:
            raise self._full(layout.size_bytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Ticket(
            tier=self,
            tensor=tensor,
            layout=layout,
            offset_bytes=offset_bytes,
            state=TicketState.GOING_OUT,
            copy=self._lane.start_out(extent_of(plain), offset_bytes),
        )

    def end_out(self, ticket: Ticket) -> None:
        """Wait until a tensor's bytes are safe, and let go of it.

        Raises:
            TierError: The copy failed. The ticket is done and `ticket.tensor` is still there.
        """
        try:
            self._wait(ticket, TicketState.GOING_OUT)
        except OSError as fault:
            self._finish(ticket)
            raise self._failed("copy out", ticket, fault) from fault
        ticket.tensor = None
        ticket.state = TicketState.OUTSIDE
        self.num_out += 1

    def begin_in(self, ticket: Ticket) -> torch.Tensor:
        """Allocate a tensor like the one that left, and start filling it."""
        self._check(ticket, TicketState.OUTSIDE)
        self._check_open()
        tensor = ticket.layout.allocate()
        ticket.copy = self._lane.start_in(ticket.offset_bytes, extent_of(tensor))
        ticket.tensor = tensor
        ticket.state = TicketState.COMING_IN
        return tensor

    def end_in(self, ticket: Ticket, *, keep: bool = False) -> None:
        """Wait until the tensor is filled, and free its slot, or keep it for another time.

        Raises:
            TierError: The copy failed. The bytes are still outside: `begin_in` may try again.
        """
        try:
            self._wait(ticket, TicketState.COMING_IN)
        except OSError as fault:
            ticket.tensor = None
            ticket.state = TicketState.OUTSIDE
            raise self._failed("copy in", ticket, fault) from fault
        ticket.tensor = None
        if keep:
            ticket.state = TicketState.OUTSIDE
        else:
            self._finish(ticket)
        self.num_in += 1

    def drop(self, ticket: Ticket) -> None:
        """Give up a ticket in whatever state: its bytes are forgotten, its slot is free."""
        if ticket.copy is not None:
            with suppress(OSError):  # of bytes that nobody wants any more
                ticket.copy.wait()
            ticket.copy = None
        ticket.tensor = None
        if ticket.state is not TicketState.DONE:
            self._finish(ticket)

    def close(self) -> None:
        """A second call does nothing."""
        self._is_closed = True
        self._lane.close()

    def _wait(self, ticket: Ticket, state: TicketState) -> None:
        self._check(ticket, state)
        assert ticket.copy is not None
        try:
            ticket.copy.wait()
        except OSError:
            ticket.copy = None
            raise
        ticket.copy = None  # an interrupt leaves it, to be waited for again

    def _finish(self, ticket: Ticket) -> None:
        self._slots.release(ticket.offset_bytes, ticket.size_bytes)
        ticket.state = TicketState.DONE

    def _check(self, ticket: Ticket, state: TicketState) -> None:
        assert ticket.tier is self, f"this ticket is of another tier ({ticket.tier.name})"
        assert ticket.state is state, f"ticket is {ticket.state}, must be {state}"

    def _check_open(self) -> None:
        assert not self._is_closed, f"the {self.name} tier is closed"

    def _full(self, needed_bytes: int) -> TierError:
        return TierError(
            f"swap is full: needs {format_bytes(needed_bytes)} in one piece, the largest gap is"
            f" {format_bytes(self._slots.largest_free_bytes)}"
            f" ({format_bytes(self._slots.free_bytes)} free of"
            f" {format_bytes(self.capacity_bytes)} in {self._lane.place});"
            " use a larger --swap-size"
        )

    def _failed(self, what: str, ticket: Ticket, fault: OSError) -> TierError:
        return TierError(
            f"{what} of {format_bytes(ticket.size_bytes)}, {self._lane.place}: {fault};"
            " use another --swap-dir, or a smaller --swap-size"
        )


SwapStore = Tier


def open_tier(
    device: torch.device, *, capacity_bytes: int, directory: Path | None = None
) -> SwapStore:
    """Open what a device swaps to; close it, or use it in a `with` block.

    On a CPU that is a file: its pages in the kernel's cache are memory too, but memory that can be
    taken back. On CUDA it is pinned host memory.

    Args:
        device: whose activations are swapped.
        capacity_bytes: of the file or of pinned memory.
        directory: of the file; `default_directory()` if not given.

    Raises:
        TierError: The space is not there; the message says how much is.
        UsageError: A device that cannot swap.
    """
    if device.type == "cpu":
        where = directory or default_directory()
        return Tier(FileLane(device, capacity_bytes=capacity_bytes, directory=where))
    if device.type != "cuda":
        raise UsageError(f"cannot swap from a {device.type} device; cpu and cuda can")
    return Tier(PinnedLane(device, capacity_bytes=capacity_bytes))
