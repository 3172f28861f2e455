"""Accelerate: `fit(accelerator, model, loader, loss_fn, memory="8GiB")` after `prepare`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from bayplan.data.errors import UsageError
from bayplan.data.units import Limit
from bayplan.integrations.first_step import check_inner, fit_inner
from bayplan.integrations.step_watch import StepWatch
from bayplan.tracing.capture import same_generators

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DynamoBackend, send_to_device
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "bayplan.integrations.accelerate needs accelerate: pip install accelerate"
    ) from None

__all__ = ["check_accelerator", "fit", "unprepared"]


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    memory: str | int | Limit,
    optimizer: torch.optim.Optimizer | AcceleratedOptimizer | None = None,
    measure: bool = True,
    **options: Any,
) -> StepWatch:
    """Fit a prepared model; its loop stays as it is.

    Args:
        model: that `accelerator.prepare` returned.
        batch: as the loader gives it, or the prepared loader itself, whose first samples are then
            read from its dataset. With a loss of two arguments it is a pair `(inputs, targets)`.
        loss_fn: as for `bayplan.fit`: of output and targets, of the output alone, or None where
            the model returns its loss.
        memory: the limit for the whole step: `8GiB`, bytes, or a share of the plain peak, `70%`.
        optimizer: the prepared one, whose state is counted and whose updates end steps.
        measure: whether peaks are measured.
        **options: of `bayplan.fit`, such as `swap` or `time_limit_seconds`.

    Returns:
        What was predicted and is measured: `accelerator.log(watch.figures(), step=...)`.

    Raises:
        UsageError: the model was prepared in a way that cannot be planned.
    """
    check_accelerator(accelerator)
    check_inner(model)
    inner = accelerator.unwrap_model(model)
    check_inner(inner)
    if isinstance(batch, DataLoader):
        batch = _first_batch(batch)
    watch = fit_inner(
        inner,
        send_to_device(batch, accelerator.device),
        loss_fn,
        memory=memory,
        optimizer=unprepared(optimizer),
        accumulates=accelerator.gradient_accumulation_steps > 1,
        measure=measure,
        **options,
    )
    backward = accelerator.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        watch.computed()

    accelerator.backward = watched
    return watch


def _first_batch(loader: DataLoader) -> Any:
    """A batch of a loader's first samples, without a number drawn or an iteration begun."""
    sampler: Any = loader.batch_sampler
    size = getattr(sampler, "batch_size", None)
    if isinstance(loader.dataset, IterableDataset) or size is None:
        raise UsageError(
            "the loader has no samples to be read by number (an IterableDataset, or no batch size):"
            " give a batch as it yields them in place of the loader"
        )
    with same_generators():
        return loader.collate_fn([loader.dataset[index] for index in range(size)])


def unprepared(
    optimizer: torch.optim.Optimizer | AcceleratedOptimizer | None,
) -> torch.optim.Optimizer | None:
    """The optimizer that Accelerate has wrapped."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse what is known from an Accelerator's settings."""
    kind = accelerator.distributed_type
    if kind is not DistributedType.NO and not kind.value.startswith("MULTI_"):
        raise UsageError(
            f"Accelerate trains with {kind.value}, which does not leave the whole model on each"
            " device, and a plan is for a whole model. Use data parallel (DDP) or one device"
        )
    shards = accelerator.parallelism_config
    if shards is not None and shards.total_size != shards.dp_replicate_size:
        raise UsageError(
            "Accelerate's parallelism_config splits the model or its sequences between devices"
            f" ({shards.total_size} in all, {shards.dp_replicate_size} of them replicas), and a"
            " plan is for a whole model. Use replicas alone"
        )
    if accelerator.mixed_precision == "fp8":
        raise UsageError(
            "Accelerate's mixed_precision is fp8, whose kernels are not planned; use bf16 or fp16"
        )
    compiling = accelerator.state.dynamo_plugin
    if compiling is not None and compiling.backend is not DynamoBackend.NO:
        raise UsageError(
            f"Accelerate compiles the model (dynamo backend {compiling.backend.value}), and a plan"
            " takes the place of that: leave dynamo_backend out"
        )
