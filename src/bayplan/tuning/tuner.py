"""`Tuner`: asks for steps with a setting, is told how long they took, and ends by itself.

It does not know how steps are run. The best so far and a challenger are run side by side, block by
block, and only the ratio of neighbouring blocks counts: a machine that grows slower for minutes
slows both, and their ratio stays. A change of the setting spoils the step after it, so who goes
first alternates, and neighbours that are equal stay together:

    best 4 steps | one 4 steps   other 4 steps | best 4 steps   best 4 steps | third 4 steps
    `---- a comparison -----'   `---- another ------------'    `---- another -----------'
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from bayplan.data.errors import UsageError
from bayplan.data.exchange_settings import ExchangeSettings
from bayplan.data.tuning_record import ComparedSetting, TuningKey, TuningRecord
from bayplan.tuning.changes import ChangeDetector
from bayplan.tuning.noise import log_middle
from bayplan.tuning.options import TuningOptions
from bayplan.tuning.search import Predict, Search
from bayplan.tuning.space import SearchSpace
from bayplan.tuning.trial import Outcome, Purpose, Trial
from bayplan.tuning.words import verdict_of

__all__ = ["Tuner"]

_FIRST_STEPS = 8  # that count, of the first block
_LATEST_STEPS = 5  # that tell how much has changed
_SAME_NETWORK = 0.15  # a step that takes as long as in an earlier run, as a logarithm


class Tuner:
    """Finds the fastest setting; the best so far is usable at any moment.

    Attributes:
        num_steps: of the current search, so far.
        num_searches: begun so far.
        is_finished: whether the search is over; while it is watched, another one may begin.
        verdict: why the last search ended, in words; empty while the first one goes on.

    Args:
        space: what to choose from.
        predict: seconds of a step under a setting. When the network has changed it is asked again
            for all candidates, and may then know better.
        options: how to search.
        known: what an earlier run found for the same model and ranks.
        floor_seconds: what a step takes without any exchange, where that was measured; a setting
            that comes near it ends the search.
        on_outcome: told of every trial that ends, and of the result of every search.

    Example:
        >>> space = SearchSpace.of_thresholds([1 << 20, 25 << 20])
        >>> def seconds(setting: ExchangeSettings) -> float:
        ...     return 0.1 + 1e-9 * (setting.fusion_threshold_bytes or 1 << 24)
        >>> tuner = Tuner(space, seconds)
        >>> while not tuner.is_finished:
        ...     trial = tuner.ask()
        ...     tuner.tell([seconds(trial.setting)] * trial.num_steps)
        >>> str(tuner.best)
        'fusion_threshold=1MiB'
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
        self._space, self._predict, self._on_outcome = space, predict, on_outcome
        self._options, self._floor_seconds = options or TuningOptions(), floor_seconds
        if floor_seconds is not None and not 0 < floor_seconds < math.inf:
            raise UsageError(f"floor_seconds is {floor_seconds}, must be more than 0")
        self._known_seconds = known.step_seconds if known is not None else None
        self.num_searches = self._num_trials = 0
        self.verdict = ""
        self._last: ExchangeSettings | None = None  # what the last steps ran with
        if known is None:
            self._begin()
        else:
            self._begin(begin_with=known.best, known=known.compared)

    @property
    def best(self) -> ExchangeSettings:
        """The best setting so far, at any moment."""
        return self._search.settings[self._search.best]

    def ask(self) -> Trial:
        """What to run next; the same again until it is told how it went."""
        if self._asked is None:
            self._asked = self._next_trial()
            self._num_trials += 1
        return self._asked

    def tell(self, seconds: Sequence[float]) -> None:
        """Take in how long each step of the trial took, those to be ignored included.

        Raises:
            ValueError: there are more or fewer than asked for, or one is no duration.
        """
        trial = self.ask()
        if trial.num_steps is None:
            raise ValueError("the search is over and its setting is kept; there is nothing to tell")
        _check(seconds, trial.num_steps)
        counted = seconds[trial.num_ignored :]
        self._asked, self._last = None, trial.setting
        search, number = self._search, self.num_searches - 1
        if trial.purpose is Purpose.WATCH:
            self._has_changed(counted)
        else:
            self.num_steps += len(seconds)
            self._take_in(self._waiting.pop(0), counted)
        self._report(trial, counted, search, number)

    def record(self, key: TuningKey) -> TuningRecord:
        """What was found so far, for a later run.

        Args:
            key: what it depends on.
        """
        log_seconds = self._search.log_seconds(self._search.best)
        if log_seconds is None:
            raise ValueError("nothing was measured yet, so there is nothing to keep")
        return TuningRecord(
            key=key,
            best=self.best,
            step_seconds=math.exp(log_seconds),
            step_spread=self._search.noise.step_spread,
            num_steps=self.num_steps,
            verdict=self.verdict,
            compared=self._search.found(),
        )

    def _begin(
        self,
        *,
        begin_with: ExchangeSettings | None = None,
        known: Sequence[ComparedSetting] = (),
        surprise: float = 0.0,
    ) -> None:
        self._search = Search(
            self._space,
            self._predict,
            self._options,
            begin_with=begin_with,
            known=known,
            surprise=surprise,
            floor_seconds=self._floor_seconds,
        )
        self.num_searches += 1
        self.num_steps = 0
        self.is_finished = False
        self._asked: Trial | None = None
        self._detector = ChangeDetector()
        self._waiting: list[int] = [self._search.best]  # settings to be run, by index
        self._blocks: dict[int, Sequence[float]] = {}  # of the comparison that goes on
        self._is_best_first = False

    def _next_trial(self) -> Trial:
        search, options = self._search, self._options
        if self.is_finished and not options.is_watching:
            return Trial(number=self._num_trials, setting=self.best, purpose=Purpose.KEEP)
        if self.is_finished:
            setting, purpose, count = self.best, Purpose.WATCH, options.watched_steps
        elif search.log_seconds(search.best) is None:
            setting, purpose, count = self.best, Purpose.FIRST, _FIRST_STEPS
        else:
            setting, purpose = search.settings[self._waiting[0]], Purpose.COMPARE
            count = search.block_steps
        ignored = 0 if setting == self._last else options.switch_steps
        if self._last is None:
            ignored = options.first_steps
        return Trial(
            number=self._num_trials,
            setting=setting,
            purpose=purpose,
            num_steps=count + ignored,
            num_ignored=ignored,
        )

    def _take_in(self, index: int, seconds: Sequence[float]) -> None:
        search = self._search
        is_first = search.log_seconds(search.best) is None
        if index == search.best and not is_first and self._has_changed(seconds):
            return
        search.note(index, seconds)
        if is_first:
            self._check_known(seconds)
        else:
            self._blocks[index] = seconds
        if self._waiting:
            return
        if self._blocks:
            (challenger,) = set(self._blocks) - {search.best}
            search.compare(challenger, self._blocks[challenger], self._blocks[search.best])
            self._blocks = {}
        self._plan_comparison()

    def _plan_comparison(self) -> None:
        """Decide what to compare next, or that it is over."""
        search, options = self._search, self._options
        steps = 2 * (search.block_steps + options.switch_steps)
        has_room = self.num_steps + steps <= search.most_steps
        challenger = search.challenger() if has_room else None
        if challenger is None:
            self.is_finished = True
            self.verdict = verdict_of(search, num_steps=self.num_steps)
            return
        self._is_best_first = not self._is_best_first
        pair = [search.best, challenger]
        self._waiting = pair if self._is_best_first else pair[::-1]

    def _check_known(self, seconds: Sequence[float]) -> None:
        """Do not believe an earlier run whose steps took another time."""
        if self._known_seconds is not None:
            off = abs(log_middle(seconds) - math.log(self._known_seconds))
            if off > _SAME_NETWORK + self._search.noise.step_spread:
                self._search.forget_known()
            self._known_seconds = None

    def _has_changed(self, seconds: Sequence[float]) -> bool:
        """Begin another search if steps with the best setting take another time than before."""
        search = self._search
        usual = search.log_seconds(search.best)
        assert usual is not None, "the best setting was measured"
        spread, doubt = search.noise.step_spread, search.doubt(search.best)
        for one in seconds:
            if self._detector.hear(math.log(one) - usual, spread=spread, doubt=doubt):
                explained = math.log(
                    self._predict(self.best) / search.predicted_seconds[search.best]
                )
                surprise = log_middle(seconds[-_LATEST_STEPS:]) - usual - explained
                self._begin(begin_with=self.best, surprise=abs(surprise))
                return True
        return False

    def _report(
        self, trial: Trial, seconds: Sequence[float], search: Search, search_number: int
    ) -> None:
        index = search.settings.index(trial.setting)
        outcome = Outcome(
            trial=trial,
            search=search_number,
            seconds=math.exp(log_middle(seconds)),
            spread=search.noise.step_spread,
            num_steps=len(seconds),
            predicted_seconds=search.predicted_seconds[index],
            is_best=index == search.best,
            ratio=math.exp(search.outlook(index).mean) if index in search.compared else None,
        )
        self._on_outcome(outcome)
        if self.is_finished and trial.purpose is not Purpose.WATCH:
            log_seconds = search.log_seconds(search.best)
            assert log_seconds is not None, "a search begins with the best"
            self._on_outcome(
                replace(
                    outcome,
                    trial=structs.replace(trial, setting=self.best, purpose=Purpose.KEEP),
                    seconds=math.exp(log_seconds),
                    num_steps=self.num_steps,
                    predicted_seconds=search.predicted_seconds[search.best],
                    is_best=True,
                    ratio=1.0,
                    is_result=True,
                )
            )


def _check(seconds: Sequence[float], num_steps: int) -> None:
    if len(seconds) != num_steps:
        raise ValueError(f"{len(seconds)} steps were told, {num_steps} were asked for")
    for index, one in enumerate(seconds):
        if not 0 < one < math.inf:
            raise ValueError(f"step {index} took {one} s, must be more than 0")
