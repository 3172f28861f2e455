"""`SearchSpace`: the settings that a tuner may choose from; `propose`: those inside ranges."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bayplan.data.errors import UsageError
from bayplan.data.exchange import ExchangeSettings

__all__ = ["Range", "SearchSpace", "TuningOptions", "propose"]

_RANGED = ("fusion_threshold_bytes", "cycle_time_ms", "strip_bytes")
_SHOWN = 3
_GRAIN_BYTES = 1 << 12  # a page: finer differences have no effect, and print badly


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How to search."""

    least_gain: float = 0.02  # what a change must gain to be worth having, as a share of a step
    most_steps: int | None = None  # of a search; None: 190, or 500 if steps scatter by over 6 %
    first_steps: int = 3  # of a run that do not count, while caches and pages fill
    switch_steps: int = 1  # that do not count after each change of the setting
    expected_error: float = 0.3  # of predictions, one against the other, before any is measured
    is_watching: bool = False  # whether to search again when the network changes
    watched_steps: int = 20  # between two reports while watching
    seed: int = 0  # of what Optuna proposes

    def __post_init__(self) -> None:
        for name, least, most in (
            ("least_gain", 0.001, 0.5),
            ("most_steps", 20, 1_000_000),
            ("first_steps", 0, 1000),
            ("switch_steps", 0, 100),
            ("expected_error", 0.01, 2.0),
            ("watched_steps", 1, 10_000),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name} is {value}, must be from {least:g} to {most:g}")


@dataclass(frozen=True)
class Range:
    """All values of one setting between two, both included; bytes are searched by doublings."""

    name: str
    least: float
    most: float

    def __post_init__(self) -> None:
        if self.name not in _RANGED:
            raise UsageError(f"{self.name!r} has no range; those with one: {', '.join(_RANGED)}")
        given = f"the range of {self.name} is from {self.least:g} to {self.most:g}"
        if not self.least < self.most:
            raise UsageError(f"{given}, its end must be above its start")
        if not math.isfinite(self.most):
            raise UsageError(f"{given}, its end must be finite")
        if self.is_bytes and self.least < 1:
            raise UsageError(f"{given}, its start must be 1 or more; give 0 as a candidate")

    @property
    def is_bytes(self) -> bool:
        return self.name.endswith("_bytes")


@dataclass(frozen=True)
class SearchSpace:
    """Candidates, and ranges in which their numbers may be changed.

    Attributes:
        ranges: searched around the best candidates. A candidate without such a number (planned
            buckets have no threshold) is left as it is.

    Example:
        >>> space = SearchSpace.of_thresholds([1 << 20, 25 << 20])
        >>> [str(candidate) for candidate in space.candidates]
        ['planned', 'fusion_threshold=1MiB', 'fusion_threshold=25MiB']
    """

    candidates: tuple[ExchangeSettings, ...]
    ranges: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        if not self.candidates:
            raise UsageError("there is no setting to choose from; give at least one")
        twice = {str(setting) for setting in self.candidates if self.candidates.count(setting) > 1}
        if twice:
            raise UsageError(f"given more than once: {'; '.join(sorted(twice)[:_SHOWN])}")
        names = [limits.name for limits in self.ranges]
        if len(set(names)) < len(names):
            raise UsageError(f"there are two ranges of one setting: {', '.join(names)}")
        for kind in self.kinds:  # a range beyond what a setting may be is refused here
            for limits in self.ranges_of(kind):
                msgspec.structs.replace(kind, **{limits.name: limits.most})

    @classmethod
    def of_thresholds(cls, thresholds_bytes: Iterable[int]) -> "SearchSpace":
        """The planned buckets, and some fusion thresholds."""
        fused = [ExchangeSettings(fusion_threshold_bytes=size) for size in thresholds_bytes]
        return cls((ExchangeSettings(), *fused))

    @property
    def kinds(self) -> tuple[ExchangeSettings, ...]:
        """Candidates that differ in more than a number with a range; that is at its start."""
        ranged = [setting for setting in self.candidates if self.ranges_of(setting)]
        return tuple(dict.fromkeys(map(self.kind_of, ranged)))

    def kind_of(self, setting: ExchangeSettings) -> ExchangeSettings:
        starts = {
            limits.name: round(limits.least) if limits.is_bytes else limits.least
            for limits in self.ranges_of(setting)
        }
        return msgspec.structs.replace(setting, **starts)

    def contains(self, setting: ExchangeSettings) -> bool:
        return setting in self.candidates or self.is_inside(setting)

    def is_inside(self, setting: ExchangeSettings) -> bool:
        """Whether its numbers lie in the ranges and the rest of it is a candidate's."""
        return self.kind_of(setting) in self.kinds and all(
            limits.least <= getattr(setting, limits.name) <= limits.most
            for limits in self.ranges_of(setting)
        )

    def ranges_of(self, setting: ExchangeSettings) -> list[Range]:
        return [limits for limits in self.ranges if getattr(setting, limits.name) is not None]


def propose(
    space: SearchSpace,
    believed: Iterable[tuple[ExchangeSettings, float]],
    *,
    count: int,
    seed: int,
) -> list[ExchangeSettings]:
    """Settings inside the ranges, where good ones lie densely; the same for the same arguments.

    Optuna's sampler (a tree of Parzen estimators) only proposes. Whether a proposal is worth
    measuring is decided by what is believed of it.

    Args:
        believed: settings, measured or predicted, with the logarithm of their seconds in any unit.
        count: of proposals; fewer are returned if some are equal.

    Raises:
        UsageError: Optuna is not installed.
    """
    kinds = space.kinds
    if not kinds:
        return []
    try:
        import optuna  # takes a second, which no other command has to wait
    except ImportError:
        raise UsageError(
            "searching in ranges needs Optuna: pip install 'bayplan[tune]', or give candidates"
            " without ranges"
        ) from None

    def suggested(trial: optuna.Trial) -> ExchangeSettings:
        kind = kinds[trial.suggest_categorical("kind", range(len(kinds)))]
        values: dict[str, float] = {}
        for limits in space.ranges_of(kind):
            least, most = limits.least, limits.most
            if limits.is_bytes:
                size_bytes = trial.suggest_int(limits.name, round(least), round(most), log=True)
                pages = round(size_bytes / _GRAIN_BYTES) * _GRAIN_BYTES
                values[limits.name] = round(min(max(pages, least), most))
            else:
                values[limits.name] = trial.suggest_float(limits.name, least, most)
        return msgspec.structs.replace(kind, **values)

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it announces every study and trial
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
    study = optuna.create_study(sampler=sampler)
    for setting, log_seconds in believed:
        numbers = {limits.name: getattr(setting, limits.name) for limits in space.ranges}
        if space.is_inside(setting) and None not in numbers.values():
            study.enqueue_trial({"kind": kinds.index(space.kind_of(setting)), **numbers})
            suggested(trial := study.ask())
            study.tell(trial, log_seconds)
    proposals = [suggested(study.ask()) for _ in range(count)]
    optuna.logging.set_verbosity(level)
    return list(dict.fromkeys(proposals))
