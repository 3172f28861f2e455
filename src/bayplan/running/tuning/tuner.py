"""`Tuner`: asks for steps with a setting, is told how long they took, and ends by itself.

It does not know how steps are run. The best so far and a challenger are run side by side, block by
block, and only the ratio of neighbouring blocks counts: a machine that grows slower for minutes
slows both, and their ratio stays. A change of the setting spoils the step after it, so who goes
first alternates, and neighbours that are equal stay together:

    best 5 steps | one 5 steps   other 5 steps | best 5 steps   best 5 steps | third 5 steps
    `---- a comparison -----'   `---- another ------------'    `---- another -----------'
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import median

import msgspec

from bayplan.data.errors import UsageError
from bayplan.data.exchange import ExchangeSettings, TuningKey, TuningRecord
from bayplan.running.tuning.search import Predict, Search
from bayplan.running.tuning.space import SearchSpace, TuningOptions

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

    number: int  # from 0, over all searches
    setting: ExchangeSettings
    purpose: Purpose
    num_steps: int | None = None  # None for all that are left
    num_ignored: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial has shown, or for a `RESULT` the whole search."""

    trial: Trial
    search: int  # from 0; a network that changes begins another
    seconds: float  # the middle of its steps
    spread: float  # how far single steps scatter, over all so far, as a share
    num_steps: int  # that count
    predicted_seconds: float
    is_best: bool  # with this trial taken in
    ratio: float | None  # of its seconds to the best one's as believed now; None if not compared


class ChangeDetector:
    """Adds up how far steps lie off what they were, less an allowance (CUSUM, Page 1954).

    Scatter takes back what it gave, a change adds up. One step alone, however long, is no change.
    """

    def __init__(self) -> None:
        self._above = self._below = 0.0

    def hear(self, log_ratio: float, *, spread: float, doubt: float = 0.0) -> bool:
        """Whether something has changed, by a step's seconds over what they were.

        Args:
            spread: of single steps, as a share.
            doubt: how far what they were may itself be off, as a share.
        """
        unit = max(spread, _LEAST_CHANGE)
        off = max(-_MOST_SPREADS, min(log_ratio / unit, _MOST_SPREADS))
        allowance = 1 + doubt / unit
        self._above = max(self._above + off - allowance, 0.0)
        self._below = max(self._below - off - allowance, 0.0)
        return max(self._above, self._below) > _ALARM


class Tuner:
    """Finds the fastest setting; docs/tuning.md has an example.

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
        space: SearchSpace,
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
            Search, space, predict, options, floor_seconds=floor_seconds or 0.0
        )
        self.num_searches = self._num_trials = 0
        self.num_steps = 0  # of the current search
        self.is_finished = False  # while watching, another search may begin
        self.verdict = ""  # why the last search ended
        self._last: ExchangeSettings | None = None  # what the last steps ran with
        self._trials = self._run_searches(known)
        self._trial = next(self._trials)

    @property
    def best(self) -> ExchangeSettings:
        """So far; usable at any moment."""
        return self._search.settings[self._search.best]

    def ask(self) -> Trial:
        """What to run next; the same again until it is told how it went."""
        return self._trial

    def tell(self, seconds: Sequence[float]) -> None:
        """Take in how long each step of the trial took, those to be ignored included."""
        trial, search, number = self._trial, self._search, self.num_searches - 1
        if trial.num_steps is None:
            raise ValueError("the search is over and its setting is kept; there is nothing to tell")
        if len(seconds) != trial.num_steps:
            raise ValueError(f"{len(seconds)} steps were told, {trial.num_steps} were asked for")
        for index, step in enumerate(seconds):
            if not 0 < step < math.inf:
                raise ValueError(f"step {index} took {step} s, must be more than 0")
        counted, is_search = seconds[trial.num_ignored :], trial.purpose is not Purpose.WATCH
        self._last = trial.setting
        self.num_steps += len(seconds) if is_search else 0
        self._trial = self._trials.send(counted)
        self._report(trial, search, number, median(counted), len(counted))
        if self.is_finished and is_search:
            result = msgspec.structs.replace(trial, setting=self.best, purpose=Purpose.RESULT)
            self._report(result, search, number, search.best_seconds, self.num_steps)

    def record(self, key: TuningKey) -> TuningRecord:
        """What was found so far, for a later run."""
        if self._search.best_seconds == math.inf:
            raise ValueError("nothing was measured yet, so there is nothing to keep")
        return TuningRecord(
            key=key,
            best=self.best,
            step_seconds=self._search.best_seconds,
            step_spread=self._search.step_spread,
            num_steps=self.num_steps,
            verdict=self.verdict,
            compared=self._search.found(),
        )

    def _run_searches(self, known: TuningRecord | None) -> Generator[Trial, Sequence[float]]:
        """One search after the other, each until the network changes."""
        self._search = search = self._new_search(known=known)
        while True:
            self.num_searches, self.num_steps, self.is_finished = self.num_searches + 1, 0, False
            seconds = yield from self._run_search(search, known)
            # How much steps changed beyond what predictions, asked again, explain.
            explained = self._predict(self.best) / search.predicted_seconds[search.best]
            changed = median(seconds[-_LATEST_STEPS:]) / search.best_seconds
            surprise, known = abs(math.log(changed / explained)), None
            self._search = search = self._new_search(begin_with=self.best, surprise=surprise)

    def _run_search(
        self, search: Search, known: TuningRecord | None
    ) -> Generator[Trial, Sequence[float], Sequence[float]]:
        """The trials of one search; gives the steps by which the network has changed."""
        seconds = yield self._next(search.best, Purpose.FIRST, _FIRST_STEPS)
        search.note(search.best, seconds)
        if known is not None:  # do not believe an earlier run whose steps took another time
            off = abs(math.log(search.best_seconds / known.step_seconds))
            if off > _SAME_NETWORK + search.step_spread:
                search.forget_known()
        detector, is_best_first, switch_steps = ChangeDetector(), True, self._options.switch_steps
        while self.num_steps + 2 * (search.block_steps + switch_steps) <= search.most_steps:
            if (challenger := search.challenger()) is None:
                break
            pair, blocks = [search.best, challenger], {}
            for index in pair if is_best_first else pair[::-1]:
                seconds = yield self._next(index, Purpose.COMPARE, search.block_steps)
                if index == search.best and _has_changed(search, detector, seconds):
                    return seconds
                search.note(index, seconds)
                blocks[index] = seconds
            search.compare(challenger, blocks[challenger], blocks[search.best])
            is_best_first = not is_best_first
        self.is_finished, self.verdict = True, search.verdict(self.num_steps)
        while self._options.is_watching:
            seconds = yield self._next(search.best, Purpose.WATCH, self._options.watched_steps)
            if _has_changed(search, detector, seconds):
                return seconds
        yield Trial(number=self._num_trials, setting=self.best, purpose=Purpose.RESULT)
        raise AssertionError("a result is told nothing")

    def _next(self, index: int, purpose: Purpose, count: int) -> Trial:
        setting, options = self._search.settings[index], self._options
        ignored = options.first_steps if self._last is None else options.switch_steps
        ignored *= setting != self._last
        self._num_trials += 1
        return Trial(
            number=self._num_trials - 1,
            setting=setting,
            purpose=purpose,
            num_steps=count + ignored,
            num_ignored=ignored,
        )

    def _report(
        self, trial: Trial, search: Search, number: int, seconds: float, num_steps: int
    ) -> None:
        index = search.settings.index(trial.setting)
        self._on_outcome(
            Outcome(
                trial=trial,
                search=number,
                seconds=seconds,
                spread=search.step_spread,
                num_steps=num_steps,
                predicted_seconds=search.predicted_seconds[index],
                is_best=index == search.best,
                ratio=math.exp(search.log_ratio(index).mean) if index in search.compared else None,
            )
        )


def _has_changed(search: Search, detector: ChangeDetector, seconds: Sequence[float]) -> bool:
    """Whether steps with the best setting take another time than before."""
    usual, spread, doubt = math.log(search.best_seconds), search.step_spread, search.doubt
    logs = [math.log(step) - usual for step in seconds]
    return any(detector.hear(log, spread=spread, doubt=doubt) for log in logs)
