"""One training step traced for planning, without memory: its program and what surrounds it.

The model is copied onto fake tensors and compiled with a backend that only looks: it takes the
joint graph of forward and backward and stops there. What happens outside the graph is captured as
well, for it counts: the optimizer's state, and the loss between forward and backward.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from bayplan import torch_private
from bayplan.capturing.explain import explained
from bayplan.capturing.fake import OptimizerSource, fake_step, without_memory
from bayplan.capturing.step import capture_step, follow_step
from bayplan.data.errors import BayplanError, CaptureError
from bayplan.data.graph import Phase, StepGraph, StorageKind
from bayplan.data.units import round_up
from bayplan.devices.meters import open_meter
from bayplan.planned import Circumstances, TracedStep
from bayplan.pricing import Price
from bayplan.profiling.workspaces import WorkspaceWatch
from bayplan.running.optimizers import ParameterUpdates
from bayplan.simulating.memory import replay_memory
from bayplan.training import TrainingStep, call_model, split_batch

__all__ = [
    "Joint",
    "circumstances_of",
    "compile_whole",
    "joint_of",
    "loss_bytes",
    "outside_nodes",
    "plain_peak_bytes",
    "resident_bytes",
    "trace_step",
    "untraceable",
    "update_bytes",
]

# No kernel is taken to need more scratch memory than this share of the peak.
_WORKSPACE_SHARE = 0.15

_MOST_GRAPHS = 256  # of one model; torch allows no more over all copies of a function


@dataclass(frozen=True)
class Joint:
    """A joint graph as torch hands it over.

    Attributes:
        num_forward_outputs: how many of its outputs are the forward's.
        inputs: the tensors it was traced with.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    inputs: Sequence[Any]


def trace_step(step: TrainingStep, around: Circumstances) -> TracedStep:
    """Return the joint graph of a step's model as the backend will see it when it runs.

    Args:
        step: the model, batch and precision; nothing of it is run or changed.
        around: what counts beside the graph.
    """
    with without_memory() as mode:
        fake = fake_step(step, None)
    if around.updates is not None:
        around = replace(around, updates=around.updates.of_copy(fake.model))
    with mode, fake.precision():
        joint = joint_of(fake.model, split_batch(fake.batch, fake.loss_fn)[0])
    # Outside: torch has traced it on fake tensors of its own.
    return TracedStep.of(joint.module, joint.num_forward_outputs, around, joint.inputs)


def joint_of(model: nn.Module, inputs: Any) -> Joint:
    """Have torch trace a call of a model with its backward, and stop it there.

    To be called where tensors take no memory; the model must be a copy made there.
    """
    stop = _Stop()

    def backend(module: Any, examples: Any) -> Callable[..., Any]:
        def take(joint: Any, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
            stop.joint = Joint(joint, num_fwd_outputs, examples)
            raise stop

        return torch_private.compile_joint(module, examples, partition=take, compile_graph=None)

    compile_whole(model, backend)
    try:
        call_model(model, inputs)
    except Exception as fault:
        if torch_private.compile_fault(fault) is not stop:
            raise untraceable(fault) from fault
    assert stop.joint is not None, "a model with parameters to train is traced with its backward"
    stop.__traceback__ = None  # its frames hold the model and all that torch made of it
    return stop.joint


def compile_whole(model: nn.Module, backend: Callable[..., Any]) -> None:
    """Let a module's calls be compiled as one graph each, anew for every batch size and mode.

    Memory is exact or nothing, so neither a break in the graph nor an unknown size is allowed.
    """
    options: dict[str, Any] = {
        "backend": backend,
        "fullgraph": True,
        "dynamic": False,
        # Else the ninth batch size of a class of models, over all its instances, is refused.
        "recompile_limit": _MOST_GRAPHS,
        "isolate_recompiles": True,
    }
    torch_private.ignore_logging()
    if type(model).forward.__module__.startswith("torch."):
        # torch passes over frames of its own, `nn.Sequential`'s, and compiles child by child.
        model._compiled_call_impl = torch.compile(MethodType(_call, model), **options)
    else:
        model.compile(**options)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The frame of ours that torch begins with; `self` as in a forward, for the modules' paths."""
    return self._call_impl(*args, **kwargs)


class _Stop(Exception):
    """Raised inside the compiler once the graph is there."""

    joint: Joint | None = None


def untraceable(fault: Exception) -> BayplanError:
    """What to tell a user whose forward torch could not trace as one graph."""
    inner = torch_private.compile_fault(fault)
    if isinstance(inner, BayplanError):
        return inner
    return CaptureError(
        f"torch cannot trace the model's forward as one graph, which planning needs: {fault}"
    )


def circumstances_of(
    step: TrainingStep,
    graph: StepGraph,
    *,
    prices: Callable[[torch.device], AbstractContextManager[Price]],
    granularity_bytes: int,
    updates: ParameterUpdates | None = None,
) -> Circumstances:
    """What counts beside the traced graph of a captured step.

    Args:
        step: the model and its loss; the optimizer is in the graph.
        graph: the whole step.
        prices: makes the function that prices operators, for a device.
        granularity_bytes: the allocator's rounding.
        updates: of the parameters to update in backward.
    """
    return Circumstances(
        prices=prices,
        resident_bytes=resident_bytes(graph),
        loss_bytes=loss_bytes(step),
        update_bytes=update_bytes(graph, granularity_bytes=granularity_bytes),
        granularity_bytes=granularity_bytes,
        updates=updates,
    )


def resident_bytes(graph: StepGraph) -> int:
    """What a captured step keeps beside the traced graph: the optimizer's state."""
    kinds = (StorageKind.OPTIMIZER_STATE,)
    return sum(storage.size_bytes for storage in graph.storages if storage.kind in kinds)


def update_bytes(graph: StepGraph, *, granularity_bytes: int = 1) -> int | None:
    """The most memory that a captured step's update takes over what is there before it.

    None where the step has no update.
    """
    update = [index for index, node in enumerate(graph.nodes) if node.phase is Phase.UPDATE]
    if not update:
        return None
    live = replay_memory(graph, [0] * len(graph.nodes), granularity_bytes=granularity_bytes)
    before = sum(
        round_up(storage.size_bytes, granularity_bytes)
        for storage in graph.storages
        if (storage.born is None or storage.born < update[0])
        and (storage.released is None or storage.released >= update[0])
    )
    return max(live.total_bytes[index] for index in update) - before


def plain_peak_bytes(
    step: TrainingStep,
    graph: StepGraph,
    *,
    optimizer: OptimizerSource,
    granularity_bytes: int,
    cache: Path | None,
) -> int:
    """The peak of a step as it would run without a plan.

    Args:
        step: what the graph was captured from.
        graph: the step.
        optimizer: as for `capture`.
        granularity_bytes: the allocator's rounding.
        cache: keeps the compiled counter. With it, kernels that run near the peak are run once,
            each alone, for their scratch memory; None leaves scratch memory out.
    """
    no_workspace = [0] * len(graph.nodes)
    without = replay_memory(graph, no_workspace, granularity_bytes=granularity_bytes)
    if cache is None:
        return without.peak_bytes
    least_bytes = (1 - _WORKSPACE_SHARE) * without.peak_bytes
    high = [index for index, total in enumerate(without.total_bytes) if total >= least_bytes]
    device = next(step.model.parameters()).device
    with open_meter(device, cache) as meter:
        watch = WorkspaceWatch(graph, high, meter=meter, granularity_bytes=granularity_bytes)
        follow_step(step, optimizer=optimizer, watcher=watch)
    return max(without.total_bytes[index] + size for index, size in watch.found.items())


def outside_nodes(graph: StepGraph) -> frozenset[int]:
    """The nodes of a step that no planned graph runs: its loss, and the update."""
    update = {index for index, node in enumerate(graph.nodes) if node.phase is Phase.UPDATE}
    inside = [
        index
        for index, node in enumerate(graph.nodes)
        if node.module and node.phase is not Phase.UPDATE
    ]
    last_forward = max(
        (index for index in inside if graph.nodes[index].phase is Phase.FORWARD), default=-1
    )
    first_backward = min((index for index in inside if index > last_forward), default=0)
    return frozenset(update | set(range(last_forward + 1, first_backward)))


def loss_bytes(step: TrainingStep) -> int:
    """The most memory a loss takes over its inputs: its temporaries and the gradient it returns.

    Zero where the model computes its own loss, which is then part of its graph.
    """
    if step.loss_fn is None:
        return 0
    with explained(), without_memory():
        fake = fake_step(step, None)
        inputs, targets = split_batch(fake.batch, fake.loss_fn)
        with fake.precision():
            output = call_model(fake.model, inputs)
        leaves: list[torch.Tensor] = []

        def detached(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            leaves.append(nn.Parameter(tensor.detach()))
            return leaves[-1]

        output = torch_private.tree_map_only(torch.Tensor, detached, output)
        alone = TrainingStep(
            model=_Given(leaves, output),
            batch=((), *targets) if targets else (),
            loss_fn=fake.loss_fn,
            autocast=fake.autocast,
        )
    graph = capture_step(alone)
    given = sum(storage.size_bytes for storage in graph.storages if storage.born is None)
    return replay_memory(graph, [0] * len(graph.nodes)).peak_bytes - given


class _Given(nn.Module):
    """A model whose outputs are its parameters."""

    def __init__(self, leaves: list[torch.Tensor], output: Any) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(leaves)
        self.output = output

    def forward(self) -> Any:
        return self.output
