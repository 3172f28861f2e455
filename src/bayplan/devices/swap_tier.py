"""`Tier`: a place outside the device where activations wait, behind begin and end of two copies.

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

from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

import torch

from bayplan.data.units import format_bytes
from bayplan.devices.extents import Layout, extent_of
from bayplan.devices.lanes import Copy, Lane, TierError
from bayplan.devices.slots import Slots

__all__ = ["Ticket", "TicketState", "Tier", "TierStatistics"]


class TicketState(StrEnum):
    """Where a ticket's bytes are."""

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
        """Bytes that wait outside."""
        return self.layout.size_bytes


@dataclass(frozen=True, kw_only=True)
class TierStatistics:
    """What a tier has done since it was opened.

    Attributes:
        stall_seconds: for which the computation waited for copies that were not done in time.
        peak_bytes: most bytes of slots taken at once.
    """

    num_out: int = 0
    num_in: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    busy_seconds: float = 0.0
    stall_seconds: float = 0.0
    peak_bytes: int = 0


class Tier:
    """Slots in one lane. One caller at a time; a context manager that closes the lane."""

    def __init__(self, lane: Lane) -> None:
        self.device = lane.device
        self._lane = lane
        self._slots = Slots(
            capacity_bytes=lane.capacity_bytes, granularity_bytes=lane.granularity_bytes
        )
        self._num_out = self._num_in = self._out_bytes = self._in_bytes = self._peak_bytes = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """What kind of tier this is: `file` or `pinned`."""
        return self._lane.name

    @property
    def capacity_bytes(self) -> int:
        """The most it can hold."""
        return self._slots.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots taken now."""
        return self._slots.capacity_bytes - self._slots.free_bytes

    @property
    def statistics(self) -> TierStatistics:
        """Sums over the copies that were ended so far."""
        return TierStatistics(
            num_out=self._num_out,
            num_in=self._num_in,
            out_bytes=self._out_bytes,
            in_bytes=self._in_bytes,
            busy_seconds=self._lane.busy_seconds,
            stall_seconds=self._lane.stall_seconds,
            peak_bytes=self._peak_bytes,
        )

    def has_room(self, tensor: torch.Tensor) -> bool:
        """Whether `begin_out` would find a slot for this tensor now."""
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
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
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
        self._num_out += 1
        self._out_bytes += ticket.size_bytes

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
        self._num_in += 1
        self._in_bytes += ticket.size_bytes

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
        """End the lane and forget what waits here; a second call does nothing."""
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
