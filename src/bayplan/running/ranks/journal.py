"""What a rank does and what fills its memory: told to its watch, kept for its record.

A counter of bytes knows how many there are, and not what they are for. So in one step every
action's highest moment is noted, with all tensors that the rank has as the action begins. Those of
the fullest action are told by kind; what is more than they is made inside the action itself:
temporaries, scratch memory of kernels, and values that will be known by kind when it is done.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from bayplan.data.actions import Action, ActionKind
from bayplan.data.graph import StorageKind
from bayplan.data.record import AllReduce, Event, Lane, waited_seconds
from bayplan.devices.meters import MemoryMeter
from bayplan.devices.moments import Moment, clock_of
from bayplan.running.collectives.sums import Sum

__all__ = ["Journal", "PeakBreakdown"]

_CPU = torch.device("cpu")
_LANES = {
    ActionKind.SEND_FORWARD: Lane.SEND,
    ActionKind.SEND_BACKWARD: Lane.SEND,
    ActionKind.RECEIVE_FORWARD: Lane.RECEIVE,
    ActionKind.RECEIVE_BACKWARD: Lane.RECEIVE,
    ActionKind.REDUCE: Lane.REDUCE,
    ActionKind.UPDATE: Lane.REDUCE,  # until all-reduces are done and the optimizer begins
    ActionKind.SWAP_OUT: Lane.COPY,
    ActionKind.SWAP_IN: Lane.COPY,
}


class Journal:
    """Follows one rank through its steps; its text, for another thread, is the present action.

    `device` is where its actions are done, later than they are begun.

    Attributes:
        now: the step and the position in its list.
        listener: hears of each action as well; what it takes counts for no action.
    """

    listener: "PeakBreakdown | None" = None

    def __init__(self, actions: Sequence[Action], device: torch.device = _CPU) -> None:
        self._clock = clock_of(device)
        self.now = (0, 0)
        self._num_steps = 0  # begun
        self._open: int | None = None  # the position that began and did not end
        self._actions = actions
        self._done: list[tuple[int, Moment, Moment]] = []  # of this step: position, begin, end
        self._began: Moment = 0.0
        self._updating: tuple[Moment, Moment] | None = None  # when the optimizer began and ended

    def updating(self, update: Callable[[], object]) -> Callable[[], object]:
        """The optimizer's update, timed: the rest of its action is a wait for all-reduces."""

        def timed() -> object:
            start = self._clock()
            result = update()
            self._updating = (start, self._clock())
            return result

        return timed

    def began_step(self) -> None:
        """A step begins; it may do a part of the list, and in another order."""
        self._num_steps += 1
        self._done.clear()
        self._open = self._updating = None

    def began(self, position: int) -> None:
        """An action begins, if only to wait: one that began before counts from then on."""
        self.now = (max(0, self._num_steps - 1), position)
        if self._open == position:
            return
        if self.listener is not None:
            self.listener.began(position)
        self._open, self._began = position, self._clock()

    def ended(self, position: int) -> None:
        self._done.append((position, self._began, self._clock()))
        self._open = None
        if self.listener is not None:
            self.listener.ended(position)

    def __str__(self) -> str:
        step, position = self.now
        action = self._actions[position]
        return f"step {step}, stage {action.stage}, {action}"

    def events(self) -> tuple[Event, ...]:
        start = float(self._done[0][1]) if self._done else 0.0
        return tuple(
            Event(
                lane=lane,
                name=str(self._actions[position]),
                start_seconds=began - start,
                seconds=ended - began,
            )
            for position, *span in self._done
            for lane, began, ended in self._parts(position, *map(float, span))
        )

    def all_reduces(self, sums: Sequence[Sum]) -> tuple[AllReduce, ...]:
        """Those of the latest sums that were made in this step, in the order they began."""
        start = float(self._done[0][1]) if self._done else 0.0
        events = self.events()
        own = [(made, made.begun_seconds - start, made.ended_seconds - start) for made in sums]
        return tuple(
            AllReduce(
                bucket=number,
                size_bytes=made.size_bytes,
                start_seconds=begun,
                seconds=max(0.0, ended - begun),
                exposed_seconds=waited_seconds(events, begun, ended),
            )
            for number, (made, begun, ended) in enumerate(o for o in own if o[1] >= 0)
        )

    def _parts(
        self, position: int, began: float, ended: float
    ) -> Iterator[tuple[Lane, float, float]]:
        """An action, or the parts of an update: a wait, and what the optimizer computes."""
        kind = self._actions[position].kind
        if kind is ActionKind.UPDATE and self._updating is not None:
            first, last = map(float, self._updating)
            if began <= first <= last <= ended:
                yield Lane.REDUCE, began, first
                yield Lane.COMPUTE, first, last
                return
        yield _LANES.get(kind, Lane.COMPUTE), began, ended


Held = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class PeakBreakdown:
    """What fills a rank's memory at the peak of one step, by kind; listens to its actions.

    Args:
        held: tells all tensors of the rank, with what each is there for; the first counts where
            several lie in the same memory.
    """

    def __init__(self, held: Held, meter: MemoryMeter) -> None:
        self._held, self._meter = held, meter
        self._clock: Counter[str] = Counter()
        self._fullest: Counter[str] = Counter()
        self._most_bytes = -1

    def began(self, position: int) -> None:
        known: set[int] = set()
        self._clock = Counter()
        for kind, tensor in self._held():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                self._clock[kind] += storage.nbytes()
        self._meter.reset_peak()

    def ended(self, position: int) -> None:
        peak_bytes = self._meter.peak_bytes
        if peak_bytes > self._most_bytes:
            self._most_bytes, self._fullest = peak_bytes, self._clock

    def by_kind(self, peak_bytes: int) -> dict[str, int]:
        """A peak of so many bytes by kind, the largest first; what has no kind is temporary."""
        sizes = Counter(self._fullest)
        sizes[StorageKind.TEMPORARY] += max(0, peak_bytes - sum(sizes.values()))
        return {str(kind): size for kind, size in sizes.most_common() if size}
