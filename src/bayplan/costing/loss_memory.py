"""What a loss outside the model takes: at its peak, and for the rest of the step.

The loss runs between the planned forward and the planned backward, so no plan changes it. It is
captured alone, with the model's outputs as its parameters: what autograd keeps for its backward,
and what each formula releases, is then seen as in a whole step. Three things are counted.

- The most memory that loss and its own backward take over what is there when the loss begins.
- What stays from then on. Some losses are reduced in the storage of the unreduced one, which the
  loop's variable keeps; and a loss with parameters of its own has their gradients.
- What is there during the whole step and no model reads: targets, and the loss's own tensors.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.costing.operators import measured_workspaces
from bayplan.data.graph import Phase, StepGraph, Storage, StorageKind
from bayplan.data.live_memory import replay_memory
from bayplan.data.units import round_up
from bayplan.step import TrainingStep, call_model, loss_of, split_batch
from bayplan.tracing.capture import capture_step, warm_fake
from bayplan.tracing.joint import LossMemory
from bayplan.tracing.tangents import as_made, map_tensors, output_gradients

__all__ = ["loss_memory"]

_LOSS = "loss."  # before the names of the loss's own tensors in a captured graph


def loss_memory(
    step: TrainingStep, *, granularity_bytes: int = 1, cache: Path | None = None
) -> LossMemory:
    """Capture a step's loss alone, and what of the step's tensors the model does not read.

    Args:
        granularity_bytes: the allocator's rounding.
        cache: for the compiled counter of scratch memory; None leaves scratch memory out.
    """
    with warm_fake(step, None) as fake:
        parameters = fake.model.named_parameters()
        trained = frozenset(name for name, each in parameters if each.grad is not None)
        inputs, targets = split_batch(fake.batch, fake.loss_fn)
        with _Reads() as model_reads, fake.precision():
            output = call_model(fake.model, inputs)
        beside_bytes = sum(
            round_up(size, granularity_bytes)
            for storage, size in _given(fake).items()
            if storage not in model_reads.storages
        )
        with fake.precision():
            gradients = output_gradients(
                output, lambda output: loss_of(output, fake.loss_fn, targets)
            )
        if fake.loss_fn is None:  # the model computes it: it is part of the graph
            return LossMemory(beside_bytes=beside_bytes, gradients=gradients, trained=trained)
        alone = TrainingStep(
            model=_Given(output),
            batch=((), *targets) if targets else (),
            loss_fn=fake.loss_fn,
            autocast=fake.autocast,
            gpu=fake.gpu,
        )
    graph = capture_step(alone)
    workspaces = [0] * len(graph.nodes)
    if cache is not None:
        nodes = range(len(graph.nodes))
        measured = measured_workspaces(
            alone, graph, nodes, optimizer=None, granularity_bytes=granularity_bytes, cache=cache
        )
        workspaces = [measured[index] for index in nodes]

    def rounded(storages: Iterable[Storage]) -> int:
        return sum(round_up(each.size_bytes, granularity_bytes) for each in storages)

    given = [each for each in graph.storages if each.born is None]
    # Such as a network that the loss function refers to, and that nobody registered.
    unnamed = (each for each in given if each.kind is StorageKind.BUFFER and not each.name)
    peak_bytes = replay_memory(graph, workspaces, granularity_bytes=granularity_bytes).peak_bytes
    own = (each for each in given if each.name.removeprefix(_LOSS) in _trained(fake.loss_fn))
    return LossMemory(
        peak_bytes=peak_bytes - rounded(given),
        kept_bytes=rounded(_own_storage(graph)) + rounded(own),
        beside_bytes=beside_bytes + rounded(unnamed),
        gradients=gradients,
        trained=trained,
    )


def _given(step: TrainingStep) -> dict[int, int]:
    """By key, the bytes of every storage that is there before a step and is not the optimizer's."""
    modules = [each for each in (step.model, step.loss_fn) if isinstance(each, nn.Module)]
    tensors = [tensor for module in modules for tensor in _tensors_of(module)]
    storages = [each.untyped_storage() for each in (*tensors, *torch_compat.tensors_in(step.batch))]
    return {torch_compat.storage_key(storage): storage.nbytes() for storage in storages}


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _trained(loss_fn: Any) -> frozenset[str]:
    """The names of a loss's own parameters that get a gradient."""
    if not isinstance(loss_fn, nn.Module):
        return frozenset()
    return frozenset(name for name, each in loss_fn.named_parameters() if each.requires_grad)


def _own_storage(graph: StepGraph) -> list[Storage]:
    """The storage of the loss itself, unless it is one of the model's outputs."""
    first = next(node for node in graph.nodes if node.phase is Phase.BACKWARD)
    # Every backward begins with the gradient of the loss, which is made like the loss.
    storage = graph.storages[graph.values[first.reads[0]].storage]
    return [] if storage.born is None else [storage]


class _Reads(torch_compat.OperatorWatch):
    """Notes the storages that operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        for tensor in torch_compat.tensors_in((args, kwargs)):
            self.storages.add(torch_compat.storage_key(tensor.untyped_storage()))
        return func(*args, **kwargs)


class _Given(nn.Module):
    """A model that returns what it has: what needs a gradient as parameters, else as buffers."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.leaves = nn.ParameterList()
        self.output = map_tensors(self._given, output)

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor = nn.Parameter(tensor.detach())
            self.leaves.append(tensor)
        else:
            self.register_buffer(f"other_{len(self._buffers)}", tensor)
        return tensor

    def forward(self) -> Any:
        return map_tensors(lambda each: as_made(each) if each.requires_grad else each, self.output)
