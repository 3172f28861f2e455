"""`bayplan.tune`: find the fastest way to exchange a model's gradients, while it trains."""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import distributed, nn

from bayplan.data.bucket_file import BucketFile
from bayplan.data.exchange_settings import Algorithm, ExchangeSettings
from bayplan.data.tuning_record import TuningKey
from bayplan.devices.machine import device_name
from bayplan.replicated import DataParallel, exchange_of
from bayplan.tuning.keeping import keep_tuning, kept_tuning, parameters_fingerprint
from bayplan.tuning.log import TrialLog
from bayplan.tuning.options import TuningOptions
from bayplan.tuning.space import Range, SearchSpace
from bayplan.tuning.tuned_run import TunedRun
from bayplan.tuning.tuner import Tuner

__all__ = ["Tuning", "tune"]

_MIB = 1 << 20
_THRESHOLDS = (1 * _MIB, 5 * _MIB, 25 * _MIB, 100 * _MIB)
_WATCHED_STEPS = 5  # that tell what a step is, before anything is predicted


def tune(
    model: nn.Module,
    *,
    log: Path | str | None = None,
    is_watching: bool = False,
    is_fresh: bool = False,
    options: TuningOptions | None = None,
) -> "Tuning":
    """Tune the exchange of a model that `data_parallel` was called with, on every rank.

    Results of training do not change, but for the order of additions. It ends by itself, when
    nothing can be faster by more than the noise; then the best setting stays. ::

        tuning = bayplan.tune(model, log="tune.csv")
        for batch in loader:
            with tuning.step():
                train(batch)

    Args:
        model: the one that trains.
        log: a file for a line of each trial, written by rank 0.
        is_watching: whether to go on quietly, and tune again when the network changes.
        is_fresh: whether to forget what earlier runs with this model on such ranks have found.
        options: how to search.
    """
    chosen = options or TuningOptions(is_watching=is_watching)
    return Tuning(model, exchange_of(model), log, chosen, is_fresh=is_fresh)


class Tuning:
    """Goes around every training step of one rank."""

    def __init__(
        self,
        model: nn.Module,
        exchange: DataParallel,
        log: Path | str | None,
        options: TuningOptions,
        *,
        is_fresh: bool,
    ) -> None:
        self._model, self._exchange, self._options = model, exchange, options
        self._is_fresh = is_fresh
        self._seconds: list[float] = []  # of the steps before tuning begins
        self._tuner: Tuner | None = None
        self._run: TunedRun | None = None
        self._opened = ExitStack()
        self._log = None
        self._is_kept = False
        if log is not None and distributed.get_rank() == 0:
            reduced_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            self._log = self._opened.enter_context(TrialLog(log, reduced_bytes=reduced_bytes))

    @property
    def is_finished(self) -> bool:
        """Whether a setting was found; the same on all ranks."""
        return self._run is not None and not self._run.is_tuning

    @property
    def settings(self) -> ExchangeSettings:
        """Those in use, which are the best once it is finished."""
        return self._exchange.settings

    @property
    def num_steps(self) -> int:
        """Of the search so far; known on rank 0."""
        return len(self._seconds) + (0 if self._tuner is None else self._tuner.num_steps)

    @property
    def verdict(self) -> str:
        """Why the search has ended, in words; on rank 0."""
        return "" if self._tuner is None else self._tuner.verdict

    @contextmanager
    def step(self) -> Iterator[None]:
        """Train one step inside."""
        if len(self._seconds) < _WATCHED_STEPS:
            begun = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - begun)
            return
        if self._run is None:
            self._begin()
        assert self._run is not None, "it was just made"
        with self._run.step():
            yield
        self._keep()

    def buckets(self, name: str) -> BucketFile:
        """What was found, for a file; `name` is the model's."""
        return BucketFile(
            model=name,
            buckets=self._exchange.averaging.buckets,
            settings=self.settings,
            verdict=self.verdict,
        )

    def close(self) -> None:
        """Close the log; what was found stays in use."""
        self._opened.close()

    def _begin(self) -> None:
        if distributed.get_rank() == 0:
            times = self._exchange.times
            first = min(times.ready.values(), default=times.done_seconds)
            typical = statistics.median(self._seconds[1:])
            outside = max(0.0, typical - (times.done_seconds - first))
            self._tuner = Tuner(
                _space(self._exchange),
                lambda settings: outside + self._exchange.predict(settings),
                self._options,
                known=None if self._is_fresh else kept_tuning(self._key()),
                on_outcome=lambda outcome: self._log.write(outcome) if self._log else None,
            )
        self._run = TunedRun(
            self._tuner, self._exchange.use, device=next(self._model.parameters()).device
        )

    def _keep(self) -> None:
        """Once it is finished, keep what was found for later runs."""
        if self._tuner is not None and self._tuner.is_finished and not self._is_kept:
            self._is_kept = True
            keep_tuning(self._tuner.record(self._key()))

    def _key(self) -> TuningKey:
        device = device_name(next(self._model.parameters()).device)
        hosts = self._exchange.hosts
        return TuningKey.of(
            model=parameters_fingerprint(self._model.named_parameters()),
            hosts=hosts,
            devices=[device] * len(hosts),
            torch_version=str(torch.__version__),
        )


def _space(exchange: DataParallel) -> SearchSpace:
    """The planned buckets, buckets of fixed sizes, and every way to sum that there is."""
    settings = [ExchangeSettings()]
    settings += [ExchangeSettings(fusion_threshold_bytes=one) for one in _THRESHOLDS]
    settings += [
        ExchangeSettings(algorithm=one)
        for one in (Algorithm.RING, Algorithm.REDUCE_SCATTER)
        if len(exchange.costs.seconds_of) > 1
    ]
    return SearchSpace(tuple(settings), (Range("fusion_threshold_bytes", _MIB // 4, 128 * _MIB),))
