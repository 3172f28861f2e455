"""`Tuner`: asks for steps with a setting, is told how long they took, and ends by itself.

It does not know how steps are run. The best so far and a challenger are run side by side, block by
block, and only the ratio of neighbouring blocks counts: a machine that grows slower for minutes
slows both, and their ratio stays. A change of the setting spoils the step after it, so who goes
first alternates, and neighbours that are equal stay together:

    best 5 steps | first 5 steps   second 5 steps | best 5 steps   best 5 steps | third 5 steps
    `----- a comparison ------'   `----- another -------------'   `----- another ------------'
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import median

import msgspec

from bayplan.data.errors import UsageError
from bayplan.data.exchange import ComparedSetting, ExchangeSettings, TuningKey, TuningRecord
from bayplan.running.tuning.search import Predict, Search, TuningOptions

__all__ = ["ChangeDetector", "Outcome", "Purpose", "Trial", "Tuner"]

_FIRST_STEPS = 8  # that count, of the first block
_LATEST_STEPS = 5  # that tell how much has changed
_SAME_NETWORK = 0.15  # a step takes as long as in an earlier run, as a logarithm
_LEAST_CHANGE = 0.05  # changes below 5 % are not worth a search, however quiet the link is
_MOST_SPREADS = 3.0  # that one step counts for
_ALARM = 10.0  # with 5 % noise, years of steps apart by chance; six steps after a real change


class Purpose(StrEnum):
    """What steps are run for."""

    FIRST = "first"  # to see how fast steps are and how far they scatter
    COMPARE = "compare"  # one of two settings that are compared
    WATCH = "watch"  # training goes on, and it is seen whether the network stays as it was
    RESULT = "result"  # the search has ended, and training goes on for good


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run next; the first `num_ignored` of its steps do not count."""

    search: int  # from 0; a network that changes begins another
    number: int  # from 0, over all searches
    setting: ExchangeSettings
    purpose: Purpose
    num_steps: int | None = None  # None for all that are left
    num_ignored: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial has shown, or for a `RESULT` the whole search."""

    trial: Trial
    steps: int  # that count
    seconds: float  # the median of these
    spread: float  # how far single steps scatter, over all so far, as a share
    predicted_seconds: float
    ratio_to_best: float | None  # of its seconds, as believed now; None if it was not compared
    is_best: bool  # with this trial taken in


class ChangeDetector:
    """Adds up how far steps lie off what they were, less an allowance (CUSUM, Page 1954).

    Scatter takes back what it gave, a change adds up. One step alone, however long, is no change.
    """

    _above = _below = 0.0

    def has_changed(self, search: Search, seconds: Sequence[float]) -> bool:
        """Whether steps with the best setting take another time than before."""
        usual, spread, doubt = math.log(search.best_seconds), search.step_spread, search.doubt
        logs = [math.log(step) - usual for step in seconds]
        return any(self.hear(log, spread=spread, doubt=doubt) for log in logs)

    def hear(self, log_ratio: float, *, spread: float, doubt: float = 0.0) -> bool:
        """Whether something has changed, by a step's seconds over what they were.

        `spread` is that of single steps, and `doubt` how far what they were may itself be off; both
        as shares.
        """
        unit = max(spread, _LEAST_CHANGE)
        off = max(-_MOST_SPREADS, min(log_ratio / unit, _MOST_SPREADS))
        allowance = 1 + doubt / unit
        self._above = max(self._above + off - allowance, 0.0)
        self._below = max(self._below - off - allowance, 0.0)
        return max(self._above, self._below) > _ALARM


class Tuner:
    """Finds the fastest of some settings; docs/tuning.md has an example.

    Args:
        predict: seconds of a step under a setting. When the network has changed it is asked again
            for all candidates, and may then know better.
        known: what an earlier run found for the same model and ranks.
        floor_seconds: what a step takes without any exchange, where that was measured; a setting
            that comes near it ends the search.
        on_outcome: told of every trial that ends, and of the result of every search.
    """

    def __init__(
        self,
        candidates: Iterable[ExchangeSettings],
        predict: Predict,
        options: TuningOptions | None = None,
        *,
        known: TuningRecord | None = None,
        floor_seconds: float | None = None,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        if floor_seconds is not None and not 0 < floor_seconds < math.inf:
            raise UsageError(f"floor_seconds is {floor_seconds}, must be more than 0")
        self._options = options = options or TuningOptions()
        self._predict, self._on_outcome = predict, on_outcome
        self._new_search = partial(
            Search, tuple(candidates), predict, options, floor_seconds=floor_seconds or 0.0
        )
        self.num_searches, self._numbers = 0, itertools.count()
        self.is_finished = False  # while watching, another search may begin
        self.verdict = ""  # why the last search ended
        self._last: ExchangeSettings | None = None  # what the last steps ran with
        self._search = self._new_search(known=known)
        self._trials = self._run_searches(known)
        self._trial = next(self._trials)

    @property
    def best(self) -> ExchangeSettings:
        """So far; usable at any moment."""
        return self._search.best

    @property
    def num_steps(self) -> int:
        """That the current search has taken."""
        return self._search.num_steps

    def ask(self) -> Trial:
        """What to run next; the same again until it is told how it went."""
        return self._trial

    def tell(self, seconds: Sequence[float]) -> None:
        """Take in how long each step of the trial took, those to be ignored included."""
        trial, search = self._trial, self._search
        if trial.num_steps is None:
            raise ValueError("the search is over and its setting is kept; there is nothing to tell")
        if len(seconds) != trial.num_steps:
            raise ValueError(f"{len(seconds)} steps were told, {trial.num_steps} were asked for")
        for index, step in enumerate(seconds):
            if not 0 < step < math.inf:
                raise ValueError(f"step {index} took {step} s, must be more than 0")
        counted, is_search = seconds[trial.num_ignored :], trial.purpose is not Purpose.WATCH
        search.num_steps += len(seconds) if is_search else 0
        self._last = trial.setting
        self._trial = self._trials.send(counted)
        self._report(search, trial, counted, len(counted))
        if self.is_finished and is_search:
            result = msgspec.structs.replace(trial, setting=search.best, purpose=Purpose.RESULT)
            self._report(search, result, [search.best_seconds], search.num_steps)

    def record(self, key: TuningKey) -> TuningRecord:
        """What was found so far, for a later run."""
        search = self._search
        if search.best_seconds == math.inf:
            raise ValueError("nothing was measured yet, so there is nothing to keep")
        ratios = {setting: search.log_ratio(setting) for setting in search.compared}
        compared = (
            ComparedSetting(setting=setting, ratio=math.exp(ratio.mean), spread=ratio.stdev)
            for setting, ratio in ratios.items()
            if setting != search.best
        )
        return TuningRecord(
            key=key,
            best=search.best,
            step_seconds=search.best_seconds,
            step_spread=search.step_spread,
            num_steps=search.num_steps,
            verdict=self.verdict,
            compared=tuple(compared),
        )

    def _run_searches(self, known: TuningRecord | None) -> Generator[Trial, Sequence[float]]:
        """One search after the other, each until the network changes."""
        while True:
            search, self.num_searches, self.is_finished = self._search, self.num_searches + 1, False
            seconds = yield from self._run_search(search, known)
            # How much steps changed beyond what predictions, asked again, explain.
            explained = self._predict(search.best) / search.predicted[search.best]
            changed = median(seconds[-_LATEST_STEPS:]) / search.best_seconds
            surprise, known = abs(math.log(changed / explained)), None
            self._search = self._new_search(begin_with=search.best, surprise=surprise)

    def _run_search(
        self, search: Search, known: TuningRecord | None
    ) -> Generator[Trial, Sequence[float], Sequence[float]]:
        """The trials of one search; returns the steps by which the network has changed."""
        seconds = yield self._next(search.best, Purpose.FIRST, _FIRST_STEPS)
        search.note(search.best, seconds)
        if known is not None:  # do not believe an earlier run whose steps took another time
            off = abs(math.log(search.best_seconds / known.step_seconds))
            if off > _SAME_NETWORK + search.step_spread:
                search.forget_known()
        detector, is_best_first, switch_steps = ChangeDetector(), True, self._options.switch_steps
        while search.num_steps + 2 * (search.block_steps + switch_steps) <= search.most_steps:
            if (challenger := search.challenger()) is None:
                break
            pair = search.best, challenger
            for setting in pair if is_best_first else pair[::-1]:
                seconds = yield self._next(setting, Purpose.COMPARE, search.block_steps)
                if setting == search.best and detector.has_changed(search, seconds):
                    return seconds
                search.note(setting, seconds)
            search.compare(challenger)
            is_best_first = not is_best_first
        self.is_finished, self.verdict = True, search.verdict()
        while self._options.is_watching:
            seconds = yield self._next(search.best, Purpose.WATCH, self._options.watched_steps)
            if detector.has_changed(search, seconds):
                return seconds
        yield self._next(search.best, Purpose.RESULT, None)
        raise AssertionError("a result is told nothing")

    def _next(self, setting: ExchangeSettings, purpose: Purpose, count: int | None) -> Trial:
        first_steps, switch_steps = self._options.first_steps, self._options.switch_steps
        num_ignored = first_steps if self._last is None else switch_steps
        num_ignored *= setting != self._last and count is not None
        return Trial(
            search=self.num_searches - 1,
            number=next(self._numbers),
            setting=setting,
            purpose=purpose,
            num_steps=None if count is None else count + num_ignored,
            num_ignored=num_ignored,
        )

    def _report(
        self, search: Search, trial: Trial, seconds: Sequence[float], num_steps: int
    ) -> None:
        setting, is_compared = trial.setting, trial.setting in search.compared
        self._on_outcome(
            Outcome(
                trial=trial,
                steps=num_steps,
                seconds=median(seconds),
                spread=search.step_spread,
                predicted_seconds=search.predicted[setting],
                ratio_to_best=math.exp(search.log_ratio(setting).mean) if is_compared else None,
                is_best=setting == search.best,
            )
        )
