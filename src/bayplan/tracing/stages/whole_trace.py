"""Tracing a model together with its loss, at any batch size, without memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.data.errors import CaptureError, UsageError
from bayplan.step import Batch, TrainingStep, call_model, loss_of, split_batch
from bayplan.tracing.fake import fake_step, without_memory
from bayplan.tracing.joint_trace import joint_of
from bayplan.tracing.stages.whole import Input, InputKind, WholeStep, shrink_to_one

__all__ = [
    "batch_tensors",
    "named_tensors",
    "num_samples_of",
    "own_tensors",
    "resize_batch",
    "trace_whole",
]


def trace_whole(step: TrainingStep, *, num_samples: int) -> WholeStep:
    """The joint graph of a step's model and loss at a batch size; nothing is run or changed.

    One sample has the graph of two (`shrink_to_one`).
    """
    whole = _traced(step, num_samples)
    if num_samples > 1:
        return whole
    two = _traced(step, 2)
    return whole if _are_alike(whole, two) else shrink_to_one(two, _traced(step, 3))


def _are_alike(small: WholeStep, large: WholeStep) -> bool:
    """Whether two sizes have the same nodes, and no dimension is lost in one of them."""
    return small.fingerprint == large.fingerprint and all(
        value.dim() == large.values[name].dim() for name, value in small.values.items()
    )


def _traced(step: TrainingStep, num_samples: int) -> WholeStep:
    with step.on_gpu(), without_memory() as mode:
        fake = fake_step(replace(step, batch=resize_batch(step.batch, num_samples)), None)
    with step.on_gpu(), mode, fake.precision():
        joint = joint_of(_WithLoss(fake), split_batch(fake.batch, fake.loss_fn))
    joint.module.graph.eliminate_dead_code()
    origins = tuple(_origins(joint.inputs, fake))
    return WholeStep(joint.module, joint.num_forward_outputs, origins, num_samples)


class _WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.model, self.loss_fn = step.model, step.loss_fn

    def forward(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        return loss_of(call_model(self.model, inputs), self.loss_fn, targets)


def named_tensors(step: TrainingStep) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model and its loss, by the names that a graph has for them.

    A tied weight has all its names.
    """
    modules: list[tuple[str, nn.Module]] = [("", step.model)]
    if isinstance(step.loss_fn, nn.Module):
        modules.append(("loss_fn.", step.loss_fn))
    return {
        prefix + name: tensor
        for prefix, module in modules
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }


def own_tensors(step: TrainingStep) -> dict[str, torch.Tensor]:
    """The same, each tensor once, by the first of its names, as in `state_dict`."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(step).items():
        first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


def batch_tensors(batch: Batch) -> list[torch.Tensor]:
    """The tensors of a batch, in an order that depends on its form alone."""
    leaves = torch_compat.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def num_samples_of(batch: Batch) -> int:
    """The size of a batch: the first dimension of its tensors.

    Raises:
        UsageError: they differ, so that samples cannot be told.
    """
    sizes = {tensor.shape[0] for tensor in batch_tensors(batch) if tensor.dim()}
    if len(sizes) != 1:
        listed = ", ".join(map(str, sorted(sizes))) or "no tensors"
        raise UsageError(
            f"to split a batch by samples, all its tensors need one first dimension, got {listed};"
            " keep what is the same for all samples in buffers of the model"
        )
    return sizes.pop()


def resize_batch(batch: Batch, num_samples: int) -> Batch:
    """A batch of the same form with another number of samples; to be called without memory."""
    num_samples_of(batch)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        return tensor.new_empty_strided((num_samples, *tensor.shape[1:]), tensor.stride())

    return torch_compat.tree_map_only(torch.Tensor, resize, batch)


def _origins(inputs: Iterable[Any], step: TrainingStep) -> Iterator[Input]:
    """Where the inputs of a traced graph come from, known by the copies they were traced with."""
    names = {id(tensor): name for name, tensor in own_tensors(step).items()}
    numbers = {id(tensor): number for number, tensor in enumerate(batch_tensors(step.batch))}
    for value in inputs:
        if id(value) in numbers:
            yield Input(InputKind.BATCH, str(numbers[id(value)]))
        elif isinstance(value, nn.Parameter) and id(value) in names:
            yield Input(InputKind.PARAMETER, names[id(value)], value.requires_grad)
        elif id(value) in names:
            yield Input(InputKind.BUFFER, names[id(value)])
        else:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise CaptureError(
                f"the model reads a tensor of shape {shape} that is neither a parameter, a buffer"
                " nor in the batch, so no rank knows where to take it from; register it as a buffer"
            )
