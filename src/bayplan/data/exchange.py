"""How gradients are exchanged: `ExchangeSettings`, `BucketFile`, and what a tuner found.

Horovod's settings exist so that its configurations can be run and compared. Some have no effect
here, and `EXCHANGE_HELP` says so: all ranks all-reduce in the order of the plan, so nothing is
negotiated and there is no response to cache; and a bucket leaves as soon as its last gradient is
made, so nobody polls for ready gradients every few milliseconds.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from bayplan.data.errors import CheckedStruct, ForeignPlan, UsageError, did_you_mean
from bayplan.data.record import MessageClass
from bayplan.data.units import parse_bytes

__all__ = [
    "EXCHANGE_HELP",
    "Algorithm",
    "BucketFile",
    "ComparedSetting",
    "Compression",
    "ExchangeSettings",
    "TuningKey",
    "TuningRecord",
]

_MOST_BYTES = 1 << 30
_LEAST_STRIP_BYTES = 1 << 12
_MOST_CYCLE_MS = 1000.0
_STRIP_BYTES = 1 << 20  # 1 MiB: chunks below that cost more than their overlap gains

EXCHANGE_HELP: Mapping[str, str] = {
    "fusion_threshold_bytes": (
        "the most bytes of a bucket; gradients go in the order in which backward makes them;"
        " 0 sends each gradient alone; by default the plan decides"
    ),
    "cycle_time_ms": (
        "ready buckets are sent only every so many milliseconds, as Horovod does; 0 sends them at"
        " once. For comparison only: a full bucket gains nothing by waiting"
    ),
    "cache_enabled": (
        "Horovod's response cache. No effect here: all ranks all-reduce in the planned order, so"
        " nothing is negotiated"
    ),
    "hierarchical_allreduce": (
        "all-reduce inside each host first, then between hosts; by default the measured cost"
        " decides"
    ),
    "hierarchical_allgather": (
        "Horovod's setting for all-gather. No effect here: gradients are all-reduced, not gathered"
    ),
    "algorithm": (
        "how a bucket is all-reduced: ring, reduce_scatter (and all-gather), hierarchical, or"
        " shared (memory that the ranks of a host share); auto takes the cheapest at its size"
    ),
    "strip_bytes": (
        "a hierarchical all-reduce goes in strips of this size: one strip is between hosts while"
        " the next is inside them"
    ),
    "compression": (
        "fp16 or bf16 halves what is sent and rounds gradients to 11 or 8 bits before they are"
        " added, so results change; none, the default, sends them as they are"
    ),
}


class Algorithm(StrEnum):
    """How ranks all-reduce a bucket."""

    AUTO = "auto"
    RING = "ring"
    REDUCE_SCATTER = "reduce_scatter"
    HIERARCHICAL = "hierarchical"
    SHARED = "shared"


class Compression(StrEnum):
    """The type in which gradients travel."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"


class ExchangeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to exchange gradients; `EXCHANGE_HELP` tells what each setting does.

    Attributes:
        fusion_threshold_bytes: 0 to 1 GiB; 0 is off, None takes the planned buckets.
        cycle_time_ms: 0 to 1000; 0 sends at once.
        cache_enabled, hierarchical_allgather: without effect.
        hierarchical_allreduce: None is chosen by measured cost.
        strip_bytes: 4 KiB to 1 GiB.

    Example:
        >>> settings = ExchangeSettings(fusion_threshold_bytes=25 << 20, algorithm=Algorithm.RING)
        >>> str(settings)
        'fusion_threshold=25MiB,algorithm=ring'
    """

    fusion_threshold_bytes: int | None = None
    cycle_time_ms: float = 0.0
    cache_enabled: bool = False
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool = False
    algorithm: Algorithm = Algorithm.AUTO
    strip_bytes: int = _STRIP_BYTES
    compression: Compression = Compression.NONE

    def __post_init__(self) -> None:
        if self.fusion_threshold_bytes is not None:
            _check("fusion_threshold_bytes", self.fusion_threshold_bytes, 0, _MOST_BYTES)
        _check("cycle_time_ms", self.cycle_time_ms, 0, _MOST_CYCLE_MS)
        _check("strip_bytes", self.strip_bytes, _LEAST_STRIP_BYTES, _MOST_BYTES)
        is_hierarchical = self.algorithm is Algorithm.HIERARCHICAL
        is_free = self.algorithm is Algorithm.AUTO or self.hierarchical_allreduce is None
        if not is_free and self.hierarchical_allreduce is not is_hierarchical:
            raise ValueError(
                f"algorithm is {self.algorithm}, hierarchical_allreduce is"
                f" {_text(self.hierarchical_allreduce)}; leave one of them to be chosen"
            )

    @classmethod
    def parse(cls, text: str) -> "ExchangeSettings":
        """Read what `str` prints; settings that are not named have their defaults."""
        if text in ("", "planned"):
            return cls()
        fields = dict(map(_parse_setting, text.split(",")))
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as fault:
            raise UsageError(f"cannot read {text!r} as settings: {fault}") from None

    def __str__(self) -> str:
        changed = [
            f"{_short(field.name)}={_text(getattr(self, field.name))}"
            for field in msgspec.structs.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "planned"


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # of nan neither holds
        raise ValueError(f"{name} is {value}, must be from {least:g} to {most:.10g}")


def _short(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_ms")


def _text(value: object) -> str:
    """Print a value without loss; integers are bytes, in the largest unit that divides them."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value:
        for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value % factor == 0:
                return f"{value // factor}{unit}"
    return str(value)


def _parse_setting(part: str) -> tuple[str, object]:
    short, equals, text = (word.strip() for word in part.partition("="))
    names = {_short(name): name for name in EXCHANGE_HELP}
    if short not in names:
        raise UsageError(f"no setting is called {short!r}; {did_you_mean(short, names)}")
    if not equals or not text:
        raise UsageError(f"{short} has no value; write {short}=...")
    name = names[short]
    if name.endswith("_bytes"):
        return name, 0 if text == "0" else parse_bytes(text)
    if name == "cycle_time_ms":
        try:
            return name, float(text)
        except ValueError:
            raise UsageError(f"{short} is {text!r}, must be milliseconds, like 5") from None
    if name.startswith(("cache", "hierarchical")):
        words = {"on": True, "off": False}
        if text not in words:
            raise UsageError(f"{short} is {text!r}, must be on or off")
        return name, words[text]
    return name, text


class BucketFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Buckets in the order they leave.

    Attributes:
        model: the target that they were found for.
        buckets: lists of parameter names, in the order they leave; each parameter once, none empty.
        settings: those that were found with them.
        verdict: why these are the best, in words.
    """

    schema: str = "bayplan/buckets"
    version: int = 1
    model: str
    buckets: tuple[tuple[str, ...], ...]
    settings: ExchangeSettings = ExchangeSettings()
    verdict: str = ""

    def __post_init__(self) -> None:
        counts = Counter(name for bucket in self.buckets for name in bucket)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"buckets name {_listed(twice)} more than once")
        if not all(self.buckets):
            raise ValueError("a bucket is empty; leave it out")

    def check(self, parameters: Iterable[str]) -> None:
        """Raise ForeignPlan unless the buckets have each trained parameter, and no others."""
        named = {name for bucket in self.buckets for name in bucket}
        known = set(parameters)
        faults = [
            f"{len(names)} {what} ({_listed(sorted(names))})"
            for names, what in (
                (named - known, "of its parameters are not in this model"),
                (known - named, "of this model's are in no bucket"),
            )
            if names
        ]
        if faults:
            raise ForeignPlan(f"these buckets are for {self.model}: {', '.join(faults)}; tune anew")


def _listed(names: Sequence[str]) -> str:
    """The first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class TuningKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a result depends on."""

    model: str  # a fingerprint
    host_of_rank: tuple[int, ...]  # counted from 0 by their first rank; names do not matter
    devices: tuple[str, ...]  # by rank, their names
    torch_version: str

    def __post_init__(self) -> None:
        if not self.host_of_rank:
            raise ValueError("host_of_rank is empty; there is at least one rank")
        if len(self.host_of_rank) != len(self.devices):
            raise ValueError(
                f"host_of_rank names {len(self.host_of_rank)} ranks, devices {len(self.devices)}"
            )

    @classmethod
    def of(
        cls, *, model: str, hosts: Sequence[str], devices: Sequence[str], torch_version: str
    ) -> "TuningKey":
        """The key of ranks on hosts of these names, by rank."""
        order = list(dict.fromkeys(hosts))
        return cls(
            model=model,
            host_of_rank=tuple(map(order.index, hosts)),
            devices=tuple(devices),
            torch_version=torch_version,
        )

    @property
    def name(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:24]


class ComparedSetting(CheckedStruct, frozen=True, kw_only=True):
    """A setting that was compared with the best."""

    setting: ExchangeSettings
    ratio: float  # its seconds over the best one's
    spread: float  # how far that may be off, as a share

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ratio:
            raise ValueError("ratio is 0, must be more")


class TuningRecord(CheckedStruct, frozen=True, kw_only=True):
    """The end of a search."""

    schema: str = "bayplan/tuning"
    version: int = 1
    key: TuningKey
    best: ExchangeSettings
    step_seconds: float  # the median step with the best setting
    step_spread: float  # how far single steps scatter, as a share
    num_steps: int  # of the search
    verdict: str  # why it ended, in words
    compared: tuple[ComparedSetting, ...] = ()  # the others that were measured
    messages: tuple[MessageClass, ...] = ()  # of one rank, while it was tuned

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step_seconds:
            raise ValueError("step_seconds is 0, must be more")
