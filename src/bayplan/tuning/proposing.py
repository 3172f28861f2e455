"""Settings inside ranges that are worth a look, proposed by Optuna.

Its sampler (a tree of Parzen estimators) is told what is believed of every setting so far, measured
or predicted, and proposes where good ones lie densely. It only proposes: whether a proposal is
worth measuring is decided by what is believed of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bayplan.data.errors import UsageError
from bayplan.data.exchange_settings import ExchangeSettings
from bayplan.tuning.space import SearchSpace

if TYPE_CHECKING:
    import optuna

__all__ = ["propose"]

_GRAIN_BYTES = 1 << 12  # a page: finer differences have no effect, and print badly
_KIND = "kind"


def propose(
    space: SearchSpace,
    believed: Sequence[tuple[ExchangeSettings, float]],
    *,
    count: int,
    seed: int,
) -> list[ExchangeSettings]:
    """Some settings inside the ranges, the same for the same arguments.

    Args:
        space: with ranges.
        believed: settings with the logarithm of their seconds, against any unit.
        count: of proposals; fewer if some are equal.
        seed: of the sampler.

    Raises:
        UsageError: Optuna is not installed.
    """
    if not space.kinds:
        return []
    study = _study(seed)
    for setting, log_seconds in believed:
        _tell(study, space, setting, log_seconds)
    found: dict[ExchangeSettings, None] = {}
    for _ in range(count):
        asked = study.ask(_distributions(space))
        found[_setting(space, asked.params)] = None
    return [one for one in found if space.contains(one)]


def _study(seed: int) -> "optuna.Study":
    try:
        import optuna  # here, for it takes a second that no other command has to wait
    except ImportError:
        raise UsageError(
            "searching in ranges needs Optuna: pip install 'bayplan[tune]', or give candidates"
            " without ranges"
        ) from None
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it announces every study
    try:
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0)
        return optuna.create_study(sampler=sampler)
    finally:
        optuna.logging.set_verbosity(level)


def _distributions(space: SearchSpace) -> "dict[str, optuna.distributions.BaseDistribution]":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    found: dict[str, Any] = {_KIND: CategoricalDistribution(range(len(space.kinds)))}
    for one in space.ranges:
        found[one.name] = (
            IntDistribution(round(one.least), round(one.most), log=True)
            if one.is_bytes
            else FloatDistribution(one.least, one.most)
        )
    return found


def _tell(
    study: "optuna.Study", space: SearchSpace, setting: ExchangeSettings, log_seconds: float
) -> None:
    """Let the study know a setting, if it lies inside the ranges."""
    from optuna.trial import create_trial

    ranges = space.ranges_of(setting)
    kind = space.filled(setting, {one.name: one.least for one in ranges})
    values = {one.name: getattr(setting, one.name) for one in ranges}
    is_inside = all(one.least <= values[one.name] <= one.most for one in ranges)
    if kind not in space.kinds or len(ranges) < len(space.ranges) or not is_inside:
        return
    study.add_trial(
        create_trial(
            params={_KIND: space.kinds.index(kind), **values},
            distributions=_distributions(space),
            value=log_seconds,
        )
    )


def _setting(space: SearchSpace, values: dict[str, Any]) -> ExchangeSettings:
    kind = space.kinds[values[_KIND]]
    own = {one.name: values[one.name] for one in space.ranges_of(kind)}
    for one in space.ranges_of(kind):
        if one.is_bytes:
            rounded = round(own[one.name] / _GRAIN_BYTES) * _GRAIN_BYTES
            own[one.name] = min(max(rounded, one.least), one.most)
    return space.filled(kind, own)
