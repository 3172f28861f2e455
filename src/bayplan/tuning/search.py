"""`Search`: which setting to compare with the best so far, and when to stop.

NOTE [ How it ends ]
1. A setting is open while the chance that it is faster than the best by more than the margin is
   above 5 %, by prediction, by how wrong predictions have been, and by what was measured.
2. The margin is 2 %. Where steps scatter by more, it is as much as they do, up to 4 %, for less
   than the noise is not worth a hundred steps of search; and a quarter of their scatter where that
   is more yet, which is what a hundred steps can just tell apart.
3. The open setting with the largest expected gain is compared next. Others are never measured.
   One that wins is compared once more before it is taken for the best.
4. Where the best so far takes no longer than a step without any exchange, nothing is open.
5. When no candidate is open, Optuna proposes a few inside the ranges. When none of these is open
   either, or the steps are used up, it is over.
"""

import math
from collections.abc import Callable, Sequence
from statistics import median

from bayplan.data.errors import UsageError
from bayplan.data.exchange_settings import ExchangeSettings
from bayplan.data.tuning_record import ComparedSetting
from bayplan.tuning.beliefs import Beliefs, Comparison, Outlook
from bayplan.tuning.noise import Noise, log_middle
from bayplan.tuning.options import TuningOptions
from bayplan.tuning.proposing import propose
from bayplan.tuning.rounds import Rounds
from bayplan.tuning.space import SearchSpace

__all__ = ["Predict", "Search"]

Predict = Callable[[ExchangeSettings], float]

_CHANCE = 0.05
_OF_SCATTER = 0.25
_WHOLE_SCATTER = 0.04  # below the 5 % within which the best setting is to be found
_WIN = 0.25  # of the margin, that the best so far is changed for
_SURE = 0.8  # the chance of being faster that it is changed for
_MOST_PROPOSALS = 6  # to be measured, in one search
_ASKED_AT_ONCE = 24
_ANOTHER_DAY = 0.01  # how far ratios of settings move from one run to the next
_QUIET_STEPS, _LOUD_STEPS = 190, 500  # and some before, until buckets are planned
_QUIET_SPREAD = 0.06  # of steps, up to which so few are enough: see docs/tuning.md
_FEWEST_STEPS, _MOST_STEPS = 5, 10  # of a block; of five, two may be spoilt


class Search:
    """One search; what it knows ends with the network it was learnt on.

    Attributes:
        settings: candidates, and what was proposed.
        predicted_seconds: of each.
        best: index of the best so far.
        noise: of the steps so far.
        num_proposed: settings that Optuna has added.

    Args:
        space: what to choose from.
        predict: seconds of a step under a setting; any unit, for only ratios count.
        options: how to search.
        begin_with: the best so far of an earlier search; by default the best by prediction.
        known: what earlier runs found, against `begin_with`.
        surprise: how far predictions are known to be off, as a logarithm.
        floor_seconds: what a step takes without any exchange.
    """

    def __init__(
        self,
        space: SearchSpace,
        predict: Predict,
        options: TuningOptions,
        *,
        begin_with: ExchangeSettings | None = None,
        known: Sequence[ComparedSetting] = (),
        surprise: float = 0.0,
        floor_seconds: float | None = None,
    ) -> None:
        self._space, self._predict, self._options = space, predict, options
        self._floor_seconds = floor_seconds
        self._expected_error = max(options.expected_error, surprise)
        self.settings: list[ExchangeSettings] = []
        self.predicted_seconds: list[float] = []
        for one in space.candidates:
            self._add(one)
        self._known: list[Comparison] = []
        self._rounds = Rounds()
        self._unsure: int | None = None  # a setting that has won once only
        self._logs: dict[int, list[float]] = {}  # of seconds of steps, by setting
        self.num_proposed = 0
        self.noise = Noise()
        self.best = min(range(len(self.settings)), key=self.predicted_seconds.__getitem__)
        if begin_with is not None and space.contains(begin_with):
            self.best = self._index(begin_with)
            self._known = self._remembered(known)
        self._first = self.best
        self.beliefs = self._believe()

    def forget_known(self) -> None:
        """What earlier runs found does not hold here."""
        self._known.clear()
        self.beliefs = self._believe()

    @property
    def num_known(self) -> int:
        """Settings of which an earlier run knew."""
        return len(self._known)

    @property
    def least_gain(self) -> float:
        """What a change must gain, whatever the noise."""
        return self._options.least_gain

    @property
    def error(self) -> float:
        """How far ratios of predictions are off, as learnt so far."""
        return self.beliefs.error

    @property
    def margin(self) -> float:
        """See rule 2."""
        spread = self.noise.step_spread
        return max(self.least_gain, min(spread, _WHOLE_SCATTER), _OF_SCATTER * spread)

    @property
    def block_steps(self) -> int:
        """So many that one comparison tells a difference of the margin, if that is a few."""
        wanted = 4 * math.pi * (self.noise.step_spread / self.margin) ** 2
        return max(_FEWEST_STEPS, min(math.ceil(wanted), _MOST_STEPS))

    def note(self, index: int, seconds: Sequence[float]) -> None:
        """Take in the steps of a block."""
        self._logs.setdefault(index, []).extend(map(math.log, seconds))
        self.noise.add(seconds)
        if index == self.best:
            self.noise.add_again(log_middle(seconds))

    def compare(
        self, challenger: int, its_seconds: Sequence[float], best_seconds: Sequence[float]
    ) -> None:
        """Take in two blocks, noted already, that were run side by side."""
        variance = sum(
            self.noise.block_variance(len(seconds)) for seconds in (its_seconds, best_seconds)
        )
        log_ratio = log_middle(its_seconds) - log_middle(best_seconds)
        self._rounds.add(Comparison(challenger, self.best, log_ratio, variance))
        self.beliefs = self._believe()
        winner = min(self.compared, key=lambda index: self.outlook(index).mean)
        outlook = self.outlook(winner)
        self._unsure = None
        if outlook.mean > -_WIN * self.margin or outlook.chance_below(0.0) < _SURE:
            return  # nearly the same, and to change costs steps; or not to be believed yet
        if winner == challenger and self._rounds.count(challenger, self.best) == 1:
            self._unsure = challenger  # the block that it was compared with may have been spoilt
            return
        self.best = winner
        self.noise.forget_blocks()

    @property
    def compared(self) -> list[int]:
        """Settings that were measured, now or in an earlier run, and the one begun with."""
        pairs = [{one.first, one.second} for one in self._comparisons]
        return sorted({self._first}.union(*pairs))

    def outlook(self, index: int) -> Outlook:
        """How a setting may compare with the best so far."""
        return self.beliefs.outlook(index, self.best)

    @property
    def open(self) -> dict[int, Outlook]:
        """See rule 1; none where the best so far costs hardly more than no exchange at all."""
        edge = math.log1p(-self.margin)
        if self.is_at_floor:
            return {}
        outlooks = {index: self.outlook(index) for index in range(len(self.settings))}
        return {
            index: one
            for index, one in outlooks.items()
            if index != self.best and one.chance_below(edge) > _CHANCE
        }

    @property
    def is_at_floor(self) -> bool:
        """Whether less than the margin is left to gain, whatever the setting."""
        log_seconds = self.log_seconds(self.best)
        if self._floor_seconds is None or log_seconds is None:
            return False
        return math.log(self._floor_seconds) - log_seconds >= math.log1p(-self.margin)

    @property
    def most_steps(self) -> int:
        """So many may be run, with the noise there is."""
        is_quiet = self.noise.step_spread <= _QUIET_SPREAD
        return self._options.most_steps or (_QUIET_STEPS if is_quiet else _LOUD_STEPS)

    def challenger(self) -> int | None:
        """The setting to compare with the best next; None if it is over."""
        if self._unsure is not None:
            return self._unsure
        if self.is_at_floor:
            return None
        candidates = self.open or self._add_proposal()
        if not candidates:
            return None
        return max(candidates, key=lambda index: candidates[index].expected_gain)

    def log_seconds(self, index: int) -> float | None:
        """The middle of all steps with a setting; None if there were none."""
        logs = self._logs.get(index)
        return median(logs) if logs else None

    def doubt(self, index: int) -> float:
        """How far that middle may be off by chance, nearly always."""
        return 2 * math.sqrt(self.noise.block_variance(len(self._logs[index])))

    def found(self) -> tuple[ComparedSetting, ...]:
        """What later runs may begin with."""
        outlooks = ((index, self.outlook(index)) for index in self.compared)
        return tuple(
            ComparedSetting(
                setting=self.settings[index], ratio=math.exp(one.mean), spread=one.spread
            )
            for index, one in outlooks
            if index != self.best
        )

    def _remembered(self, known: Sequence[ComparedSetting]) -> list[Comparison]:
        """What earlier runs found of settings that are still to choose from."""
        return [
            Comparison(
                first=self._index(one.setting),
                second=self.best,
                log_ratio=math.log(one.ratio),
                variance=one.spread**2 + _ANOTHER_DAY**2,
            )
            for one in known
            if self._space.contains(one.setting) and one.setting != self.settings[self.best]
        ]

    def _add_proposal(self) -> dict[int, Outlook]:
        """Add the best of what Optuna proposes, if it is open."""
        if not self._space.ranges or self.num_proposed == _MOST_PROPOSALS:
            return {}
        proposals = propose(
            self._space,
            [(one, self.outlook(index).mean) for index, one in enumerate(self.settings)],
            count=_ASKED_AT_ONCE,
            seed=self._options.seed + self._rounds.total,
        )
        count = len(self.settings)
        for one in proposals:
            self._index(one)
        self.beliefs = self._believe()
        gains = {index: one.expected_gain for index, one in self.open.items()}
        chosen = max(gains, key=lambda index: gains[index], default=count)
        kept = [self.settings[chosen]] if gains else []
        del self.settings[count:], self.predicted_seconds[count:]
        for one in kept:  # the others would only be in the way
            self._add(one)
        self.num_proposed += len(kept)
        self.beliefs = self._believe()
        return self.open

    def _index(self, setting: ExchangeSettings) -> int:
        if setting not in self.settings:
            self._add(setting)
        return self.settings.index(setting)

    def _add(self, setting: ExchangeSettings) -> None:
        seconds = self._predict(setting)
        if not 0 < seconds < math.inf:
            raise UsageError(
                f"a step with {setting} is predicted to take {seconds} s, must be more than 0"
            )
        self.settings.append(setting)
        self.predicted_seconds.append(seconds)

    @property
    def _comparisons(self) -> list[Comparison]:
        return [*self._known, *self._rounds.merged]

    def _believe(self) -> Beliefs:
        return Beliefs(
            self.settings,
            self.predicted_seconds,
            self._comparisons,
            expected_error=self._expected_error,
        )
