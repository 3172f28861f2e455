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
4. When no candidate is open, Optuna proposes some inside the ranges. When none of these is open
   either, or the steps are used up, the search is over.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from statistics import NormalDist, fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bayplan.data.errors import UsageError
from bayplan.data.exchange import ComparedSetting, ExchangeSettings, TuningRecord
from bayplan.data.units import format_seconds
from bayplan.running.tuning.space import SearchSpace, TuningOptions, propose

__all__ = ["Beliefs", "Comparison", "Predict", "Search", "expected_gain", "merged"]

Predict = Callable[[ExchangeSettings], float]

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
_NUM_PROPOSALS, _MOST_REQUESTS = 24, 6  # to Optuna, in one search
_ANOTHER_DAY = 0.01  # how far ratios of settings move from one run to the next
_LEAST_GAIN = "the least gain worth a change"
_QUIET_STEPS, _LOUD_STEPS = 190, 500  # and some before, until buckets are planned
_QUIET_SPREAD = 0.06  # of steps, up to which so few are enough: see docs/tuning.md


class Comparison(NamedTuple):
    """Two settings, by index, measured side by side; the first's seconds over the second's."""

    first: int
    second: int
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
        settings: Sequence[ExchangeSettings],
        predicted_seconds: Sequence[float],
        comparisons: Sequence[Comparison],
        *,
        expected_error: float,
    ) -> None:
        kinds = [
            (s.fusion_threshold_bytes is None, s.algorithm, s.hierarchical_allreduce, s.compression)
            for s in settings
        ]
        # Equal distances mean equally much; buckets below 16 KiB all cost their latency.
        sizes = np.array([(s.fusion_threshold_bytes or 0) / (1 << 14) for s in settings])
        rest = np.array([(2 * s.cycle_time_ms, s.strip_bytes) for s in settings])
        places = np.log2(1 + np.column_stack([sizes, rest]))
        of_kind = np.array([[float(kind == other) for other in kinds] for kind in kinds])
        squares = ((places[:, None] - places) ** 2).sum(axis=2)
        near = _NEAR_SHARE * np.exp(-squares / (2 * _REACH**2)) + (1 - _NEAR_SHARE) * (squares == 0)
        # The difference of two errors has twice the variance of each.
        units = np.stack([of_kind, _OF_NUMBERS**2 * of_kind * near]) * expected_error**2 / 2

        mean = np.log(np.array(predicted_seconds))
        seen = np.zeros((len(comparisons), len(settings)))
        for row, (first, second, _, _) in enumerate(comparisons):
            seen[row, first], seen[row, second] = 1.0, -1.0
        surprises = np.array([ratio for _, _, ratio, _ in comparisons]) - seen @ mean
        noise = np.diag([variance for *_, variance in comparisons])
        scales = _error_scales(seen @ units @ seen.T, surprises, noise)
        self.error = expected_error * math.sqrt(scales @ [1.0, _OF_NUMBERS**2])
        covariance = np.tensordot(scales, units, axes=1)
        gain = np.linalg.solve(seen @ covariance @ seen.T + noise, seen @ covariance).T
        self._mean = mean + gain @ surprises
        self._covariance = covariance - gain @ seen @ covariance

    def log_ratio(self, setting: int, against: int) -> NormalDist:
        """Of a setting's seconds over those of another, by index."""
        covariance = self._covariance
        own, others = covariance[setting, setting], covariance[against, against]
        variance = own + others - 2 * covariance[setting, against]
        mean = float(self._mean[setting] - self._mean[against])
        return NormalDist(mean, math.sqrt(max(variance, 1e-18)))


def _error_scales(
    units: NDArray[np.float64], surprises: NDArray[np.float64], noise: NDArray[np.float64]
) -> NDArray[np.float64]:
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
        known: what an earlier run found; its best is begun with, if it is still to choose from.
        begin_with: by default the best by prediction.
        surprise: how far predictions are known to be off, as a logarithm.
        floor_seconds: what a step takes without any exchange; 0 if that is not known.
    """

    def __init__(
        self,
        space: SearchSpace,
        predict: Predict,
        options: TuningOptions,
        *,
        known: TuningRecord | None = None,
        begin_with: ExchangeSettings | None = None,
        surprise: float = 0.0,
        floor_seconds: float = 0.0,
    ) -> None:
        self._space, self._predict, self._options = space, predict, options
        self._floor_seconds = floor_seconds
        self._expected_error = max(options.expected_error, surprise)
        self.settings: list[ExchangeSettings] = []  # candidates, and what was proposed
        self.predicted_seconds: list[float] = []
        for setting in space.candidates:
            self._index(setting)
        self._known: list[Comparison] = []
        self._rounds: dict[tuple[int, int], list[Comparison]] = {}
        self._unsure: int | None = None  # a setting that has won once only
        self._seconds: dict[int, list[float]] = {}  # of all steps, by setting
        self._distances: list[float] = []  # of steps from the middle of their block, as logarithms
        self._best_blocks: list[float] = []  # middles of blocks of the best, as logarithms
        self._num_requests = 0
        self.step_spread = _LEAST_SPREAD  # of steps around their block's middle, as a share
        self.best = min(range(len(self.settings)), key=self.predicted_seconds.__getitem__)
        begin_with = begin_with if known is None else known.best
        if begin_with is not None and space.contains(begin_with):
            self.best = self._index(begin_with)
            for other in known.compared if known is not None else ():
                if space.contains(other.setting) and other.setting != begin_with:
                    pair = self._index(other.setting), self.best
                    variance = other.spread**2 + _ANOTHER_DAY**2
                    self._known.append(Comparison(*pair, math.log(other.ratio), variance))
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
        is_quiet = self.step_spread <= _QUIET_SPREAD
        return self._options.most_steps or (_QUIET_STEPS if is_quiet else _LOUD_STEPS)

    @property
    def best_seconds(self) -> float:
        """The middle of all steps with the best; infinite before there are any."""
        return median(self._seconds.get(self.best, [math.inf]))

    @property
    def doubt(self) -> float:
        """How far that middle may be off by chance, nearly always, as a share."""
        return 2 * math.sqrt(self.block_variance(len(self._seconds[self.best])))

    @property
    def compared(self) -> set[int]:
        """Settings that were measured, now or in an earlier run, and the one begun with."""
        return {self._first}.union(*(pair[:2] for pair in self._known), *self._rounds)

    def log_ratio(self, index: int) -> NormalDist:
        """Of a setting's seconds over those of the best so far."""
        return self._beliefs.log_ratio(index, self.best)

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

    def note(self, index: int, seconds: Sequence[float]) -> None:
        """Take in the steps of a block."""
        self._seconds.setdefault(index, []).extend(seconds)
        middle = math.log(median(seconds))
        if index == self.best:
            self._best_blocks.append(middle)
        # In a block of n, the median is as near as if it had been chosen for it: it has been.
        shrunk = math.sqrt(len(seconds) / max(len(seconds) - 1, 1))
        self._distances += [abs(math.log(step) - middle) * shrunk for step in seconds]
        self.step_spread = max(_OF_NORMAL * median(self._distances), _LEAST_SPREAD)

    def compare(
        self, challenger: int, its_seconds: Sequence[float], best_seconds: Sequence[float]
    ) -> None:
        """Take in two blocks, noted already, that were run side by side."""
        log_ratio = math.log(median(its_seconds) / median(best_seconds))
        variance = sum(self.block_variance(len(block)) for block in (its_seconds, best_seconds))
        rounds = self._rounds.setdefault((challenger, self.best), [])
        rounds.append(Comparison(challenger, self.best, log_ratio, variance))
        self._believe()
        winner = min(self._seconds, key=lambda index: self.log_ratio(index).mean)
        lead = self.log_ratio(winner)
        self._unsure = None
        if lead.mean > -_WIN * self.margin or lead.cdf(0.0) < _SURE:
            return  # nearly the same, and to change costs steps; or not to be believed yet
        if winner == challenger and len(rounds) == 1:
            self._unsure = challenger  # the block that it was compared with may have been spoilt
            return
        self.best = winner
        self._best_blocks.clear()

    def challenger(self) -> int | None:
        """The setting to compare with the best next; None if it is over."""
        if self._unsure is not None:
            return self._unsure
        gains = self._open_gains()
        is_over = self._is_at_floor or self._num_requests == _MOST_REQUESTS
        if not gains and self._space.ranges and not is_over:
            self._num_requests += 1
            believed = [(s, self.log_ratio(index).mean) for index, s in enumerate(self.settings)]
            seed = self._options.seed + self._num_requests
            for setting in propose(self._space, believed, count=_NUM_PROPOSALS, seed=seed):
                self._index(setting)
            self._believe()
            gains = self._open_gains()
        return max(gains, key=gains.__getitem__, default=None)

    def found(self) -> tuple[ComparedSetting, ...]:
        """What later runs may begin with."""
        others = sorted(self.compared - {self.best})
        ratios = [(self.settings[index], self.log_ratio(index)) for index in others]
        return tuple(
            ComparedSetting(setting=setting, ratio=math.exp(ratio.mean), spread=ratio.stdev)
            for setting, ratio in ratios
        )

    def verdict(self, num_steps: int) -> str:
        """What was found, what was left out and why, and how far from the best it may be."""
        num_compared, num_settings = len(self.compared), len(self.settings)
        parts = [f"{num_compared} of {num_settings} settings measured"]
        if self._known:
            parts.append(f"{len(self._known)} of them in earlier runs")
        if num_compared < num_settings:
            error = f"(ratios taken to be off by {self._beliefs.error:.0%})"
            parts.append(f"{num_settings - num_compared} ruled out by prediction {error}")
        if still_open := self._open_gains():
            most = max(-math.expm1(self.log_ratio(index).inv_cdf(_CHANCE)) for index in still_open)
            number = f"{len(still_open)} setting" + "s" * (len(still_open) > 1)
            reason = f"stopped at the most steps allowed: {number} could still be faster, by up to"
            reason += f" {most:.1%}"
        elif self._is_at_floor:
            reason = f"without any exchange a step is less than {self.margin:.1%} faster"
        else:
            reason = f"no other is likely to be faster by more than {self.margin:.1%}, "
            noisy = self.margin > self._options.least_gain
            reason += "and less is not worth a search in this noise" if noisy else _LEAST_GAIN
        return (
            f"{self.settings[self.best]} is best: {format_seconds(self.best_seconds)} a step, steps"
            f" scatter by {self.step_spread:.1%}; {', '.join(parts)} in {num_steps} steps; {reason}"
        )

    @property
    def _is_at_floor(self) -> bool:
        return self.best_seconds * (1 - self.margin) <= self._floor_seconds

    def _open_gains(self) -> dict[int, float]:
        """The expected gain of each open setting."""
        ratios = {index: self.log_ratio(index) for index in range(len(self.settings))}
        return {
            index: expected_gain(ratio)
            for index, ratio in ratios.items()
            if ratio.cdf(math.log1p(-self.margin)) > _CHANCE and not self._is_at_floor
        }

    def _index(self, setting: ExchangeSettings) -> int:
        """Of a setting, which is added if it is not there."""
        if setting not in self.settings:
            seconds = self._predict(setting)
            if not 0 < seconds < math.inf:
                raise UsageError(
                    f"a step with {setting} is predicted to take {seconds} s, must be more than 0"
                )
            self.settings.append(setting)
            self.predicted_seconds.append(seconds)
        return self.settings.index(setting)

    def _believe(self) -> None:
        comparisons = [*self._known, *map(merged, self._rounds.values())]
        self._beliefs = Beliefs(
            self.settings, self.predicted_seconds, comparisons, expected_error=self._expected_error
        )
