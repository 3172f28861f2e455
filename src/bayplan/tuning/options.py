"""`TuningOptions`: how a tuner searches, and what it does afterwards."""

from dataclasses import dataclass

from bayplan.data.errors import UsageError

__all__ = ["TuningOptions"]


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How to search.

    Attributes:
        least_gain: what a change must gain to be worth having, as a share of a step.
        most_steps: of one search; None for 190, and 500 where steps scatter by more than 6 %.
        first_steps: of a run that are not to be counted, while caches and pages fill.
        switch_steps: after each change of the setting that are not to be counted.
        expected_error: how far predictions are off, one against the other, before any was
            compared with what it predicts.
        is_watching: whether to go on after the search, and begin another when the network changes.
        watched_steps: between two reports while it is watched.
        seed: of what Optuna proposes.
    """

    least_gain: float = 0.02
    most_steps: int | None = None
    first_steps: int = 3
    switch_steps: int = 1
    expected_error: float = 0.3
    is_watching: bool = False
    watched_steps: int = 20
    seed: int = 0

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
