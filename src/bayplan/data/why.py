"""`Why`: what a split's time consists of, and what other splits would cost."""

import msgspec

from bayplan.data.judgement import Judgement

__all__ = ["Alternative", "Gain", "Why"]


class Gain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the difference to pure data parallel.

    Attributes:
        name: where it comes from.
        seconds: of a batch that are saved; below 0 if it costs.
        note: how it was found, or what it means.
    """

    name: str
    seconds: float
    note: str = ""


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another split.

    Attributes:
        shape: its stages, as `7:1` devices.
        seconds: of a batch; None if it does not fit.
        reason: why it was not chosen.
        is_tie: whether figures are too uncertain to say that it is slower.
    """

    name: str
    shape: str
    seconds: float | None
    reason: str
    is_tie: bool = False


class Why(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An explained split; everything is simulated.

    Attributes:
        shape: its stages, as `7:1` devices.
        num_micro_batches, schedule, staleness: how a batch passes.
        binding: what a faster batch would have to make faster, in a sentence.
        findings: what it comes down to, in sentences.
        data_parallel_seconds: of pure data parallel on the same devices; None if it does not fit.
        gains: parts of the difference to it, and together all of it.
        alternatives: other splits, the fastest first.
    """

    schema: str = "bayplan/why"
    version: int = 1
    name: str
    shape: str
    num_micro_batches: int
    schedule: str
    staleness: int
    judgement: Judgement
    binding: str
    findings: tuple[str, ...] = ()
    data_parallel_seconds: float | None = None
    gains: tuple[Gain, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
