"""Brings samples into a step's batch, one batch after the other, and measures how fast they come.

A step's own batch is the place that samples are copied to: a plan has counted its memory, and the
compiled step has seen its form. Workers are those of torch's `DataLoader`. One run has one of it,
for all epochs and evaluations, so that workers go on while the model is evaluated and an epoch
begins without a wait.
"""

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from bayplan.data.errors import BayplanError, FileFault, PlanBroken, UsageError
from bayplan.data.record import DataPosition, InputRecord
from bayplan.devices.device import device_of
from bayplan.running.inputs.images import ImageReader, normalise
from bayplan.running.inputs.order import BatchIndices, batch_indices, num_batches
from bayplan.running.inputs.sources import BatchForm, Data, Images
from bayplan.running.inputs.tokens import TokenFile

__all__ = ["Fed", "Feed", "FeedOptions", "dead_workers_explained"]

_NAMED = 10  # unreadable samples that a record names
_MOST_WORKERS = 16
_STDERR = 2
_SPARE_TRIES = 100  # samples that may be unreadable one after the other


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How much of the data a run is given, and by whom.

    Attributes:
        epochs, steps: where the run ends, at what comes first; without both after one epoch.
        workers: processes that read samples; None for as many as seem right.
        skip_unreadable: gives the place of a sample that cannot be read to the next one that can.
        position: where to begin.
    """

    epochs: int | None = None
    steps: int | None = None
    workers: int | None = None
    skip_unreadable: bool = False
    position: DataPosition = field(default_factory=DataPosition)

    def __post_init__(self) -> None:
        for name in ("epochs", "steps"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"--{name} is {count}; at least 1 must run")
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"--workers is {self.workers}; 0 reads samples between steps")

    def resumed(self, done: int, position: Any) -> "FeedOptions":
        """What is left of the same run after so many steps, by where a checkpoint says it was."""
        if position is None:
            return self
        steps = None if self.steps is None else max(0, self.steps - done) or None
        try:
            return replace(self, steps=steps, position=msgspec.convert(position, DataPosition))
        except msgspec.ValidationError as fault:
            raise FileFault(f"the checkpoint is at no place in data: {fault}") from None


@contextmanager
def dead_workers_explained() -> Iterator[None]:
    """Say what the death of a worker means; torch raises it wherever the process just is."""
    try:
        yield
    except Exception as fault:
        died, cause = None, fault  # in the midst of a step, it is behind what is said of that
        while cause is not None:
            died = cause if "DataLoader worker" in str(cause) else died
            cause = cause.__cause__
        if died is None:
            raise
        raise PlanBroken(
            f"a process that reads samples has died: {died}. If it was killed for lack of memory,"
            " use fewer --workers"
        ) from None


class Fed(NamedTuple):
    """A batch that is in its place.

    Attributes:
        inputs, targets: the place, or of a smaller batch its first samples.
    """

    indices: BatchIndices
    inputs: torch.Tensor
    targets: torch.Tensor


class Feed:
    """All batches of a run; iterating fills the place with one after the other.

    Attributes:
        num_steps: batches to train on.
        waits: for each of these so far, the seconds that it was waited for.
        position: of the next sample.
    """

    def __init__(
        self,
        data: Data,
        form: BatchForm,
        place: tuple[torch.Tensor, torch.Tensor],
        options: FeedOptions,
        *,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Check that there is enough to train on; nothing is read yet.

        Args:
            data, form: as `Data` has them.
            place: inputs and targets of the step.
            options: of the run.
            share: of batches to evaluate with, every so manieth from a first one; of a rank, its
                number and that of all.
        """
        self._data, self._form, self._place, self._options = data, form, place, options
        self._share = share
        self.position = options.position
        self.num_samples = data.num_samples(form)
        size = form.batch_size
        if self.position.index > self.num_samples:
            raise UsageError(
                f"the run would go on at sample {self.position.index} of an epoch, and {data.path}"
                f" has {self.num_samples}; it is other data than before"
            )
        epochs = options.epochs
        if epochs is None and options.steps is None:
            epochs = self.position.epoch + 1
        counts = [] if options.steps is None else [options.steps]
        if epochs is not None:
            counts.append(
                num_batches(self.num_samples, size, position=self.position, epochs=epochs)
            )
        self.num_steps = min(counts)
        if not self.num_steps:
            raise UsageError(
                f"nothing is left to train on: {self.position.epoch} epochs are done of {epochs}"
            )
        self.waits: list[float] = []
        self._made_samples, self._making_seconds = 0, 0.0
        self._skipped: list[str] = []
        self._reading: _Reading | None = None
        if not data.is_synthetic:
            training, evaluation = data.samples(form)
            self._reading = _Reading(training, evaluation, form, options)

    def evaluated(self) -> Iterator[Fed]:
        """A batch of each size that is evaluated with, whatever its place has now."""
        evaluation = None if self._reading is None else self._reading.evaluation
        if evaluation is not None:
            size = self._form.batch_size
            for count in {min(size, len(evaluation)), len(evaluation) % size or size}:
                inputs, targets = (whole[:count] for whole in self._place)
                indices = BatchIndices(False, 0, 0, tuple(range(count)), False)
                yield Fed(indices, inputs, targets)

    @property
    def num_workers(self) -> int:
        chosen = self._options.workers
        if self._data.is_synthetic:
            return 0
        if chosen is not None:
            return chosen
        if self._form.image_shape is None:
            return 0  # windows of a mapped file cost next to nothing
        cores = len(os.sched_getaffinity(0)) // self._share[1]
        # On a CPU, the step itself takes the cores.
        is_accelerator = device_of(self._place[0].device).is_accelerator
        return max(1, min(_MOST_WORKERS, cores if is_accelerator else cores // 2))

    def record(self, *, num_warm: int, num_measured: int) -> InputRecord:
        """What is known of the samples so far; of waits, those of steps that were measured."""
        return InputRecord(
            kind=self._data.kind,
            source="" if self._data.is_synthetic else str(self._data.path),
            num_workers=self.num_workers,
            dropped_samples=self.num_samples % self._form.batch_size,
            wait_seconds=tuple(self.waits[num_warm : num_warm + num_measured]),
            made_samples=self._made_samples,
            making_seconds=self._making_seconds,
            num_skipped=len(self._skipped),
            skipped=tuple(self._skipped[:_NAMED]),
            position=self.position,
        )

    def __iter__(self) -> Iterator[Fed]:
        loaded = self._loaded()
        while True:
            began = time.perf_counter()
            batch = next(loaded, None)
            if batch is None:
                return
            if isinstance(batch, str):
                raise FileFault(f"{batch}; --skip-unreadable trains without such samples")
            fed = self._put(batch)
            if fed.indices.is_training:
                self.waits.append(time.perf_counter() - began)
                self._made_samples += len(fed.indices.samples)
                self._making_seconds += batch.seconds
            self._skipped += batch.skipped
            del batch  # its memory is no part of the step
            yield fed
            if fed.indices.is_training:
                self.position = self.after(fed.indices)

    def after(self, indices: BatchIndices) -> DataPosition:
        """Where the next batch begins."""
        seed = self._options.position.seed
        if indices.ends:
            return DataPosition(seed=seed, epoch=indices.epoch + 1)
        end = indices.start + len(indices.samples)
        return DataPosition(seed=seed, epoch=indices.epoch, index=end)

    def _loaded(self) -> "Iterator[_Loaded | str]":
        reading = self._reading
        evaluation = None if reading is None else reading.evaluation
        indices = batch_indices(
            self.num_samples,
            self._form.batch_size,
            position=self._options.position,
            num_steps=self.num_steps,
            shards=() if reading is None else reading.training.shards,
            num_evaluated=0 if evaluation is None else len(evaluation),
            share=self._share,
        )
        if reading is None:
            return (_Loaded(each, None, None, 0.0, ()) for each in indices)
        num_workers = self.num_workers
        loader: DataLoader[Any] = DataLoader(
            reading,
            batch_sampler=indices,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=device_of(self._place[0].device).is_accelerator,
            worker_init_fn=_heed_no_signals,
            generator=torch.Generator(),  # else torch's own, which dropout goes on with
        )
        return iter(loader)

    def _put(self, batch: "_Loaded") -> Fed:
        """Copy a batch to its place."""
        if batch.inputs is None or batch.targets is None:
            return Fed(batch.indices, *self._place)
        inputs, targets = (whole[: len(batch.indices.samples)] for whole in self._place)
        if self._form.image_shape is None:
            inputs.copy_(batch.inputs, non_blocking=True)
        else:
            normalise(batch.inputs, inputs)
        targets.copy_(batch.targets, non_blocking=True)
        return Fed(batch.indices, inputs, targets)


class _Loaded(NamedTuple):
    """A batch as it comes from a worker, with the seconds that it took there."""

    indices: BatchIndices
    inputs: torch.Tensor | None
    targets: torch.Tensor | None
    seconds: float
    skipped: tuple[str, ...]


def _as_it_is(batch: Any) -> Any:
    return batch


def _heed_no_signals(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal, SIGTERM of a scheduler every one of a job.

    Workers end with the process that started them, which may have steps to end and a state to save.
    Sockets that a worker has inherited are closed: a rank hears of signals by one, and others show
    the other ranks that it lives, which would stay open after its death.
    """
    signal.set_wakeup_fd(-1)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is gone
            if int(name) > _STDERR and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    """End on SIGTERM, by which it is told to at last, from this one alone."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class _Reading(Dataset[Any]):
    """What a worker does: whole batches, so that their time is known."""

    def __init__(
        self,
        training: Images | TokenFile,
        evaluation: Images | TokenFile | None,
        form: BatchForm,
        options: FeedOptions,
    ) -> None:
        self.training, self.evaluation = training, evaluation
        self._form, self._options = form, options
        self._reader = None if form.image_shape is None else ImageReader(*form.image_shape)

    def __getitems__(self, indices: BatchIndices) -> "_Loaded | str":
        """A batch, or why there is none: an exception would lose its words on the way."""
        began = time.perf_counter()
        skipped: list[str] = []
        if not indices.samples:
            return _Loaded(indices, None, None, 0.0, ())
        try:
            pairs = [self._sample(indices, index, skipped) for index in indices.samples]
        except BayplanError as fault:
            return str(fault)
        inputs, targets = (
            torch.from_numpy(numpy.stack(column)) for column in zip(*pairs, strict=True)
        )
        return _Loaded(indices, inputs, targets, time.perf_counter() - began, tuple(skipped))

    def _sample(
        self, indices: BatchIndices, index: int, skipped: list[str]
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        samples = self.training if indices.is_training else self.evaluation
        assert samples is not None, "nothing is evaluated without samples"
        for _ in range(_SPARE_TRIES):
            try:
                if isinstance(samples, TokenFile):
                    window = samples.window(index)
                    return window[:-1], window[1:]
                pixels = self._pixels(samples, indices, index)
                return pixels, samples.labels()[index]
            except FileFault as fault:
                if not self._options.skip_unreadable:
                    raise
                skipped.append(str(fault))
                index = (index + 1) % len(samples)
        raise FileFault(f"{skipped[-1]}; {_SPARE_TRIES} samples after each other cannot be read")

    def _pixels(self, samples: Images, indices: BatchIndices, index: int) -> numpy.ndarray:
        assert self._reader is not None, "images have a shape"
        seed = self._options.position.seed
        draw = (seed, indices.epoch, index) if indices.is_training else None
        content = samples.content(index)
        try:
            return self._reader.read(content, draw=draw)
        except FileFault as fault:
            raise FileFault(f"{samples.name(index)} is {fault}") from None
