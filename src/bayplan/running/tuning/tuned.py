"""`bayplan.tune`: tune the gradient exchange of a model on many ranks, while it trains.

Settings must change at the same step on all ranks, or ranks would sum different buckets. So rank 0
alone decides, and tells all of them between two steps which setting comes next, and for how many
steps. Until those are over no rank has to ask. What is measured is the slowest rank's time of each
step, which is the time that the step took.
"""

import contextlib
import csv
import hashlib
import statistics
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import distributed, nn

from bayplan.data import files
from bayplan.data.errors import BayplanError, FileFault, UsageError
from bayplan.data.exchange import Algorithm, BucketFile, ExchangeSettings, TuningKey, TuningRecord
from bayplan.devices.device import device_of
from bayplan.devices.machine import cache_directory
from bayplan.running.collectives.data_parallel import DataParallel, exchange_of
from bayplan.running.collectives.groups import own_group
from bayplan.running.tuning.search import TuningOptions
from bayplan.running.tuning.tuner import Outcome, Purpose, Trial, Tuner

__all__ = [
    *("TrialLog", "TunedRun", "Tuning"),
    *("keep_tuning", "kept_tuning", "parameters_fingerprint", "tune"),
]

_MIB = 1 << 20
_WATCHED_STEPS = 5  # that tell what a step is, before anything is predicted
_MESSAGE_BYTES = 1 << 13  # a trial or a fault as JSON, and room to spare
_MOST_TEXT = 1000  # of a fault's
_CPU = torch.device("cpu")
_COLUMNS = (
    *("hierarchical_allreduce", "hierarchical_allgather", "cache_enabled", "cycle_time_ms"),
    *("tensor_fusion_threshold", "score", "search", "trial", "purpose", "algorithm"),
    *("compression", "strip_bytes", "steps", "seconds", "spread", "predicted_seconds"),
    *("ratio_to_best", "is_best"),
)


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
        log: a CSV file for a line of each trial, written by rank 0.
        is_watching: whether to go on quietly, and tune again when the network changes.
        is_fresh: whether to forget what earlier runs with this model on such ranks have found.
        options: how to search.
    """
    chosen = options or TuningOptions(is_watching=is_watching)
    return Tuning(model, log, chosen, is_fresh=is_fresh)


class Tuning:
    """Goes around every training step of one rank."""

    def __init__(
        self, model: nn.Module, log: Path | str | None, options: TuningOptions, *, is_fresh: bool
    ) -> None:
        self._model, self._exchange, self._options = model, exchange_of(model), options
        self._is_fresh, self._is_first = is_fresh, distributed.get_rank() == 0
        self._seconds: list[float] = []  # of the steps before tuning begins
        self._tuner: Tuner | None = None
        self._run: TunedRun | None = None
        self._log: TrialLog | None = None
        if log is not None and self._is_first:
            reduced_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            self._log = TrialLog(log, reduced_bytes=reduced_bytes)

    @property
    def is_finished(self) -> bool:
        """Whether a setting was found; the same on all ranks."""
        return self._run is not None and not self._run.is_tuning

    @property
    def settings(self) -> ExchangeSettings:
        """Those in use, which are the best once it is finished."""
        return self._exchange.settings

    @property
    def verdict(self) -> str:
        """Why the search has ended, in words; on rank 0."""
        return "" if self._tuner is None else self._tuner.verdict

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Train one step inside."""
        if len(self._seconds) < _WATCHED_STEPS:
            begun_seconds = device_of(self._device).now()
            yield
            self._seconds.append(device_of(self._device).now() - begun_seconds)
            return
        if self._run is None:
            self._tuner = self._new_tuner() if self._is_first else None
            self._run = TunedRun(self._tuner, self._exchange.use, device=self._device)
        with self._run.step():
            yield

    def buckets(self, name: str) -> BucketFile:
        """What was found, for a file; `name` is the model's."""
        return BucketFile(
            model=name,
            buckets=self._exchange.averaging.buckets,
            settings=self.settings,
            verdict=self.verdict,
        )

    @property
    def found(self) -> TuningRecord:
        """All that is known of the best setting and of those it was compared with."""
        assert self._tuner is not None, "asked once steps have been tuned"
        return self._tuner.record(self._key)

    def close(self) -> None:
        """Close the log; what was found stays in use."""
        if self._log is not None:
            self._log.close()

    def _new_tuner(self) -> Tuner:
        times = self._exchange.times
        begun_seconds = min(times.ready_seconds.values(), default=float(times.done))
        typical_seconds = statistics.median(self._seconds[1:])
        outside_seconds = max(0.0, typical_seconds - (float(times.done) - begun_seconds))
        return Tuner(
            _candidates(self._exchange),
            lambda settings: outside_seconds + self._exchange.predict(settings),
            self._options,
            known=None if self._is_fresh else kept_tuning(self._key),
            on_outcome=self._hear,
        )

    def _hear(self, outcome: Outcome) -> None:
        if self._log is not None:
            self._log.write(outcome)
        if outcome.trial.purpose is Purpose.RESULT and self._tuner is not None:
            keep_tuning(self._tuner.record(self._key))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @cached_property
    def _key(self) -> TuningKey:
        hosts = self._exchange.hosts
        return TuningKey.of(
            model=parameters_fingerprint(self._model),
            hosts=hosts,
            devices=[device_of(self._device).name] * len(hosts),
            torch_version=str(torch.__version__),
        )


def _candidates(exchange: DataParallel) -> list[ExchangeSettings]:
    """The planned buckets, buckets of fixed sizes, and the algorithms that there are."""
    thresholds = [_MIB // 4 << doublings for doublings in range(10)]  # 256 KiB to 128 MiB
    settings = [ExchangeSettings()]
    settings += [ExchangeSettings(fusion_threshold_bytes=size) for size in thresholds]
    if len(exchange.costs.seconds_of) > 1:
        algorithms = (Algorithm.RING, Algorithm.REDUCE_SCATTER)
        settings += [ExchangeSettings(algorithm=algorithm) for algorithm in algorithms]
    return settings


class TunedRun:
    """Training steps while rank 0 tunes them; made on all ranks at once, used around every step.

    Args:
        tuner: on rank 0; None on all others.
        apply: makes the next step run with a setting; called between steps, on every rank.
        device: of messages: cpu for gloo, this rank's GPU for NCCL.
    """

    def __init__(
        self,
        tuner: Tuner | None,
        apply: Callable[[ExchangeSettings], None],
        *,
        device: torch.device = _CPU,
    ) -> None:
        if not distributed.is_initialized():
            raise UsageError("tuning needs torch.distributed.init_process_group() first")
        self._tuner, self._apply, self._device = tuner, apply, device
        # Of its own, so that its messages never meet those of a step that is still on its way.
        group = own_group(range(distributed.get_world_size()), device)
        assert group is not None, "every rank is a member"
        self._group = group
        self._trial: Trial | None = None
        self._setting: ExchangeSettings | None = None
        self._seconds: list[float] = []
        self._fault: Exception | None = None  # on rank 0
        # Refuse on all ranks at once, so that none waits for one that has gone.
        having = torch.zeros(distributed.get_world_size(), dtype=torch.int32, device=device)
        having[distributed.get_rank()] = int(tuner is not None)
        distributed.all_reduce(having, group=group)
        ranks = having.nonzero().flatten().tolist()
        if ranks != [0]:
            told = f"ranks {', '.join(map(str, ranks))} have one" if ranks else "no rank has one"
            raise UsageError(f"rank 0 alone must have the tuner, but {told}")

    @property
    def is_tuning(self) -> bool:
        """Whether the current steps are measured to find a setting; the same on all ranks."""
        return self._trial is None or self._trial.purpose in (Purpose.FIRST, Purpose.COMPARE)

    @contextlib.contextmanager
    def step(self) -> Iterator[ExchangeSettings]:
        """Run one step inside; gives its setting. A step that raises is not counted."""
        trial = self._trial
        if trial is None or (trial.num_steps is not None and not self._seconds):
            self._trial = trial = self._decided()
            if trial.setting != self._setting:
                self._apply(trial.setting)
                self._setting = trial.setting
        if trial.num_steps is None:
            yield trial.setting
            return
        begun_seconds = self._now()
        yield trial.setting
        self._seconds.append(self._now() - begun_seconds)
        if len(self._seconds) == trial.num_steps:
            self._end()

    def _decided(self) -> Trial:
        """What rank 0 decides, on all ranks; as JSON, because objects would be pickled."""
        message = torch.full((_MESSAGE_BYTES,), ord(" "), dtype=torch.uint8)
        if self._tuner is not None:
            fault, is_users = self._fault, isinstance(self._fault, BayplanError)
            text = f"{type(fault).__name__}: {fault}"[:_MOST_TEXT]
            told = self._tuner.ask() if fault is None else (is_users, text)
            content = msgspec.json.encode(told)
            message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        message = message.to(self._device)
        distributed.broadcast(message, 0, group=self._group)
        decided = msgspec.json.decode(
            message.cpu().numpy().tobytes(), type=Trial | tuple[bool, str]
        )
        if isinstance(decided, Trial):
            return decided
        is_users, text = decided
        kind = UsageError if is_users else RuntimeError
        raise kind(f"tuning failed on rank 0: {text}") from self._fault

    def _end(self) -> None:
        """Let rank 0 know how long the slowest rank took for each step."""
        slowest = torch.tensor(self._seconds, dtype=torch.float64, device=self._device)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group=self._group)
        self._seconds = []
        if self._tuner is not None:
            try:
                self._tuner.tell(slowest.tolist())
            except Exception as fault:  # whatever it is, all ranks raise it before the next step
                self._fault = fault

    def _now(self) -> float:
        return device_of(self._device).now()


class TrialLog:
    """A CSV file that is whole after every line; one that is there is replaced.

    The first six columns are those of Horovod's autotune log, with its units: milliseconds, MiB,
    and a score in bytes all-reduced per microsecond, which is MB/s. What is left to be chosen is
    empty there. As in Horovod's, the last line of a search that has ended is its best setting.

    Args:
        reduced_bytes: gradients that a step all-reduces, for the score.
    """

    def __init__(self, path: Path | str, *, reduced_bytes: int) -> None:
        self._reduced_bytes = reduced_bytes
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Line by line, and open for as long as there are trials.
            self._file = Path(path).open("w", 1, encoding="utf-8", newline="")  # noqa: SIM115
        except OSError as fault:
            raise FileFault(f"cannot write {path}: {fault.strerror}") from fault
        self.close = self._file.close
        self._rows = csv.DictWriter(
            self._file, _COLUMNS, extrasaction="ignore", lineterminator="\n"
        )
        self._rows.writeheader()

    def write(self, outcome: Outcome) -> None:
        """Write a trial's line; fit for `Tuner(on_outcome=...)`."""
        trial, threshold = outcome.trial, outcome.trial.setting.fusion_threshold_bytes
        row = {
            **msgspec.structs.asdict(trial.setting),
            **vars(outcome),
            "tensor_fusion_threshold": None if threshold is None else threshold / _MIB,
            "score": self._reduced_bytes / outcome.seconds / 1e6,
            "search": trial.search,
            "trial": None if trial.purpose is Purpose.RESULT else trial.number,
            "purpose": trial.purpose,
        }
        self._rows.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def parameters_fingerprint(model: nn.Module) -> str:
    """A hash of names, shapes and types; how long backward takes is left out."""
    forms = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return hashlib.sha256(repr(forms).encode()).hexdigest()[:16]


def kept_tuning(key: TuningKey) -> TuningRecord | None:
    """What an earlier run found; None if there was none, or what is left of it cannot be read."""
    with contextlib.suppress(FileFault, OSError):  # not there, damaged, or not to be looked into
        record = files.read(_path(key), TuningRecord)
        return record if record.key == key else None  # a file may have been renamed
    return None


def keep_tuning(record: TuningRecord) -> None:
    """Keep it for later runs; a cache that cannot be written costs them time alone."""
    with contextlib.suppress(FileFault):
        files.write(_path(record.key), record)


def _path(key: TuningKey) -> Path:
    return cache_directory() / "tuning" / f"{key.name}.json"
