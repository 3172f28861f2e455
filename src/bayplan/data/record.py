"""`RunRecord`: what a step did, or would do; `Difference`: two of them side by side."""

import statistics
from collections.abc import Iterable
from enum import StrEnum
from itertools import groupby

import msgspec

from bayplan.data.errors import CheckedStruct, check_at_least_1, check_figures, check_not_negative
from bayplan.data.graph import StorageKind
from bayplan.data.profile import Clock

__all__ = [
    "KEPT",
    "MESSAGE",
    "PACKED",
    "RECOMPUTED",
    "SWAPPED",
    "AllReduce",
    "AllocatorPeaks",
    "DataPosition",
    "DeviceDifference",
    "DeviceRecord",
    "Difference",
    "Evaluation",
    "Event",
    "InputRecord",
    "Lane",
    "LiveStorage",
    "MemoryCurve",
    "MessageClass",
    "PlanPoint",
    "Prediction",
    "RunRecord",
    "Source",
    "StepParts",
    "message_classes",
    "size_class",
    "waited_seconds",
]

# Beside the storage kinds: values on their way between ranks, and what a planned step does with
# those that its backward needs.
MESSAGE = "message"
KEPT, RECOMPUTED, SWAPPED, PACKED = "kept", "recomputed", "swapped", "packed"


class Source(StrEnum):
    """Whether a record was replayed or really happened."""

    SIMULATED = "simulated"
    MEASURED = "measured"


class Lane(StrEnum):
    """What a device was busy with."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    COPY = "copy"


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Live bytes over time; `by_kind` splits them where the kinds are known.

    Measured bytes may be below 0: a loop may free what was there before it and is no tensor.
    """

    seconds: tuple[float, ...]
    total_bytes: tuple[int, ...]
    by_kind: dict[str, tuple[int, ...]] = {}

    def __post_init__(self) -> None:
        lengths = [*map(len, (self.seconds, self.total_bytes, *self.by_kind.values()))]
        if len(set(lengths)) != 1:
            raise ValueError(f"columns of different lengths: {lengths}")
        check_figures("seconds", self.seconds)
        for column in (self.total_bytes, *self.by_kind.values()):
            check_figures("bytes, without their sign,", map(abs, column))

    def thinned(self, most: int) -> "MemoryCurve":
        """The same with so many samples at most: the highest and the lowest of each part."""
        totals, num_parts = self.total_bytes, max(1, most // 2)
        if len(totals) <= most:
            return self
        kept: set[int] = set()
        for part in range(num_parts):
            own = range(part * len(totals) // num_parts, (part + 1) * len(totals) // num_parts)
            kept |= {max(own, key=totals.__getitem__), min(own, key=totals.__getitem__)}
        order = sorted(kept)
        return MemoryCurve(
            seconds=tuple(self.seconds[index] for index in order),
            total_bytes=tuple(totals[index] for index in order),
            by_kind={
                kind: tuple(column[index] for index in order)
                for kind, column in self.by_kind.items()
            },
        )


class LiveStorage(CheckedStruct, frozen=True, kw_only=True):
    """One of the largest storages alive at the peak, named as the user knows it."""

    size_bytes: int
    kind: StorageKind
    name: str
    source: str


class Event(CheckedStruct, frozen=True, kw_only=True):
    """Something a device did, from `start_seconds` on for `seconds`."""

    lane: Lane
    name: str
    start_seconds: float
    seconds: float


def waited_seconds(events: Iterable[Event], start: float, end: float) -> float:
    """How much of a stretch a device did nothing but wait for sums of gradients."""
    waits = (event for event in events if event.lane is Lane.REDUCE)
    return sum(
        max(0.0, min(end, wait.start_seconds + wait.seconds) - max(start, wait.start_seconds))
        for wait in waits
    )


class MessageClass(CheckedStruct, frozen=True, kw_only=True):
    """Messages of one size class, summed."""

    upper_bytes: int
    count: int
    total_bytes: int
    seconds: float


_KIB, _MIB = 2**10, 2**20
_FINE_MIB, _COARSE_MIB, _COARSE_FROM_MIB = 10, 50, 100


def size_class(size_bytes: int) -> tuple[int, int]:
    """The bytes that a message's class begins above, and those that it ends with."""
    for begin, end in ((0, _KIB), (_KIB, _MIB), (_MIB, _FINE_MIB * _MIB)):
        if size_bytes <= end:
            return begin, end
    width = (_FINE_MIB if size_bytes <= _COARSE_FROM_MIB * _MIB else _COARSE_MIB) * _MIB
    end = -(-size_bytes // width) * width
    return end - width, end


def message_classes(messages: Iterable[tuple[int, float]]) -> tuple[MessageClass, ...]:
    """Messages, as bytes and seconds of each, summed up by class as a record keeps them."""
    by_class = groupby(sorted(messages), key=lambda message: size_class(message[0]))
    return tuple(
        MessageClass(
            upper_bytes=end,
            count=len(alike),
            total_bytes=sum(size_bytes for size_bytes, _ in alike),
            seconds=sum(seconds for _, seconds in alike),
        )
        for (_, end), group in by_class
        for alike in [list(group)]
    )


class AllReduce(CheckedStruct, frozen=True, kw_only=True):
    """The sum of one bucket of gradients in the last step, as a device saw it.

    Attributes:
        start_seconds, seconds: of the step, and how long it was on its way.
        exposed_seconds: the part of `seconds` in which the device only waited for all-reduces.
    """

    bucket: int
    size_bytes: int
    start_seconds: float
    seconds: float
    exposed_seconds: float = 0.0


class PlanPoint(CheckedStruct, frozen=True, kw_only=True):
    """Another plan of the same step: its predicted memory and time.

    Attributes:
        name: of the strategy, or of its publication.
        time_ratio: over the plain step.
        limit_bytes: that it was made for; None for a strategy that knows no limit.
        is_chosen: whether this is the plan of the record.
    """

    name: str
    peak_bytes: int
    time_ratio: float
    limit_bytes: int | None = None
    is_chosen: bool = False


class AllocatorPeaks(CheckedStruct, frozen=True, kw_only=True):
    """What torch's caching allocator takes for a loop of steps on a CUDA device.

    Attributes:
        allocated_bytes: the most bytes in used blocks, as `max_memory_allocated` of torch says.
        reserved_bytes: the most bytes in segments, as `max_memory_reserved` says.
    """

    allocated_bytes: int
    reserved_bytes: int

    @property
    def fragmented_bytes(self) -> int:
        """Reserved and in no use, even when most is."""
        return self.reserved_bytes - self.allocated_bytes


class DeviceRecord(CheckedStruct, frozen=True, kw_only=True):
    """One device's memory and events over the recorded steps.

    Attributes:
        device: as in a profile.
        stages: of the plan, those that this rank computes.
        places: what contains the device, the outermost first: its host, then switches.
        peak_bytes: bytes: the most live bytes at one time, as the allocator rounds them.
        needed_bytes: bytes: the same, not rounded.
        total_bytes: bytes in use on the device: its context and what its allocator reserves; if
            that is unknown, a lower bound: its context and `peak_bytes`.
        capacity_bytes: bytes: of the device.
        allocator: the most bytes of torch's caching allocator on a CUDA device.
        peak_by_kind: bytes at the peak by storage kind, and `workspace`; on many ranks also
            `message`.
        peak_node: index of the graph's node at the peak.
        peak_place: what runs at the peak, in words: operator, module and line; on many ranks the
            action first.
        step_peak_bytes: bytes: the peak of each recorded step.
        largest: the largest storages at the peak.
        curve: live bytes over time. In a simulated curve, each entry is one node, from its start.
        plain_curve: the same of the step with everything kept.
        events: what the device did in the last step, or in the extra step of
            `bayplan run --report`. On one device a name is phase and module, on many ranks
            an action.
        messages: messages by size; on many ranks, all-reduces without waits for other ranks.
        all_reduces: those of the last step that the device took part in.
        staleness: for each update, the age of the weights that its gradients were computed with,
            in updates.
    """

    device: str
    stages: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    peak_bytes: int
    needed_bytes: int | None = None
    total_bytes: int | None = None
    capacity_bytes: int | None = None
    allocator: AllocatorPeaks | None = None
    peak_by_kind: dict[str, int] = {}
    peak_node: int | None = None
    peak_place: str = ""
    step_peak_bytes: tuple[int, ...] = ()
    largest: tuple[LiveStorage, ...] = ()
    curve: MemoryCurve | None = None
    plain_curve: MemoryCurve | None = None
    events: tuple[Event, ...] = ()
    messages: tuple[MessageClass, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()
    staleness: tuple[int, ...] = ()

    @property
    def steady_peak_bytes(self) -> int:
        """The largest peak, the first step left out where there are others (it warms up)."""
        return max(self.step_peak_bytes[1:], default=self.peak_bytes)


class Prediction(CheckedStruct, frozen=True, kw_only=True):
    """What the plan of a run predicted.

    Attributes:
        step_seconds: 0 if it was not predicted.
        peak_bytes: by device.
        busy: by device, the share of the step that it computes in; empty if unknown.
    """

    step_seconds: float
    peak_bytes: tuple[int, ...]
    busy: tuple[float, ...] = ()


class DataPosition(CheckedStruct, frozen=True, kw_only=True):
    """Where training is in its data; the order of samples follows from these numbers.

    Attributes:
        index: samples of the epoch's order that were used, or left out at its end.
    """

    seed: int = 0
    epoch: int = 0
    index: int = 0


class InputRecord(CheckedStruct, frozen=True, kw_only=True):
    """The samples that a run was given, and how fast they came.

    Attributes:
        kind: `images`, `tar shards`, `tokens` or `synthetic`.
        source: the folder or file; empty for synthetic samples.
        num_workers: processes that read samples; 0 reads them between steps.
        dropped_samples: samples of each epoch that do not fill a batch.
        wait_seconds: for each measured step, how long it waited for its samples.
        made_samples, making_seconds: that workers have made for training, and what they took, all
            workers together.
        skipped: the first samples that could not be read, by name; other samples took their places.
        position: of the sample that comes next.
    """

    kind: str
    source: str = ""
    num_workers: int = 0
    dropped_samples: int = 0
    wait_seconds: tuple[float, ...] = ()
    made_samples: int = 0
    making_seconds: float = 0.0
    num_skipped: int = 0
    skipped: tuple[str, ...] = ()
    position: DataPosition = DataPosition()

    @property
    def samples_per_second(self) -> float | None:
        """What all workers can give together; None where samples cost nothing."""
        seconds = self.making_seconds
        return max(1, self.num_workers) * self.made_samples / seconds if seconds else None

    @property
    def typical_wait_seconds(self) -> float:
        """The mean, as waits come in bursts."""
        return statistics.fmean(self.wait_seconds) if self.wait_seconds else 0.0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How good the model was after an epoch, on samples that it was not trained on.

    Attributes:
        epoch: counted from 0.
        loss: mean over samples; None where it is no number.
        accuracy: share of samples whose class was the model's first choice; None for text.
        perplexity: of text; None for classes, or where it is too large for a number.
    """

    epoch: int
    num_samples: int
    loss: float | None
    accuracy: float | None = None
    perplexity: float | None = None
    seconds: float = 0.0


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What some steps did, or would do.

    Attributes:
        source: whether the steps were replayed or really ran.
        method: how memory was found: `liveness` (simulated), `malloc`, `cuda-allocator`, or
            `storages` (tensors only).
        model, fingerprint: of the graph; empty where a loop was recorded without one.
        clock: `cpu` is, of a recording, processor time of the whole process.
        step_seconds: s, one entry per step.
        step_spread_seconds: s: uncertainty of a simulated step.
        devices: one entry per device.
        not_counted: in words, what the peak leaves out.
        versions: as in a profile.
        num_samples: of one step; null if unknown.
        epoch_samples: of an epoch; its time is extrapolated from the median step and its wait for
            samples.
        losses: one for each step; on many ranks and on data, also of the first step, which is a
            warm-up. Losses that are not finite are left out.
        predicted: what the plan of the run predicted.
        limit_bytes: bytes: of the plan, for each device.
        plain_seconds, data_parallel_seconds: s: of the step without a plan, and of pure data
            parallel on the same devices; predicted.
        tradeoff: other plans of the same step.
        command: that made the record, as it was typed.
        input: the samples of the training; null if every step had the same batch.
        evaluations: one for each epoch that was evaluated.
    """

    schema: str = "bayplan/record"
    version: int = 1
    source: Source
    method: str
    model: str = ""
    fingerprint: str = ""
    clock: Clock = Clock.WALL
    step_seconds: tuple[float, ...]
    step_spread_seconds: float = 0.0
    devices: tuple[DeviceRecord, ...]
    not_counted: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    num_samples: int | None = None
    epoch_samples: int | None = None
    losses: tuple[float, ...] = ()
    predicted: Prediction | None = None
    limit_bytes: int | None = None
    plain_seconds: float | None = None
    data_parallel_seconds: float | None = None
    tradeoff: tuple[PlanPoint, ...] = ()
    command: str = ""
    input: InputRecord | None = None
    evaluations: tuple[Evaluation, ...] = ()

    def __post_init__(self) -> None:
        check_figures("step_seconds", self.step_seconds)
        check_at_least_1(num_samples=self.num_samples, epoch_samples=self.epoch_samples)
        check_not_negative(step_spread_seconds=self.step_spread_seconds)
        for name in ("peak_bytes", "busy") if self.predicted is not None else ():
            num_predicted, num_devices = len(getattr(self.predicted, name)), len(self.devices)
            if num_predicted not in (num_devices, 0):
                raise ValueError(
                    f"predicted.{name} is of {num_predicted} devices, but there are {num_devices}"
                )
        for index, device in enumerate(self.devices):
            for name in ("curve", "plain_curve") if self.source is Source.SIMULATED else ():
                curve: MemoryCurve | None = getattr(device, name)
                if curve is not None:
                    # Every storage is known here, so bytes are never below 0 as in a measured one.
                    place = f"devices[{index}].{name}"
                    check_figures(f"{place}.total_bytes", curve.total_bytes)
                    for kind, column in curve.by_kind.items():
                        check_figures(f"{place}.by_kind[{kind!r}]", column)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any device; 0 for an empty record."""
        return max((device.peak_bytes for device in self.devices), default=0)

    @property
    def steady_peak_bytes(self) -> int:
        return max((device.steady_peak_bytes for device in self.devices), default=0)

    @property
    def typical_step_seconds(self) -> float:
        """Median step time, the first step left out where there are others (it warms up)."""
        steady = self.step_seconds[1:] or self.step_seconds
        return statistics.median(steady) if steady else 0.0

    @property
    def samples_per_second(self) -> float | None:
        """By the median step, and what steps wait for their samples; None if unknown."""
        seconds = self.typical_step_seconds
        seconds += self.input.typical_wait_seconds if self.input is not None else 0.0
        return self.num_samples / seconds if self.num_samples and seconds else None

    @property
    def epoch_seconds(self) -> float | None:
        """What an epoch would take, extrapolated from the median step; None if unknown."""
        speed = self.samples_per_second
        return self.epoch_samples / speed if self.epoch_samples and speed else None

    @property
    def busy(self) -> tuple[float | None, ...]:
        """By device, the share of the last step that it computed in; None without events."""
        whole = self.events_seconds
        return tuple(
            sum(event.seconds for event in device.events if event.lane is Lane.COMPUTE) / whole
            if device.events and whole
            else None
            for device in self.devices
        )

    @property
    def events_seconds(self) -> float:
        """When the last event of any device ends."""
        events = (event for device in self.devices for event in device.events)
        return max((event.start_seconds + event.seconds for event in events), default=0.0)


class StepParts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the time of a device went; the parts of a device are one step together.

    Attributes:
        compute: forwards and backwards.
        update: the optimizer's.
        messages: values are sent, or waited for.
        sums: all-reduces that are waited for; what is hidden behind backward is not here.
        samples: that are waited for, of the input pipeline.
        waiting: everything else, such as copies, the loss and other ranks.
    """

    compute: float
    update: float
    messages: float
    sums: float
    samples: float
    waiting: float

    @property
    def seconds(self) -> float:
        return sum(msgspec.structs.astuple(self))


class DeviceDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device, or the mean of the devices of a stage, in both records.

    Attributes:
        parts: of each record; None where it has no events.
        peak_bytes: of each; the highest of a stage's devices.
    """

    name: str
    parts: tuple[StepParts | None, StepParts | None]
    peak_bytes: tuple[int, int]


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From the first record to the second.

    Attributes:
        step_seconds: of each.
        spread_seconds: of each; of a measured one, that of its steps.
        is_tie: both are simulated, or both measured, and each lies within the other's interval, so
            that nothing says which is faster.
        parts: the mean over all devices of each; None where a record has no events.
        stages, devices: those that both records have.
        peak_bytes: of the fullest device of each.
        peak_by_kind: the same by kind, of those whose kinds are known in both.
    """

    names: tuple[str, str]
    sources: tuple[Source, Source]
    step_seconds: tuple[float, float]
    spread_seconds: tuple[float, float]
    is_tie: bool
    parts: tuple[StepParts | None, StepParts | None]
    stages: tuple[DeviceDifference, ...] = ()
    devices: tuple[DeviceDifference, ...] = ()
    peak_bytes: tuple[int, int]
    peak_by_kind: dict[str, tuple[int, int]] = {}
