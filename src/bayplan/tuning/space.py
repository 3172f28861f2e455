"""`SearchSpace`: the settings among which one is to be found."""

import math
from dataclasses import dataclass

import msgspec

from bayplan.data.errors import UsageError
from bayplan.data.exchange_settings import ExchangeSettings

__all__ = ["RANGED", "Range", "SearchSpace"]

RANGED = ("fusion_threshold_bytes", "cycle_time_ms", "strip_bytes")
_SHOWN = 3


@dataclass(frozen=True)
class Range:
    """A setting that may have any value between two, both included.

    Attributes:
        name: of the setting.
    """

    name: str
    least: float
    most: float

    def __post_init__(self) -> None:
        if self.name not in RANGED:
            raise UsageError(f"{self.name!r} has no range; those with one: {', '.join(RANGED)}")
        if not self.least < self.most:
            raise UsageError(
                f"the range of {self.name} is from {self.least:g} to {self.most:g}, its end must"
                " be above its start"
            )
        if not math.isfinite(self.most):
            raise UsageError(f"the range of {self.name} ends at {self.most}, must be finite")
        if self.is_bytes and self.least < 1:
            raise UsageError(
                f"the range of {self.name} starts at {self.least:g}, must be 1 or more; give 0 as a"
                " candidate of its own"
            )

    @property
    def is_bytes(self) -> bool:
        """Whether it is searched by doublings, in whole numbers."""
        return self.name.endswith("_bytes")


@dataclass(frozen=True)
class SearchSpace:
    """Some settings, and ranges in which those that have a number there may be changed.

    Attributes:
        candidates: tried first; enough of them for a good choice.
        ranges: searched around what was found; none by default.

    Example:
        >>> space = SearchSpace.of_thresholds([1 << 20, 25 << 20])
        >>> [str(one) for one in space.candidates]
        ['planned', 'fusion_threshold=1MiB', 'fusion_threshold=25MiB']
    """

    candidates: tuple[ExchangeSettings, ...]
    ranges: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        if not self.candidates:
            raise UsageError("there is no setting to choose from; give at least one")
        twice = [str(one) for one in self.candidates if self.candidates.count(one) > 1]
        if twice:
            raise UsageError(f"given more than once: {'; '.join(sorted(set(twice))[:_SHOWN])}")
        names = [one.name for one in self.ranges]
        if len(set(names)) < len(names):
            raise UsageError(f"there are two ranges of one setting: {', '.join(names)}")
        for kind in self.kinds:  # settings are checked when they are made
            for one in self.ranges_of(kind):
                self.filled(kind, {one.name: one.most})

    @classmethod
    def of_thresholds(cls, thresholds_bytes: "list[int] | tuple[int, ...]") -> "SearchSpace":
        """The planned buckets, and some fusion thresholds."""
        fused = [ExchangeSettings(fusion_threshold_bytes=one) for one in thresholds_bytes]
        return cls((ExchangeSettings(), *fused))

    @property
    def kinds(self) -> tuple[ExchangeSettings, ...]:
        """Candidates that differ in more than what has a range, at their ranges' starts."""
        found = dict.fromkeys(
            self.filled(one, {each.name: each.least for each in self.ranges_of(one)})
            for one in self.candidates
            if self.ranges_of(one)
        )
        return tuple(found)

    def ranges_of(self, setting: ExchangeSettings) -> tuple[Range, ...]:
        """Those in which it may be changed: planned buckets have no threshold."""
        return tuple(one for one in self.ranges if getattr(setting, one.name) is not None)

    def filled(self, setting: ExchangeSettings, values: dict[str, float]) -> ExchangeSettings:
        """The same with other numbers."""
        whole = {
            name: round(value) if name.endswith("_bytes") else value
            for name, value in values.items()
        }
        return msgspec.structs.replace(setting, **whole)

    def contains(self, setting: ExchangeSettings) -> bool:
        """Whether it may be chosen."""
        if setting in self.candidates:
            return True
        ranges = self.ranges_of(setting)
        is_inside = all(one.least <= getattr(setting, one.name) <= one.most for one in ranges)
        kind = self.filled(setting, {one.name: one.least for one in ranges})
        return bool(ranges) and is_inside and kind in self.kinds
