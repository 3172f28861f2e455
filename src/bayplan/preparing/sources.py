"""Where a `PreparedStep` comes from: a module in hand, a target by name, or a plan's request."""

from typing import Any

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.costing.catalogue import load_device
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.plan import DevicePlan, Plan
from bayplan.devices.choosing import chosen_device, is_chosen
from bayplan.devices.device import GPU, device_named, device_of
from bayplan.devices.fake_gpu import FakeGpu
from bayplan.models.targets import (
    Target,
    check_one_device,
    one_home,
    resolve_target,
    without_rest,
)
from bayplan.preparing.step import PreparedStep
from bayplan.step import AUTOCASTS, Batch, LossFunction, autocast_dtype, check_model
from bayplan.tracing.fake import OptimizerSource
from bayplan.tracing.stages.whole_trace import batch_tensors

__all__ = ["on_cluster", "planned_on", "prepare", "step_of_plan"]


def prepare(
    model: nn.Module | str,
    batch: Batch = None,
    loss_fn: LossFunction = None,
    *,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    device: str | DeviceKind | None = None,
    on: str | torch.device | None = None,
    **options: Any,
) -> "PreparedStep":
    """Prepare a model of the user's, or a target by name.

    Args:
        model: a module; or a target as on the command line, `resnet50` or `my.train:build`.
        batch: a batch of that module; of a target, the number of samples.
        loss_fn: as for `bayplan.capture`; a target has its own.
        optimizer: `sgd`, `adam`, `adamw`, an optimizer of this model, or a function from
            parameters to one; None for no update.
        autocast: `bf16`, `fp16`, a dtype, or None.
        device: a device that need not be here, by name or file; None for where the model is.
        on: a device of this machine that a target is built on: `cpu`, `cuda:1`; by default the
            accelerator if there is one. A module is where it is.
        **options: of `PreparedStep`.
    """
    if device is not None and is_chosen(on):
        raise UsageError(
            f"--on {on} runs the step on a device of this machine, and --device asks about one that"
            " need not be here; give one of them"
        )
    if isinstance(model, str):
        if batch is not None and type(batch) is not int:
            raise UsageError(
                f"the target {model!r} makes its own batch; say how many samples, as a number"
            )
        target, size = resolve_target(model), batch
        if device is None:
            target = target.on(on)
    else:
        check_model(model, loss_fn)
        check_one_device(model)
        _check_batch(batch)
        if device is None:
            _check_home(model, batch, on)
        if device is not None:  # where only what the step reads is copied to
            batch = without_rest(batch)
        target, size = _given_target(model, batch, loss_fn), None
    precision = {dtype: name for name, dtype in AUTOCASTS.items()}
    return PreparedStep(
        target=target,
        batch=size,
        optimizer="none" if optimizer is None else optimizer,
        autocast=precision[autocast_dtype(autocast)],
        device=load_device(device) if isinstance(device, str) else device,
        **options,
    )


def _check_batch(batch: Batch) -> None:
    if any(tensor.is_nested for tensor in batch_tensors(batch)):
        raise UsageError(
            "the batch has a nested tensor, whose memory depends on the lengths in it. Give the"
            " model padded tensors and a mask (`tensor.to_padded_tensor(0.0)`), or train it without"
            " a plan"
        )


def _check_home(model: nn.Module, batch: Batch, on: str | torch.device | None) -> None:
    home = one_home(model)
    if any(tensor.is_meta for tensor in batch_tensors(batch)):
        raise UsageError(
            f"the batch has tensors on meta, which has no memory, so the step cannot run; the model"
            f" is on {home}"
        )
    if is_chosen(on) and chosen_device(on) is not device_of(home):
        raise UsageError(
            f"the model is on {home}, and on={str(on)!r} is another device; move it there yourself,"
            f" with model.to({str(on)!r}), and its batch"
        )


def _given_target(model: nn.Module, batch: Batch, loss_fn: LossFunction) -> Target:
    sizes = {tensor.shape[0] for tensor in batch_tensors(batch) if tensor.dim()}
    samples = sizes.pop() if len(sizes) == 1 else None

    def build(size: int | None) -> tuple[nn.Module, Any, Any]:
        if size is None or samples is None or size == samples:
            return model, batch, loss_fn
        rows = torch.arange(size) % samples  # real samples, as often as needed

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows.to(tensor.device)] if tensor.dim() else tensor

        return model, torch_compat.tree_map_only(torch.Tensor, resize, batch), loss_fn

    return Target(
        name=type(model).__name__,
        build=build,
        takes_batch_size=samples is not None,
        default_batch=samples,
        is_given=True,
    )


def on_cluster(step: PreparedStep, cluster: Cluster) -> PreparedStep:
    """The same step with the operators of a cluster's GPUs, of the oldest if they differ."""
    kinds = [cluster.kinds[name] for name in {device.kind for device in cluster.devices}]
    has_gpus = any(kind.allocation_granularity_bytes == GPU.granularity_bytes for kind in kinds)
    architecture = FakeGpu.oldest([kind.architecture for kind in kinds])
    is_here = not architecture and device_of(step.model_device).is_accelerator
    return step.changed(operators=architecture) if has_gpus and not is_here else step


def step_of_plan(
    plan: Plan, *, target: str | None = None, on: str | torch.device | None = None
) -> "PreparedStep":
    """The step that a plan was made for.

    Args:
        plan: from a file, so nothing in it is run as code.
        target: needed where the plan names a function of the user's own.
        on: as for `prepare`; by default the device that the plan is for, if it is here.
    """
    request = plan.request
    if request is None:
        raise FileFault("the plan does not say what it was made for (`request` is missing)")
    if target is None and ":" in request.target:
        raise UsageError(
            f"the plan is for {request.target}, which is code, and a plan file is not trusted to"
            f" name code to run; if you trust it, say --target {request.target}"
        )
    return PreparedStep(
        target=resolve_target(target or request.target).on(planned_on(plan, on)),
        batch=request.batch,
        optimizer=request.optimizer,
        autocast=request.autocast,
        update_in_backward=request.update_in_backward,
        operators=request.operators or None,
    )


def planned_on(plan: Plan, on: str | torch.device | None) -> str | torch.device | None:
    """Where a plan is run: as `--on` says, or on the device that it was made for."""
    planned = None if is_chosen(on) else device_named(plan.cluster_fingerprint)
    if planned is None:
        return on
    # Ranks take one each of its kind.
    return planned.where if isinstance(plan, DevicePlan) else torch.device(planned.where.type)
