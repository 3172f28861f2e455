"""What a rank computes at its peak: the action, its operator, and the largest values alive then."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bayplan.data.actions import COMPUTES, ActionKind
from bayplan.data.graph import StorageKind
from bayplan.data.plan import LiveValue
from bayplan.data.program import ARRIVAL, module_of
from bayplan.data.record import LiveStorage
from bayplan.planning.memory.decisions import peak_moment
from bayplan.planning.pipelines.stage_fits import keys_of
from bayplan.planning.pipelines.stage_orders import Fit
from bayplan.planning.pipelines.step_source import CutSource
from bayplan.simulating.rank_memory import Key, RankMemory, held_buffers, rank_totals
from bayplan.simulating.schedule import plain_schedule
from bayplan.simulating.swaps import arrangement_of

__all__ = ["RankPeak", "RankPeaks"]

_NUM_LARGEST = 5
_RECEIVED = "received from another stage"
# What a forward has made for its backward is there, and none of the two runs.
_BETWEEN = (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD)


@dataclass(frozen=True)
class RankPeak:
    """`place` is the action, then operator, module and line where the action computes."""

    place: str = ""
    largest: tuple[LiveStorage, ...] = ()


@dataclass(frozen=True)
class RankPeaks:
    """The peaks of ranks whose stages run as planned; each stage is replayed once."""

    cut: CutSource
    fits: Mapping[Key, Fit]
    _known: dict[tuple[Key, ActionKind], RankPeak] = field(default_factory=dict)

    def of(self, rank: RankMemory) -> RankPeak:
        stages = {key: self.fits[key].memory for key in keys_of(rank)}
        totals = [total for total, _ in rank_totals(rank, stages)]
        if not totals:
            return RankPeak()
        action = rank.actions[totals.index(max(totals))]
        key = rank.keys.get((action.stage, action.index))
        if key is None or action.kind not in (*COMPUTES, *_BETWEEN):
            return RankPeak(str(action))
        if (key, action.kind) not in self._known:
            self._known[key, action.kind] = self._inside(key, action.kind)
        inside = self._known[key, action.kind]
        return RankPeak(f"{action} {inside.place}".rstrip(), inside.largest)

    def _inside(self, key: Key, kind: ActionKind) -> RankPeak:
        """The highest moment of a kind of action; each half of a backward is all of it."""
        step = self.cut.traced(*key).step.with_packs(self.fits[key].order.packs)
        swapped = arrangement_of(self.fits[key].order).apply(step.program)
        program, first = swapped.program, swapped.program.first_backward
        if kind in _BETWEEN:
            held = held_buffers(program, plain_schedule(program))
            values = [(program.ops[program.producers[b]], program.buffers[b]) for b in held]
            live = [LiveValue(value=op.name, place=op.place, size_bytes=b) for op, b in values]
            return RankPeak("", tuple(_largest(live, step.lines)))
        # The loss that stands in front of backward is the caller's.
        forward = [index for index in range(first) if not program.ops[index].is_callers]
        is_forward = kind is ActionKind.FORWARD
        moment = peak_moment(swapped, forward if is_forward else range(first, len(program.ops)))
        line = step.lines.get(moment.place, "")
        words = (moment.op, module_of(moment.place), line)
        return RankPeak(" ".join(filter(None, words)), tuple(_largest(moment.values, step.lines)))


def _largest(values: Sequence[LiveValue], lines: Mapping[str, str]) -> Iterator[LiveStorage]:
    ordered = sorted(values, key=lambda live: (-live.size_bytes, live.value))
    for live in ordered[:_NUM_LARGEST]:
        place = module_of(live.place)
        value = _RECEIVED if live.value == ARRIVAL else live.value
        yield LiveStorage(
            size_bytes=live.size_bytes,
            kind=StorageKind.ACTIVATION,
            name=f"{place} ({value})" if place else value,
            source=lines.get(live.place, ""),
        )
