"""One whole training step, loss included, as one joint graph that knows where its inputs are from.

Stages are cut from this graph. It is traced once for each number of samples that a rank computes
at a time, always without memory, and the graphs of different sizes have the same nodes: only then
does a cut in one of them mean the same in all.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import fx

from bayplan import torch_private
from bayplan.data.errors import CaptureError
from bayplan.running.stages.sampling import Samples, samples_in

__all__ = ["Input", "InputKind", "WholeStep", "batch_dimensions"]


class InputKind(StrEnum):
    """Where an input of a step comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    CARRIED = "carried"  # from another stage


@dataclass(frozen=True)
class Input:
    """An input of a step, or of a stage of it.

    Attributes:
        name: of a parameter, buffer or carried value; for the batch, the number of its tensor.
        needs_gradient: whether it is a parameter to be trained.
    """

    kind: InputKind
    name: str
    needs_gradient: bool = False


@dataclass(frozen=True)
class WholeStep:
    """A joint graph of model and loss at one batch size.

    Attributes:
        joint: the graph; its outputs are new buffers, the loss, and the gradients of its inputs.
        num_forward_outputs: how many of these are the forward's.
        inputs: of the graph, without the gradient of the loss.
        num_samples: the batch size.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    inputs: tuple[Input, ...]
    num_samples: int

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in order."""
        return list(self.joint.graph.nodes)

    @property
    def outputs(self) -> Sequence[Any]:
        """What the joint graph returns."""
        outputs = self.joint.graph.output_node().args[0]
        assert isinstance(outputs, tuple | list), "a joint graph returns a list"
        return outputs

    @property
    def primals(self) -> list[fx.Node]:
        """The nodes of the inputs."""
        found = self.joint.graph.find_nodes(op="placeholder")
        return [node for node in found if not torch_private.is_tangent(node)]

    @property
    def loss(self) -> fx.Node:
        """The last output of forward; before it come the new values of buffers."""
        return self.outputs[self.num_forward_outputs - 1]

    @cached_property
    def fingerprint(self) -> str:
        """Tells steps apart by their operators; the same for every batch size."""
        nodes = [(node.op, str(node.target), node.name) for node in self.nodes]
        return hashlib.sha256(repr(nodes).encode()).hexdigest()[:24]

    def new_buffers(self) -> dict[str, fx.Node]:
        """By name of the buffer, the node of its value after the step."""
        changed = torch_private.changed_inputs(self.joint.graph)
        position_of = {node: position for position, node in enumerate(self.primals)}
        names = [self.inputs[position_of[node]].name for node in changed]
        return dict(zip(names, self.outputs[: self.num_forward_outputs - 1], strict=True))

    def gradients(self) -> dict[str, fx.Node]:
        """By name of the parameter, the node of its gradient."""
        found = zip(self.inputs, self.outputs[self.num_forward_outputs :], strict=True)
        return {given.name: node for given, node in found if given.needs_gradient and node}

    def check_same_nodes(self, other: "WholeStep") -> None:
        """Refuse another size of the step if the model computes something else then."""
        for mine, theirs in zip(self.nodes, other.nodes, strict=False):
            if (mine.op, mine.target, mine.name) != (theirs.op, theirs.target, theirs.name):
                raise CaptureError(
                    f"the model computes {mine.name} with {self.num_samples} samples where it"
                    f" computes {theirs.name} with {other.num_samples}; a model whose operators"
                    " depend on the batch size cannot be split by samples"
                )
        if len(self.nodes) != len(other.nodes):
            raise CaptureError(
                f"the model has {len(self.nodes)} operators with {self.num_samples} samples and"
                f" {len(other.nodes)} with {other.num_samples}; a model whose operators depend on"
                " the batch size cannot be split by samples"
            )


def batch_dimensions(one: WholeStep, other: WholeStep) -> dict[str, Samples | None]:
    """For each tensor by its node's name, how samples lie in it.

    None for what is the same for every batch. Nodes that make several tensors are left out: their
    parts are nodes too.

    Args:
        one: the step.
        other: the same at another batch size.
    """
    one.check_same_nodes(other)
    found: dict[str, Samples | None] = {}
    for mine, theirs in zip(one.nodes, other.nodes, strict=True):
        value, twin = mine.meta.get("val"), theirs.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(twin, torch.Tensor):
            found[mine.name] = samples_in(mine, twin, one.num_samples, found)
    return found
