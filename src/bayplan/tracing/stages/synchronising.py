"""Which BatchNorms of a step are synchronised over replicas, and the graphs in which they are.

A BatchNorm in training relates the samples of its batch to each other. Where these are spread over
replicas, its operators are replaced by those of `synchronised_norm.py`: in every graph of a stage
alike, so that plans and runs see the same operators. Who the replicas are is said to the graphs
that are run.

Left alone are BatchNorms with frozen statistics, which relate nothing, those of which each sample
has channels of its own (so torch computes InstanceNorm), and those that read no sample at all.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from bayplan.data.errors import CaptureError
from bayplan.rewriting.repeats import gradient_readers
from bayplan.rewriting.synchronised_norm import (
    Replicas,
    norm_of_replicas,
    norm_of_replicas_backward,
    synchronised_norm,
    synchronised_norm_backward,
)
from bayplan.tracing.stages.assigning import Assignment
from bayplan.tracing.stages.cutting import StageGraph
from bayplan.tracing.stages.whole import Samples, WholeStep

__all__ = ["bind_replicas", "norms_to_synchronise", "synchronise", "synchronised_buffers"]

aten = torch.ops.aten

_WITH_RUNNING = aten._native_batch_norm_legit_functional.default
_WITHOUT = aten._native_batch_norm_legit.no_stats
_BACKWARD = aten.native_batch_norm_backward.default
_FROZEN = aten._native_batch_norm_legit_no_training.default
# By operator, the position of the argument that says whether it normalises by the batch.
_TRAINING: dict[Any, int] = {_WITH_RUNNING: 5, _WITHOUT: 3}
_BOUND: dict[Any, Any] = {
    synchronised_norm: norm_of_replicas,
    synchronised_norm_backward: norm_of_replicas_backward,
}
_CHANNELS = 1  # the dimension of an image


def norms_to_synchronise(
    whole: WholeStep,
    where: Assignment,
    stages: Collection[int],
    dimensions: Mapping[str, Samples | None],
) -> frozenset[str]:
    """The names of the BatchNorms whose stages have several replicas, so that samples are apart.

    Raises:
        CaptureError: one of another kind than is known here.
    """
    names = set()
    for node in whole.nodes:
        if where.stage_of.get(node) not in stages or "batch_norm" not in str(node.target):
            continue
        if node.target in (_BACKWARD, _FROZEN):
            continue
        if node.target not in _TRAINING:
            raise CaptureError(
                f"{node.name} ({node.target}) is a BatchNorm that cannot be synchronised over"
                " replicas here; leave out --sync-batch-norm, or freeze its statistics"
            )
        source = node.args[0]
        assert isinstance(source, fx.Node), "BatchNorm is of a tensor"
        samples = dimensions[source.name]
        if node.args[_TRAINING[node.target]] and samples and samples.dimension != _CHANNELS:
            names.add(node.name)
    return frozenset(names)


def synchronise(graph: fx.Graph, names: Collection[str]) -> None:
    """Replace some BatchNorms of a stage's joint graph, and their gradients."""
    for node in list(graph.nodes):
        if node.name in names and node.target in _TRAINING:
            for gradient in _gradients_of(node):
                _replace_gradient(gradient)
            _replace(node)


def _replace(node: fx.Node) -> None:
    image, weight, bias, *running, _, momentum, epsilon = node.args
    statistics = running or (None, None)
    stride = tuple(node.meta["val"][0].stride())
    node.target = synchronised_norm
    node.args = (image, weight, bias, *statistics, momentum, epsilon, stride)


def _gradients_of(node: fx.Node) -> list[fx.Node]:
    """The operators that compute a BatchNorm's gradients: they read its mean."""
    parts = [part for part in node.users if part.target is operator.getitem]
    return [reader for reader in gradient_readers(parts, _BACKWARD) if _norm_of(reader) is node]


def _norm_of(gradient: fx.Node) -> fx.Node:
    source: Any = gradient.args[5]
    while source.target in (aten.detach.default, operator.getitem):
        source = source.all_input_nodes[0]
    return source


def _replace_gradient(node: fx.Node) -> None:
    gradient, image, weight, _, _, mean, inverse_deviation, _, _, wanted = node.args
    assert isinstance(wanted, list | tuple), "three answers"
    made = node.meta["val"][0]
    stride = tuple(made.stride()) if made is not None else ()
    node.target = synchronised_norm_backward
    node.args = (gradient, image, weight, mean, inverse_deviation, tuple(wanted), stride)


def synchronised_buffers(stage: StageGraph) -> frozenset[str]:
    """The buffers of a stage that all replicas compute alike, so that none has to be averaged."""
    outputs: Any = stage.joint.graph.output_node().args[0]
    return frozenset(
        name
        for name, node in zip(stage.new_buffers, outputs, strict=False)
        if node.target is operator.getitem and node.args[0].target is synchronised_norm
    )


def bind_replicas(module: fx.GraphModule, replicas: Replicas | None) -> None:
    """Let the synchronised BatchNorms of a stage's forward or backward know who takes part."""
    for node in module.graph.nodes:
        if node.target in _BOUND:
            assert replicas is not None, "a stage that is synchronised has replicas"
            node.target, node.args = _BOUND[node.target], (replicas, *node.args)
