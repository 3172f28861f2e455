"""What the simulation needs to know of a model, from our own capture of it.

Nothing is allocated and nothing is measured here. A model is traced with its loss at the samples of
a replica, cut where the run cuts it, and every operator priced as a roofline sees it: arithmetic
and traffic apart, because each has a factor of its own that is fitted.
"""

from collections.abc import Sequence
from functools import cache

import msgspec
import numpy
import torch
from reports_000_002.rows import Run

from bayplan.costing.catalogue import load_device
from bayplan.costing.operators import signature_of
from bayplan.costing.pricing import graph_of
from bayplan.costing.roofline import node_parts, op_class
from bayplan.data.device import DeviceKind, OpClass
from bayplan.data.graph import StepGraph
from bayplan.models import load
from bayplan.planning.pipelines.cuts import cuts_by_count
from bayplan.simulating.rank_memory import stage_memory
from bayplan.simulating.schedule import plain_schedule
from bayplan.step import TrainingStep
from bayplan.tracing.fake import build_without_memory
from bayplan.tracing.joint import analyse_joint
from bayplan.tracing.stages.assigning import operator_counts
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole import InputKind, WholeStep
from bayplan.tracing.stages.whole_trace import trace_whole

__all__ = [
    "CapturedStage",
    "Gradient",
    "Parts",
    "capture_stage",
    "firsts_of",
    "profiled_device",
    "seconds_of",
    "whole_step",
]

_MAX_POOL = torch.ops.aten.max_pool2d_with_indices.default
_CONVOLUTION = torch.ops.aten.convolution.default
Parts = tuple[float, float]
"""Seconds of arithmetic and seconds of traffic of one operator."""


class Gradient(msgspec.Struct, frozen=True, kw_only=True):
    """Of one parameter; `num_before` operators of backward must be done for it."""

    name: str
    size_bytes: int
    num_before: int


class CapturedStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a model at some number of samples.

    Attributes:
        forward, backward: of each operator, what its arithmetic and its traffic take.
        gradients: in the order that backward makes them.
        sent_bytes: to the next stage; returned_bytes: to the one before.
        input_bytes: of its samples, if they come from outside.
        held_bytes: what is kept from forward to backward.
        index_bytes: of these, the places of maxima, which torch keeps and OneFlow finds again.
        passing_bytes: beside that, at the highest moment of backward, without gradients of weights.
    """

    num_samples: int
    forward: tuple[Parts, ...]
    backward: tuple[Parts, ...]
    gradients: tuple[Gradient, ...]
    sent_bytes: int
    returned_bytes: int
    input_bytes: int
    held_bytes: int
    index_bytes: int
    passing_bytes: int
    has_convolutions: bool

    @property
    def parameter_bytes(self) -> int:
        """Of the weights that are trained."""
        return sum(one.size_bytes for one in self.gradients)


def seconds_of(parts: Sequence[Parts], compute_factor: float, memory_factor: float) -> float:
    """Operators one after the other, each as long as the slower of its parts.

    Example:
        >>> seconds_of([(1.0, 3.0), (2.0, 1.0)], 2.0, 1.0)
        7.0
    """
    if not parts:
        return 0.0
    return float((numpy.array(parts) * (compute_factor, memory_factor)).max(axis=1).sum())


def profiled_device() -> DeviceKind:
    """A TITAN V that reaches of its peaks what the V100 of PipeDream's published profiles did.

    Nothing in it was fitted to the reports: what our file of the device says beyond that was.
    """
    return msgspec.structs.replace(
        load_device("titan-v"),
        efficiency=load_device("v100").efficiency,
        convolution_scale=None,
    )


def firsts_of(run: Run) -> tuple[int, ...]:
    """The first operator of each stage of a run, where its system cut the model.

    OneFlow cut by counts of operators, PipeDream where its planner put the module named in the run.
    """
    if not run.is_pipeline:
        return (0,)
    whole = StagedStep(whole_step(run.model, 2), (0,))
    if run.shares:
        return cuts_by_count(operator_counts(whole.whole, whole.step), run.shares)
    places = [op.place.removeprefix("model.") for op in whole.step.program.ops]
    inside = (at for at, path in enumerate(places) if f"{path}.".startswith(f"{run.cut_at}."))
    return (0, next(inside))


def capture_stage(
    model: str, firsts: tuple[int, ...], stage: int, num_samples: int, device: DeviceKind
) -> CapturedStage:
    """One stage at the samples of a replica."""
    staged = _staged(model, num_samples, firsts)
    graph = staged.graph(stage)
    step = analyse_joint(
        graph.joint, num_forward_outputs=graph.num_forward_outputs, cost_of=lambda node: (0.0, 0)
    )
    memory = stage_memory(
        step.program,
        plain_schedule(step.program),
        gradients=frozenset(
            buffer
            for node in step.backward_outputs
            if node is not None
            for buffer in step.buffers_of[node]
        ),
    )
    nodes = [node for node in staged.whole.nodes if staged.assignment.stage_of.get(node) == stage]
    forward = set(staged.step.op_nodes[: staged.step.op_nodes.index(None)])
    halves: tuple[list[Parts], list[Parts]] = ([], [])
    made: dict[object, int] = {}
    for node in nodes:
        own = halves[0] if node in forward else halves[1]
        own += _parts(node, device)
        made[node] = len(halves[1])
    values = staged.whole.values
    gradients = sorted(
        (
            Gradient(
                name=name,
                size_bytes=sum(one.meta["val"].nbytes for one in parts),
                num_before=max(made[one] for one in parts),
            )
            for name, parts in staged.assignment.gradients[stage].items()
        ),
        key=lambda one: one.num_before,
    )
    carried = staged.carried
    return CapturedStage(
        num_samples=num_samples,
        forward=tuple(halves[0]),
        backward=tuple(halves[1]),
        gradients=tuple(gradients),
        sent_bytes=_bytes_from(carried.forward, stage, values),
        returned_bytes=_bytes_from(carried.backward, stage, values),
        input_bytes=sum(
            node.meta["val"].nbytes
            for node, given in zip(staged.whole.primals, staged.whole.inputs, strict=True)
            if given.kind is InputKind.BATCH and stage == 0
        ),
        held_bytes=memory.held_bytes,
        index_bytes=sum(node.meta["val"][1].nbytes for node in nodes if node.target is _MAX_POOL),
        passing_bytes=memory.adding_bytes - memory.held_bytes,
        has_convolutions=any(node.target is _CONVOLUTION for node in nodes),
    )


def _bytes_from(carried, stage: int, values) -> int:
    """What a stage sends on one of its ways, to all others."""
    return sum(
        values[name].nbytes
        for (source, _), names in carried.items()
        if source == stage
        for name in names
    )


@cache
def _staged(model: str, num_samples: int, firsts: tuple[int, ...]) -> StagedStep:
    return StagedStep(whole_step(model, num_samples), firsts)


@cache
def whole_step(model: str, num_samples: int) -> WholeStep:
    """A model and its loss, traced without memory."""
    name = model.replace("_", "-")
    built, batch, loss_fn = build_without_memory(lambda: load(name)(2))
    step = TrainingStep(model=built, batch=batch, loss_fn=loss_fn)
    return trace_whole(step, num_samples=num_samples)


_known: dict[tuple[str, str], list[Parts]] = {}


def _parts(node, device: DeviceKind) -> list[Parts]:
    """Of the operators behind a node; the same call is looked at once."""
    key = (device.name, signature_of(node))
    if key not in _known:
        graph = graph_of(node)
        _known[key] = [] if graph is None else _parts_of(graph, device)
    return _known[key]


def _parts_of(graph: StepGraph, device: DeviceKind) -> list[Parts]:
    return [
        node_parts(graph, one, device)
        for one in graph.nodes
        if op_class(one.op) is not OpClass.VIEW
    ]
