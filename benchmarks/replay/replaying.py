"""A run on many ranks, replayed from its own record: whether the clock's model of a step is right.

The durations of what ranks did are measured, so their errors are nobody's; what remains is what the
clock adds to them: who waits for whom, what goes on at once, and when a step is over.

    compute, update          the action's own event, up to the begin of the next
    send, post of a sum      the same; what is sent leaves when the event begins
    message                  from the begin of its send to the end of its receive, where that had
                             to wait; else as the others, but here before it was asked for
    sum                      the mean of those of its size, without waits for other ranks

Events are those of the last step. They were measured while ranks shared the machine's cores, so the
replay gives every rank a core of its own. What a rank does before its first action and after its
last, to tell the loss above all, is no event and is left out.
"""

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import msgspec

from bayplan.data.actions import Action, ActionKind
from bayplan.data.errors import FileFault, ForeignPlan
from bayplan.data.plan import RankPlan
from bayplan.data.record import DeviceRecord, Event, Lane, RunRecord, Source
from bayplan.simulating.clock import StepCosts, step_times
from bayplan.simulating.network import Transfer
from bayplan.simulating.pipeline import Pipeline, pipeline_of
from bayplan.simulating.routing import Message

__all__ = ["replayed"]

_K = ActionKind
_RECEIVES = (_K.RECEIVE_FORWARD, _K.RECEIVE_BACKWARD)
_OWN = (_K.SEND_FORWARD, _K.SEND_BACKWARD, _K.REDUCE)
_BACKWARDS = (_K.BACKWARD, _K.BACKWARD_WEIGHT)
_WAITED = 3.0  # times the shortest receive that did not wait: what takes longer did

Shares = Mapping[int, float]  # by bucket, of a backward's time


def replayed(
    record: RunRecord,
    plan: RankPlan,
    *,
    made: Callable[[int, int], Shares] = lambda stage, num_samples: {},
) -> RunRecord:
    """The last step of a run, as the clock puts it together from its parts.

    Args:
        record: of a run on many ranks, with events.
        plan: that was run.
        made: of a stage and its samples, by bucket the share of a backward after which the bucket's
            gradients are there; at its end where that is not known.

    Raises:
        FileFault: the record has no events, or is of one device.
        ForeignPlan: it is of another plan.
    """
    replay = _Replay(record, plan, made)
    replay.check()
    times = step_times(replay.pipeline, replay.actions, replay.costs(), lags=plan.lags)
    return RunRecord(
        source=Source.SIMULATED,
        method=record.method,
        model=record.model,
        step_seconds=(times.seconds,),
        devices=tuple(
            DeviceRecord(
                device=one.device,
                stages=one.stages,
                peak_bytes=plan.predicted_peak_bytes[rank],
                events=times.events[rank],
            )
            for rank, one in enumerate(record.devices)
        ),
        num_samples=record.num_samples,
        versions=record.versions,
    )


@dataclass(frozen=True)
class _Replay:
    record: RunRecord
    plan: RankPlan
    made: Callable[[int, int], Shares]

    def check(self) -> None:
        """Refuse a record that is not of this plan."""
        num_ranks, num_devices = len(self.plan.actions), len(self.record.devices)
        if num_ranks < 2:
            raise FileFault("a plan for one device has no actions to replay; simulate it instead")
        if num_ranks != num_devices:
            raise ForeignPlan(
                f"the record is of {num_devices} ranks, the plan for {num_ranks}; give the plan"
                " that was run"
            )
        for rank, own in enumerate(self.plan.actions):
            found = {event.name for event in self.record.devices[rank].events}
            missing = next((text for text in own if text not in found), None)
            if missing is not None:
                raise ForeignPlan(
                    f"rank {rank} does {missing} in the plan, but the record of its last step has"
                    f" no such event among {len(found)}; give the plan that was run"
                )

    @cached_property
    def pipeline(self) -> Pipeline:
        if self.record.num_samples is None:
            raise FileFault("the record does not say how many samples a step had (num_samples)")
        return pipeline_of(self.plan, num_samples=self.record.num_samples)

    @cached_property
    def actions(self) -> list[list[Action]]:
        """By rank, in the order that they were really done."""
        return [
            [Action.parse(name) for name, _ in groupby(event.name for event in device.events)]
            for device in self.record.devices
        ]

    def costs(self) -> StepCosts:
        own = [_busy_seconds(device.events) for device in self.record.devices]
        return StepCosts(
            seconds=lambda rank, action: own[rank][str(action), Lane.COMPUTE],
            update_seconds=[
                sum(
                    seconds
                    for (name, lane), seconds in found.items()
                    if lane is Lane.COMPUTE and Action.parse(name).kind is _K.UPDATE
                )
                for found in own
            ],
            own_seconds=lambda rank, action: self._own_seconds(own[rank], action),
            message_bytes=lambda message, is_back: self._on_the_way[message, is_back],
            bucket_bytes=[self._sum_seconds(at) for at in range(len(self.plan.buckets))],
            network=_InSeconds(),
            early=lambda rank, action: self._early(own[rank], rank, action),
        )

    def _own_seconds(self, own: Mapping[tuple[str, Lane], float], action: Action) -> float:
        if action.kind in _OWN:
            lane = Lane.REDUCE if action.kind is _K.REDUCE else Lane.SEND
            return own.get((str(action), lane), 0.0)
        return 0.0

    def _early(
        self, own: Mapping[tuple[str, Lane], float], rank: int, action: Action
    ) -> dict[int, float]:
        if action.kind not in _BACKWARDS:
            return {}
        pieces = self.pipeline.routing.pieces_of(action.stage, rank)
        (size,) = (piece.end - piece.begin for at, piece in pieces if at == action.index)
        seconds = own[str(action), Lane.COMPUTE]
        shares = self.made(action.stage, size)
        return {bucket: (1.0 - share) * seconds for bucket, share in shares.items()}

    def _sum_seconds(self, bucket: int) -> float:
        """What a bucket's sum took, in the mean of all of its size."""
        size_bytes = self.plan.buckets[bucket].size_bytes
        classes = sorted(
            (one for device in self.record.devices for one in device.messages if one.count),
            key=lambda one: one.upper_bytes,
        )
        if not classes:
            return 0.0
        at = min(bisect_left([one.upper_bytes for one in classes], size_bytes), len(classes) - 1)
        alike = [one for one in classes if one.upper_bytes == classes[at].upper_bytes]
        return sum(one.seconds for one in alike) / sum(one.count for one in alike)

    @cached_property
    def _on_the_way(self) -> dict[tuple[Message, bool], float]:
        """The seconds of every message between ranks, True for gradients."""
        received = list(self._received())
        # Asked for after it was sent: here, or on its way. The shortest of these did not wait.
        shortest = min(
            (event.seconds for _, event, sent in received if event.start_seconds >= sent),
            default=0.0,
        )
        known: dict[tuple[Message, bool], float] = {}
        most: dict[tuple[Message, bool], float] = {}
        for key, event, sent in received:
            until = event.start_seconds + event.seconds
            if event.start_seconds < sent or event.seconds > _WAITED * shortest:
                known[key] = max(0.0, until - sent)
            else:
                most[key] = event.start_seconds - sent
        return known | _as_others(most, known)

    def _received(self) -> Iterator[tuple[tuple[Message, bool], Event, float]]:
        """All messages, with the event of their receive and the begin of their send.

        Ranks begin a step together, when they have the loss of the one before.
        """
        starts = [_starts(device.events) for device in self.record.devices]
        for rank, own in enumerate(self.actions):
            events = _receives(self.record.devices[rank].events)
            for action in (one for one in own if one.kind in _RECEIVES):
                is_back = action.kind is _K.RECEIVE_BACKWARD
                for message in self.pipeline.moved(rank, action):
                    sent = starts[_sender(message, is_back)][_send_of(message, is_back)]
                    yield (message, is_back), events[str(action)], sent


class _InSeconds:
    """A network whose bytes are seconds: sizes are what was measured to pass on it."""

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        """From one rank to another."""
        return Transfer(latency_seconds=size_bytes, seconds=0.0)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        """A sum over some ranks."""
        return Transfer(latency_seconds=size_bytes, seconds=0.0)


def _busy_seconds(events: Sequence[Event]) -> dict[tuple[str, Lane], float]:
    """By action and lane, from the begin of an event to that of the next."""
    found: dict[tuple[str, Lane], float] = defaultdict(float)
    for event, after in pairwise(events):
        found[event.name, event.lane] += max(0.0, after.start_seconds - event.start_seconds)
    for event in events[-1:]:
        found[event.name, event.lane] += event.seconds
    return found


def _receives(events: Sequence[Event]) -> dict[str, Event]:
    """By name, each from the begin of its wait to its end."""
    found: dict[str, Event] = {}
    for event in events:
        if event.lane is Lane.RECEIVE:
            first = found.get(event.name, event).start_seconds
            seconds = event.start_seconds + event.seconds - first
            found[event.name] = msgspec.structs.replace(event, start_seconds=first, seconds=seconds)
    return found


def _starts(events: Sequence[Event]) -> dict[str, float]:
    return {event.name: event.start_seconds for event in reversed(events)}


def _sender(message: Message, is_back: bool) -> int:
    return message.receiver if is_back else message.sender


def _send_of(message: Message, is_back: bool) -> str:
    stage = message.target_stage if is_back else message.source_stage
    kind = _K.SEND_BACKWARD if is_back else _K.SEND_FORWARD
    return str(Action(stage, kind, message.micro_batch))


def _as_others(
    most: Mapping[tuple[Message, bool], float], known: Mapping[tuple[Message, bool], float]
) -> dict[tuple[Message, bool], float]:
    """Messages that were there before they were asked for: like the others of their direction."""
    typical = {
        is_back: statistics.median([own for (_, back), own in known.items() if back is is_back])
        for is_back in {back for _, back in known}
    }
    return {key: min(bound, typical.get(key[1], 0.0)) for key, bound in most.items()}
