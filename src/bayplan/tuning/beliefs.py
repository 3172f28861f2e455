"""`Beliefs`: what every setting's step may take, from a prediction and from comparisons.

NOTE [ What is believed ]
For each setting x, f(x) is the logarithm of its true seconds.

    f(x) = log predicted(x) + k(x) + e(x)   the prediction's errors: one of all settings of a kind,
                                            and one that is alike for numbers near each other
    y    = f(x) - f(x') + noise             a comparison: blocks of x and x' measured side by side

1. A factor that all predictions are wrong by is in no difference, so it never matters.
2. How large both errors are is learnt: of several sizes, each counts as much as it explains the
   comparisons. What is learnt inside a kind makes no other kind look surer.
3. All is normal, so that the answer is exact: a Gaussian process over errors, seen through
   differences (Rasmussen and Williams, chapter 2). Optuna's samplers propose points but do not tell
   what a point may still be worth, and that is what decides when to stop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bayplan.data.exchange_settings import ExchangeSettings
from bayplan.tuning.likeness import likeness

__all__ = ["Beliefs", "Comparison", "Outlook"]

Floats = NDArray[np.float64]

_SIZES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # of the error, times the expected one
_OF_NUMBERS = 0.4  # the error that numbers make, over that of kinds
_DOUBT = 0.7  # how far the error's size may be from the expected one, as a logarithm


@dataclass(frozen=True)
class Comparison:
    """Two settings, measured side by side.

    Attributes:
        log_ratio: of the first's seconds over the second's.
        variance: how far that may be off by noise, squared.
    """

    first: int
    second: int
    log_ratio: float
    variance: float


@dataclass(frozen=True)
class Outlook:
    """How a setting may compare with another one; logarithms of the ratio of their seconds."""

    mean: float
    spread: float

    def chance_below(self, log_ratio: float) -> float:
        """How likely the true ratio is less.

        Example:
            >>> Outlook(mean=0.0, spread=0.01).chance_below(0.0)
            0.5
        """
        if not self.spread:
            return float(self.mean < log_ratio)
        return _normal_below((log_ratio - self.mean) / self.spread)

    @property
    def expected_gain(self) -> float:
        """What trying it will gain on average, when a loss is not taken."""
        if not self.spread:
            return max(-self.mean, 0.0)
        reach = -self.mean / self.spread
        density = math.exp(-(reach**2) / 2) / math.sqrt(2 * math.pi)
        return self.spread * density - self.mean * _normal_below(reach)


class Beliefs:
    """About some settings; made anew from all comparisons, for that takes milliseconds.

    Attributes:
        error: how far predictions of two kinds are off, one against the other, as a logarithm;
            learnt.

    Args:
        settings: to be compared.
        predicted_seconds: of each.
        comparisons: by index of settings.
        expected_error: what `error` is thought to be before anything is measured.
    """

    def __init__(
        self,
        settings: Sequence[ExchangeSettings],
        predicted_seconds: Sequence[float],
        comparisons: Sequence[Comparison],
        *,
        expected_error: float,
    ) -> None:
        self._mean: Floats = np.log(np.array(predicted_seconds, dtype=np.float64))
        alike = likeness(settings)
        # Of two settings, the errors' difference has twice the variance of each.
        units = [
            alike.of_kind * expected_error**2 / 2,
            alike.of_numbers * (_OF_NUMBERS * expected_error) ** 2 / 2,
        ]
        seen: Floats = np.zeros((len(comparisons), len(settings)))
        for row, one in enumerate(comparisons):
            seen[row, one.first], seen[row, one.second] = 1.0, -1.0
        surprises = np.array([one.log_ratio for one in comparisons]) - seen @ self._mean
        noise: Floats = np.diag([one.variance for one in comparisons])
        sizes = _sizes([seen @ unit @ seen.T for unit in units], surprises, noise)
        self._covariance: Floats = sizes[0] * units[0] + sizes[1] * units[1]
        self.error = expected_error * math.sqrt(sizes[0] + _OF_NUMBERS**2 * sizes[1])
        if comparisons:
            across = self._covariance @ seen.T
            gain = np.linalg.solve(seen @ across + noise, across.T).T
            self._mean = self._mean + gain @ surprises
            self._covariance = self._covariance - gain @ across.T

    def outlook(self, setting: int, against: int) -> Outlook:
        """How a setting may compare with another, by index."""
        covariance = self._covariance
        variance = (
            covariance[setting, setting]
            + covariance[against, against]
            - 2 * covariance[setting, against]
        )
        mean = self._mean[setting] - self._mean[against]
        return Outlook(float(mean), math.sqrt(max(float(variance), 0.0)))


def _sizes(units: Sequence[Floats], surprises: Floats, noise: Floats) -> tuple[float, float]:
    """How many times the expected variance that of each error is, by rule 2."""
    pairs = list(product(_SIZES, _SIZES))
    logs = [
        -sum((math.log(size) / _DOUBT) ** 2 for size in pair) / 2
        + _evidence(pair[0] ** 2 * units[0] + pair[1] ** 2 * units[1] + noise, surprises)
        for pair in pairs
    ]
    most = max(logs)
    weights = [math.exp(log - most) for log in logs]
    of_kind, of_numbers = (
        sum(weight * pair[which] ** 2 for weight, pair in zip(weights, pairs, strict=True))
        for which in (0, 1)
    )
    return of_kind / sum(weights), of_numbers / sum(weights)


def _evidence(covariance: Floats, surprises: Floats) -> float:
    """The logarithm of how well errors of this size explain what was seen."""
    if not len(surprises):
        return 0.0
    _, log_volume = np.linalg.slogdet(covariance)
    return float(-(log_volume + surprises @ np.linalg.solve(covariance, surprises)) / 2)


def _normal_below(reach: float) -> float:
    return (1 + math.erf(reach / math.sqrt(2))) / 2
