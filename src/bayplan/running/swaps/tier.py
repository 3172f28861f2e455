"""`SwapStore`: where activations wait outside the device, behind begin and end of two copies.

The smallest gap that is large enough is cut, the lowest of equals: training steps ask for the same
sizes in the same order, and so find the same slots again.

```
ticket = store.begin_out(tensor)   copy out starts; the ticket holds the tensor
store.end_out(ticket)              the bytes are safe; the ticket has let go of the tensor
tensor = store.begin_in(ticket)    memory is taken, copy in starts
store.end_in(ticket)               the tensor is filled; its slot is free again
```
A store decides where bytes lie and what state a ticket is in; a `Lane` moves them, first in, first
out, beside the computation. Between begin and end the tensor's memory belongs to the lane: nobody
may write to it going out, or touch it coming in.
"""

import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from bayplan.data.errors import UsageError
from bayplan.data.units import format_bytes, round_up
from bayplan.devices.device import device_of
from bayplan.running.swaps.lanes import (
    FileLane,
    Lane,
    Layout,
    PinnedLane,
    StagedLane,
    TierError,
    Wait,
    extent_of,
)

__all__ = ["Slots", "SwapStore", "Ticket", "TicketState", "open_tier"]


class Slots:
    """Slots of whole granules between 0 and `capacity_bytes`."""

    def __init__(self, *, capacity_bytes: int, granularity_bytes: int) -> None:
        assert capacity_bytes >= 0, f"a capacity of {capacity_bytes} bytes"
        assert capacity_bytes % granularity_bytes == 0, f"{capacity_bytes} is not whole granules"
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._granularity_bytes = granularity_bytes
        # (offset, size); never two that touch, never an empty one.
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
        self._gaps.remove((offset, size))
        if size > needed:
            self._gaps.append((offset + needed, size - needed))
        self.free_bytes -= needed
        return offset

    def release(self, offset_bytes: int, size_bytes: int) -> None:
        released = (offset_bytes, round_up(size_bytes, self._granularity_bytes))
        if released[1] == 0:
            return
        gaps: list[tuple[int, int]] = []
        for offset, size in sorted([*self._gaps, released]):
            end_of_last = sum(gaps[-1]) if gaps else 0
            assert end_of_last <= offset <= self.capacity_bytes - size, (
                f"slot {released} was not taken: {offset} to {offset + size} meets a gap that ends"
                f" at {end_of_last}, or the end at {self.capacity_bytes}"
            )
            if gaps and offset == end_of_last:
                gaps[-1] = (gaps[-1][0], gaps[-1][1] + size)
            else:
                gaps.append((offset, size))
        self._gaps = gaps
        self.free_bytes += released[1]


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
        offset_bytes: of its slot in the store.
        wait: ends the copy that was begun last.
    """

    tensor: torch.Tensor | None
    layout: Layout
    offset_bytes: int
    state: TicketState
    wait: Wait = field(repr=False)


class SwapStore(AbstractContextManager["SwapStore"]):
    """Slots in one lane. One caller at a time; a context manager that closes the lane.

    Attributes:
        num_out, num_in: copies that have ended so far.
        peak_bytes: most bytes of slots taken at once.
    """

    def __init__(self, lane: Lane) -> None:
        self.device, self.capacity_bytes = lane.device, lane.capacity_bytes
        self._lane = lane
        self._slots = Slots(
            capacity_bytes=lane.capacity_bytes, granularity_bytes=lane.granularity_bytes
        )
        self.num_out = self.num_in = self.peak_bytes = 0
        self._is_closed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self._slots.free_bytes

    def has_room(self, tensor: torch.Tensor) -> bool:
        return self._slots.largest_free_bytes >= Layout.of(tensor).size_bytes

    def begin_out(self, tensor: torch.Tensor) -> Ticket:
        """Start copying a tensor out; of a view, only what it covers goes.

        Raises:
            TierError: No slot is large enough; nothing was started.
        """
        assert not self._is_closed, f"{self._lane.place} is closed"
        assert device_of(self.device).holds(tensor), f"{tensor.device} tensor, {self.device} tier"
        # A lazy conjugate or negative is a mark on the tensor, which bytes do not carry.
        plain = tensor.resolve_conj().resolve_neg()
        layout = Layout.of(plain)
        offset_bytes = self._slots.take(layout.size_bytes)
        if offset_bytes is None:
            raise TierError(
                f"swap is full: needs {format_bytes(layout.size_bytes)} in one piece, the largest"
                f" gap is {format_bytes(self._slots.largest_free_bytes)}"
                f" ({format_bytes(self._slots.free_bytes)} free of"
                f" {format_bytes(self.capacity_bytes)} in {self._lane.place});"
                " use a larger --swap-size"
            )
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Ticket(
            tensor=tensor,
            layout=layout,
            offset_bytes=offset_bytes,
            state=TicketState.GOING_OUT,
            wait=self._lane.start_out(extent_of(plain), offset_bytes),
        )

    def end_out(self, ticket: Ticket) -> None:
        """Wait until a tensor's bytes are safe, and let go of it.

        Raises:
            TierError: The copy failed. The ticket is done and `ticket.tensor` is still there.
        """
        _check(ticket, TicketState.GOING_OUT)
        try:
            ticket.wait()
        except OSError as fault:
            self._finish(ticket)
            raise self._failed("copy out", ticket, fault) from fault
        ticket.tensor = None
        ticket.state = TicketState.OUTSIDE
        self.num_out += 1

    def begin_in(self, ticket: Ticket) -> torch.Tensor:
        """Allocate a tensor like the one that left, and start filling it."""
        _check(ticket, TicketState.OUTSIDE)
        assert not self._is_closed, f"{self._lane.place} is closed"
        tensor = ticket.layout.allocate()
        ticket.wait = self._lane.start_in(ticket.offset_bytes, extent_of(tensor))
        ticket.tensor = tensor
        ticket.state = TicketState.COMING_IN
        return tensor

    def end_in(self, ticket: Ticket, *, keep: bool = False) -> None:
        """Wait until the tensor is filled, and free its slot, or keep it for another time.

        Raises:
            TierError: The copy failed. The bytes are still outside: `begin_in` may try again.
        """
        _check(ticket, TicketState.COMING_IN)
        try:
            ticket.wait()
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
        with suppress(OSError):  # of bytes that nobody wants any more
            ticket.wait()
        ticket.tensor = None
        if ticket.state is not TicketState.DONE:
            self._finish(ticket)

    def close(self) -> None:
        """A second call does nothing."""
        self._is_closed = True
        self._lane.close()

    def _finish(self, ticket: Ticket) -> None:
        self._slots.release(ticket.offset_bytes, ticket.layout.size_bytes)
        ticket.state = TicketState.DONE

    def _failed(self, what: str, ticket: Ticket, fault: OSError) -> TierError:
        return TierError(
            f"{what} of {format_bytes(ticket.layout.size_bytes)}, {self._lane.place}: {fault};"
            " use another --swap-dir, or a smaller --swap-size"
        )


def _check(ticket: Ticket, state: TicketState) -> None:
    assert ticket.state is state, f"ticket is {ticket.state}, must be {state}"


def open_tier(device: torch.device, *, capacity_bytes: int, directory: Path) -> SwapStore:
    """Open what a device swaps to; close it, or use it in a `with` block.

    On a CPU that is a file: its pages in the kernel's cache are memory too, but memory that can be
    taken back. On an accelerator it is pinned host memory; where the host gives less of that, a
    file again, which a warning says.

    Raises:
        TierError: The space is not there; the message says how much is.
        UsageError: A device that cannot swap.
    """
    own = device_of(device)
    if own.has_pinned_copies:
        try:
            return SwapStore(PinnedLane(device, capacity_bytes=capacity_bytes))
        except TierError as fault:
            warnings.warn(
                f"{fault}. Activations go to a file in {directory} instead, which takes longer",
                RuntimeWarning,
                stacklevel=2,
            )
        lane = StagedLane(device, capacity_bytes=capacity_bytes, directory=directory)
        return SwapStore(lane)
    if own.is_accelerator:
        raise UsageError(f"cannot swap from a {device.type} device: it has no streams to copy on")
    return SwapStore(FileLane(device, capacity_bytes=capacity_bytes, directory=directory))
