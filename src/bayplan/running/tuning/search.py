"""`Search`: which setting to compare with the best so far, and when to stop.

NOTE [ What is believed ]
For each setting x, f(x) is the logarithm of its true seconds.

    f(x) = log predicted(x) + k(x) + e(x)   the prediction's errors: one shared by all settings of a
                                            kind, and one that is alike for numbers near each other
    y    = f(x) - f(x') + noise             a comparison: blocks of x and x' measured side by side

1. A prediction that is 10 % too low for buckets of 8 MiB will be so for 12 MiB, and less surely for
   256 KiB. For another algorithm it says nothing. A factor common to all cancels.
2. How large both errors are is learnt: several sizes are tried, each weighted by how well it
   explains the comparisons. What is learnt inside a kind makes no other kind look surer.
3. All is normal, so the answer is exact: a Gaussian process over errors, seen through differences
   (Rasmussen and Williams, chapter 2).
4. Steps have a tail: now and then one waits for a page, a neighbour or a garbage collector. So
   middles are medians, and spreads are median distances. A neighbour may slow a whole block, so a
   comparison far from others of its pair is left out, and two that contradict each other are hardly
   believed.

NOTE [ How it ends ]
1. A setting is open while the chance that it is faster than the best by more than the margin is
   above 5 %. The one with the largest expected gain is compared next. Others are never measured.
2. A setting that wins is compared once more before it is taken for the best.
3. Where the best so far takes no longer than a step without any exchange, nothing is open.
4. When no candidate is open, or the steps are used up, the search is over.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import NormalDist, fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bayplan.data.errors import UsageError
from bayplan.data.exchange import ExchangeSettings, TuningRecord
from bayplan.data.units import format_seconds

__all__ = [
    *("Beliefs", "Comparison", "Predict", "Search", "TuningOptions"),
    *("expected_gain", "merged"),
]

Predict = Callable[[ExchangeSettings], float]
_Array = NDArray[np.float64]

_ERROR_SIZES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # times the expected one
_SIZE_DOUBT = 0.7  # how far the size may be from the expected one, as a logarithm
_OF_NUMBERS = 0.4  # the error that numbers make, over that of kinds
_NEAR_SHARE = 0.9  # of that error, which neighbours share; the rest is each setting's alone
_REACH = 3.0  # in doublings: buckets twice as large are nearly the same, 64 times are not
_OF_NORMAL = 1.4826  # a normal distribution's spread over its median distance from the middle
_OF_MEDIAN = math.pi / 2  # the variance of a median over that of a mean
_LEAST_SPREAD = 0.002  # no clock of a whole step is better than that
_FAR = 3.0  # spreads of one comparison, beyond which another one is spoilt
_FEWEST_BLOCKS = 5  # whose middles tell how far blocks scatter
_FEWEST_STEPS, _MOST_STEPS = 5, 10  # of a block; of five, two may be spoilt
_CHANCE = 0.05
_OF_SCATTER = 0.25
_WHOLE_SCATTER = 0.04  # below the 5 % within which the best setting is to be found
_WIN = 0.25  # of the margin: less is not worth the steps that a change costs
_SURE = 0.8  # the chance of being faster from which on a setting becomes the best
_ANOTHER_DAY = 0.01  # how far ratios of settings move from one run to the next
_QUIET_STEPS, _LOUD_STEPS = 190, 500  # and some before, until buckets are planned
_QUIET_SPREAD = 0.06  # of steps, up to which so few are enough: see docs/tuning.md


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How to search; a value outside its range is refused."""

    least_gain: float = 0.02  # what a change must gain to be worth having, as a share of a step
    most_steps: int | None = None  # of a search; None: 190, or 500 if steps scatter by over 6 %
    first_steps: int = 3  # of a run that do not count, while caches and pages fill
    switch_steps: int = 1  # that do not count after each change of the setting
    expected_error: float = 0.3  # of predictions, one against the other, before any is measured
    is_watching: bool = False  # whether to search again when the network changes
    watched_steps: int = 20  # between two reports while watching

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


class Comparison(NamedTuple):
    """Two settings measured side by side; the first's seconds over the second's."""

    first: ExchangeSettings
    second: ExchangeSettings
    log_ratio: float
    variance: float  # of the logarithm, by noise


def merged(rounds: Sequence[Comparison]) -> Comparison:
    """What several comparisons of the same two say together: rule 4 of the first NOTE."""
    first, second, _, _ = rounds[0]
    ratios, variance = [ratio for _, _, ratio, _ in rounds], fmean(v for *_, v in rounds)
    middle = median(ratios)
    near = [ratio for ratio in ratios if (ratio - middle) ** 2 <= _FAR**2 * variance]
    if near:
        return Comparison(first, second, fmean(near), variance / len(near))
    return Comparison(first, second, middle, max((ratio - middle) ** 2 for ratio in ratios))


def expected_gain(log_ratio: NormalDist) -> float:
    """What trying a setting gains on average, when a loss is not taken."""
    return log_ratio.variance * log_ratio.pdf(0.0) - log_ratio.mean * log_ratio.cdf(0.0)


class Beliefs:
    """What a step with every setting may take; see the first NOTE.

    `error`: how far predictions of two kinds are off, one against the other, as a logarithm. It is
    learnt; before anything is measured it is thought to be `expected_error`.
    """

    def __init__(
        self,
        predicted: Mapping[ExchangeSettings, float],
        comparisons: Sequence[Comparison],
        *,
        expected_error: float,
    ) -> None:
        kinds = [
            (s.fusion_threshold_bytes is None, s.algorithm, s.hierarchical_allreduce, s.compression)
            for s in predicted
        ]
        # Equal distances mean equally much; buckets below 16 KiB all cost their latency.
        sizes = np.array([(s.fusion_threshold_bytes or 0) / (1 << 14) for s in predicted])
        rest = np.array([(2 * s.cycle_time_ms, s.strip_bytes) for s in predicted])
        places = np.log2(1 + np.column_stack([sizes, rest]))
        of_kind = np.array([[float(kind == other) for other in kinds] for kind in kinds])
        squares = ((places[:, None] - places) ** 2).sum(axis=2)
        near = _NEAR_SHARE * np.exp(-squares / (2 * _REACH**2)) + (1 - _NEAR_SHARE) * (squares == 0)
        # The difference of two errors has twice the variance of each.
        units = np.stack([of_kind, _OF_NUMBERS**2 * of_kind * near]) * expected_error**2 / 2

        self._rows = {setting: row for row, setting in enumerate(predicted)}
        mean = np.log(np.array(list(predicted.values())))
        seen = np.zeros((len(comparisons), len(predicted)))
        for row, (first, second, _, _) in enumerate(comparisons):
            seen[row, self._rows[first]], seen[row, self._rows[second]] = 1.0, -1.0
        surprises = np.array([ratio for _, _, ratio, _ in comparisons]) - seen @ mean
        noise = np.diag([variance for *_, variance in comparisons])
        scales = _error_scales(seen @ units @ seen.T, surprises, noise)
        self.error = expected_error * math.sqrt(scales @ [1.0, _OF_NUMBERS**2])
        covariance = np.tensordot(scales, units, axes=1)
        gain = np.linalg.solve(seen @ covariance @ seen.T + noise, seen @ covariance).T
        self._mean = mean + gain @ surprises
        self._covariance = covariance - gain @ seen @ covariance

    def log_ratio(self, setting: ExchangeSettings, against: ExchangeSettings) -> NormalDist:
        """Of a setting's seconds over those of another."""
        row, other, covariance = self._rows[setting], self._rows[against], self._covariance
        variance = covariance[row, row] + covariance[other, other] - 2 * covariance[row, other]
        mean = float(self._mean[row] - self._mean[other])
        return NormalDist(mean, math.sqrt(max(variance, 1e-18)))


def _error_scales(units: _Array, surprises: _Array, noise: _Array) -> _Array:
    """How many times the expected variance that of each error is: rule 2 of the first NOTE."""
    sizes = np.array(list(product(_ERROR_SIZES, repeat=2)))
    logs = []
    for pair in sizes:
        covariance = np.tensordot(pair**2, units, axes=1) + noise
        misfit = surprises @ np.linalg.solve(covariance, surprises)
        rarity = ((np.log(pair) / _SIZE_DOUBT) ** 2).sum()
        logs.append(-(np.linalg.slogdet(covariance).logabsdet + misfit + rarity) / 2)
    weights = np.exp(np.array(logs) - max(logs))
    return weights @ sizes**2 / weights.sum()


class Search:
    """One search; what it knows ends with the network it was learnt on.

    Args:
        known: what an earlier run found. Its best is begun with, if it is still a candidate, and
            what it compared is believed.
        begin_with: a candidate, where nothing else is known; by default the best by prediction.
        surprise: how far predictions are known to be off, as a logarithm.
        floor_seconds: what a step takes without any exchange; 0 if that is not known.
    """

    def __init__(
        self,
        candidates: Iterable[ExchangeSettings],
        predict: Predict,
        options: TuningOptions,
        *,
        known: TuningRecord | None = None,
        begin_with: ExchangeSettings | None = None,
        surprise: float = 0.0,
        floor_seconds: float = 0.0,
    ) -> None:
        self._options, self._floor_seconds = options, floor_seconds
        self._expected_error = max(options.expected_error, surprise)
        self.predicted = {setting: predict(setting) for setting in candidates}  # seconds of a step
        if not self.predicted:
            raise UsageError("there is no setting to choose from; give at least one")
        for setting, seconds in self.predicted.items():
            if not 0 < seconds < math.inf:
                raise UsageError(
                    f"a step with {setting} is predicted to take {seconds} s, must be more than 0"
                )
        self.best = begin_with or min(self.predicted, key=self.predicted.__getitem__)
        self.num_steps = 0  # those that do not count included
        self.step_spread = _LEAST_SPREAD  # around the middle of their block, as a share
        self._known: list[Comparison] = []
        self._rounds: dict[tuple[ExchangeSettings, ExchangeSettings], list[Comparison]] = {}
        self._unsure: ExchangeSettings | None = None  # has won once only
        self._seconds: dict[ExchangeSettings, list[float]] = {}  # of all steps
        self._blocks: dict[ExchangeSettings, Sequence[float]] = {}  # of the last steps
        self._distances: list[float] = []  # of steps from the middle of their block, as logarithms
        self._best_blocks: list[float] = []  # middles of blocks of the best, as logarithms
        if known is not None and known.best in self.predicted:
            self.best = known.best
            for earlier in known.compared:
                if earlier.setting in self.predicted and earlier.setting != known.best:
                    ratio, variance = math.log(earlier.ratio), earlier.spread**2 + _ANOTHER_DAY**2
                    self._known.append(Comparison(earlier.setting, known.best, ratio, variance))
        self._first = self.best
        self._believe()

    @property
    def margin(self) -> float:
        """What a setting must gain to be open.

        As much as steps scatter, up to 4 %, because less than the noise is not worth a hundred
        steps; a quarter of it where that is more, which a hundred steps can just tell apart.
        """
        spread = self.step_spread
        return max(self._options.least_gain, min(spread, _WHOLE_SCATTER), _OF_SCATTER * spread)

    @property
    def block_steps(self) -> int:
        """So many that one comparison tells a difference of the margin, if that is a few."""
        wanted = 4 * math.pi * (self.step_spread / self.margin) ** 2
        return max(_FEWEST_STEPS, min(math.ceil(wanted), _MOST_STEPS))

    @property
    def most_steps(self) -> int:
        by_noise = _QUIET_STEPS if self.step_spread <= _QUIET_SPREAD else _LOUD_STEPS
        return self._options.most_steps or by_noise

    @property
    def best_seconds(self) -> float:
        """The middle of all steps with the best; infinite before there are any."""
        return median(self._seconds.get(self.best, [math.inf]))

    @property
    def doubt(self) -> float:
        """How far that middle may be off by chance, nearly always, as a share."""
        return 2 * math.sqrt(self.block_variance(len(self._seconds[self.best])))

    @property
    def compared(self) -> list[ExchangeSettings]:
        """Settings that were measured, now or in an earlier run, and the one begun with."""
        pairs = [*self._rounds, *(comparison[:2] for comparison in self._known)]
        measured = {self._first}.union(*pairs)
        return [setting for setting in self.predicted if setting in measured]

    def log_ratio(self, setting: ExchangeSettings) -> NormalDist:
        """Of a setting's seconds over those of the best so far."""
        return self._beliefs.log_ratio(setting, self.best)

    def block_variance(self, num_steps: int) -> float:
        """How far the middle of so many steps may be off, squared, as a logarithm."""
        of_steps = _OF_MEDIAN * self.step_spread**2 / num_steps
        if len(self._best_blocks) < _FEWEST_BLOCKS:
            return of_steps
        # On a machine that is slow for seconds at a time, neighbours are wrong together.
        jump = median(abs(after - before) for before, after in pairwise(self._best_blocks))
        return max(of_steps, (_OF_NORMAL * jump) ** 2 / 2)

    def forget_known(self) -> None:
        """What earlier runs found does not hold here."""
        self._known.clear()
        self._believe()

    def note(self, setting: ExchangeSettings, seconds: Sequence[float]) -> None:
        """Take in the steps of a block."""
        self._blocks[setting] = seconds
        self._seconds.setdefault(setting, []).extend(seconds)
        middle = math.log(median(seconds))
        if setting == self.best:
            self._best_blocks.append(middle)
        # In a block of n, the median is as near as if it had been chosen for it: it has been.
        shrunk = math.sqrt(len(seconds) / max(len(seconds) - 1, 1))
        self._distances += [abs(math.log(step) - middle) * shrunk for step in seconds]
        self.step_spread = max(_OF_NORMAL * median(self._distances), _LEAST_SPREAD)

    def compare(self, challenger: ExchangeSettings) -> None:
        """Take in that the last blocks of a challenger and of the best were run side by side."""
        own, best = self._blocks[challenger], self._blocks[self.best]
        log_ratio = math.log(median(own) / median(best))
        variance = self.block_variance(len(own)) + self.block_variance(len(best))
        rounds = self._rounds.setdefault((challenger, self.best), [])
        rounds.append(Comparison(challenger, self.best, log_ratio, variance))
        self._believe()
        winner = min(self._seconds, key=lambda setting: self.log_ratio(setting).mean)
        lead = self.log_ratio(winner)
        self._unsure = None
        if lead.mean > -_WIN * self.margin or lead.cdf(0.0) < _SURE:
            return  # nearly the same, and to change costs steps; or not to be believed yet
        if winner == challenger and len(rounds) == 1:
            self._unsure = challenger  # the block that it was compared with may have been spoilt
            return
        self.best = winner
        self._best_blocks.clear()

    def challenger(self) -> ExchangeSettings | None:
        """The setting to compare with the best next; None if the search is over."""
        gains = self._open_gains()
        return self._unsure or max(gains, key=gains.__getitem__, default=None)

    def verdict(self) -> str:
        """What was found, what was left out and why, and how far from the best it may be."""
        num_compared, num_settings = len(self.compared), len(self.predicted)
        parts = [f"{num_compared} of {num_settings} settings measured"]
        if self._known:
            parts.append(f"{len(self._known)} of them in earlier runs")
        still_open = self._open_gains()
        if num_ruled_out := num_settings - len({*self.compared, *still_open}):
            error = f"(ratios taken to be off by {self._beliefs.error:.0%})"
            parts.append(f"{num_ruled_out} ruled out by prediction {error}")
        if still_open:
            gains = (-math.expm1(self.log_ratio(s).inv_cdf(_CHANCE)) for s in still_open)
            number = f"{len(still_open)} setting" + "s" * (len(still_open) > 1)
            reason = f"stopped at the most steps allowed: {number} could still be faster, by up to"
            reason += f" {max(gains):.1%}"
        elif self._is_at_floor:
            reason = f"without any exchange a step is less than {self.margin:.1%} faster"
        else:
            is_noisy = self.margin > self._options.least_gain
            limit = "and less is not worth a search in this noise"
            reason = f"no other is likely to be faster by more than {self.margin:.1%}, "
            reason += limit if is_noisy else "the least gain worth a change"
        return (
            f"{self.best} is best: {format_seconds(self.best_seconds)} a step, steps scatter by"
            f" {self.step_spread:.1%}; {', '.join(parts)} in {self.num_steps} steps; {reason}"
        )

    @property
    def _is_at_floor(self) -> bool:
        return self.best_seconds * (1 - self.margin) <= self._floor_seconds

    def _open_gains(self) -> dict[ExchangeSettings, float]:
        """The expected gain of each open setting."""
        if self._is_at_floor:
            return {}
        least = math.log1p(-self.margin)
        ratios = {setting: self.log_ratio(setting) for setting in self.predicted}
        return {
            s: expected_gain(ratio) for s, ratio in ratios.items() if ratio.cdf(least) > _CHANCE
        }

    def _believe(self) -> None:
        comparisons = [*self._known, *map(merged, self._rounds.values())]
        expected_error = self._expected_error
        self._beliefs = Beliefs(self.predicted, comparisons, expected_error=expected_error)
