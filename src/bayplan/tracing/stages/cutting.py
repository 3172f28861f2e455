"""Each stage of a whole step as a step of its own, with what it takes from and gives to others.

A stage's joint graph has the form of any other: inputs, forward, gradients that come in, backward.
So all that is known about one device's step, from repeats to swaps, holds for a stage as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.rewriting.repeats import CHANGED
from bayplan.tracing.joint import CARRIED
from bayplan.tracing.stages.assigning import Assignment
from bayplan.tracing.stages.whole import Input, InputKind, WholeStep

__all__ = ["Carried", "StageCutter", "StageGraph", "carried_values"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Carried:
    """The values that go from one stage to another, by the names of their nodes.

    Attributes:
        forward: by (making stage, reading stage).
        backward: gradients, by (making stage, reading stage); the making one is the later.
    """

    forward: dict[tuple[int, int], tuple[str, ...]]
    backward: dict[tuple[int, int], tuple[str, ...]]


@dataclass(frozen=True)
class StageGraph:
    """One stage.

    Attributes:
        new_buffers: the first outputs of forward: new values of these buffers.
        sent: the next: values for other stages.
        has_loss: whether the last one is the loss.
        gradients_in: gradients that come from other stages, and last, if it has the loss, the
            gradient of that.
        parameters: the first outputs of backward: its part of their gradients.
        gradients_out: the next: gradients for other stages.
    """

    joint: fx.GraphModule
    inputs: tuple[Input, ...]
    new_buffers: tuple[str, ...]
    sent: tuple[str, ...]
    has_loss: bool
    gradients_in: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients_out: tuple[str, ...]

    @property
    def num_forward_outputs(self) -> int:
        return len(self.new_buffers) + len(self.sent) + self.has_loss

    def loss_gradient(self, weight: float) -> torch.Tensor:
        """What backward begins with, where the loss is weighted."""
        value = self._tangent_of_loss
        return torch.full(value.shape, weight, dtype=value.dtype, device=value.device)

    @cached_property
    def _tangent_of_loss(self) -> torch.Tensor:
        *_, last = (node for node in self.joint.graph.nodes if torch_compat.is_tangent(node))
        return last.meta["val"]


def carried_values(whole: WholeStep, where: Assignment) -> Carried:
    """What goes from stage to stage, in the order of the graph."""
    names_of: dict[tuple[int, int], set[str]] = {}
    for node in whole.nodes:
        for source in node.all_input_nodes if node in where.stage_of else ():
            stage = where.stage_of[node]
            made = where.stage_of.get(source, stage)
            if made != stage and source not in where.free:
                names_of.setdefault((made, stage), set()).add(source.name)
    order = {node.name: position for position, node in enumerate(whole.nodes)}
    in_order = {
        pair: tuple(sorted(names, key=order.__getitem__)) for pair, names in names_of.items()
    }
    return Carried(
        forward={pair: names for pair, names in in_order.items() if pair[0] < pair[1]},
        backward={pair: names for pair, names in in_order.items() if pair[0] > pair[1]},
    )


class StageCutter:
    """Copies the nodes of one stage into a graph."""

    def __init__(self, whole: WholeStep, where: Assignment, stage: int) -> None:
        self.whole, self.where, self.stage = whole, where, stage
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.node_of = {node.name: node for node in whole.nodes}

    def cut(self, carried: Carried) -> StageGraph:
        gradients = self.where.gradients[self.stage]
        sent, taken = (self._names(carried.forward, end) for end in (0, 1))
        sent_back, taken_back = (self._names(carried.backward, end) for end in (0, 1))
        has_loss = self.where.stage_of[self.whole.loss] == self.stage
        inputs = self._take_inputs(taken)
        tangents = [self.node_of[name] for name in taken_back]
        if has_loss:
            tangents += filter(torch_compat.is_tangent, self.whole.nodes)
        for number, node in enumerate(tangents, start=1):
            self._placeholder(node, f"tangents_{number}")
        for node in self.whole.nodes:
            if self.where.stage_of.get(node) == self.stage:
                self._copy(node)
        new_buffers = {
            name: node
            for name, node in self.whole.new_buffers().items()
            if self.where.stage_of.get(node) == self.stage
        }
        outputs: list[Any] = [*new_buffers.values(), *map(self.node_of.__getitem__, sent)]
        outputs += [self.whole.loss] if has_loss else []
        results = [self.copies[node] for node in outputs]
        results += [self._sum(parts) for parts in gradients.values()]
        results += [self.copies[self.node_of[name]] for name in sent_back]
        self.graph.output(tuple(results))
        return StageGraph(
            joint=fx.GraphModule(self.whole.joint, self.graph),
            inputs=inputs,
            new_buffers=tuple(new_buffers),
            sent=sent,
            has_loss=has_loss,
            gradients_in=taken_back,
            parameters=tuple(gradients),
            gradients_out=sent_back,
        )

    def _names(self, table: Mapping[tuple[int, int], tuple[str, ...]], end: int) -> tuple[str, ...]:
        """What goes from this stage, if `end` is 0, or to it, if 1; each name once."""
        sent = (names for pair, names in table.items() if pair[end] == self.stage)
        return tuple(dict.fromkeys(chain.from_iterable(sent)))

    def _take_inputs(self, taken: Sequence[str]) -> tuple[Input, ...]:
        """Parameters, buffers and parts of the batch that the stage reads; then what is carried."""
        read = self._read_by_stage()
        inputs: list[Input] = []
        changed = torch_compat.changed_inputs(self.whole.joint.graph)
        for node, given in zip(self.whole.primals, self.whole.inputs, strict=True):
            if node in read:
                self._placeholder(node, f"primals_{len(inputs) + 1}")
                self.copies[node].meta[CHANGED] = node in changed
                inputs.append(given)
        for name in taken:
            self._placeholder(self.node_of[name], f"primals_{len(inputs) + 1}")
            self.copies[self.node_of[name]].meta[CARRIED] = True
            inputs.append(Input(InputKind.CARRIED, name))
        return tuple(inputs)

    def _read_by_stage(self) -> set[fx.Node]:
        """The inputs of the whole step that nodes of this stage read, or free ones they need."""
        waiting = [node for node, stage in self.where.stage_of.items() if stage == self.stage]
        seen: set[fx.Node] = set()
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    if source in self.where.free:
                        waiting.append(source)
        return seen

    def _placeholder(self, node: fx.Node, name: str) -> None:
        copy = self.copies[node] = self.graph.placeholder(name)
        copy.meta = {"val": node.meta["val"]}

    def _copy(self, node: fx.Node) -> fx.Node:
        if node in self.copies:
            return self.copies[node]
        for source in node.all_input_nodes:
            if source in self.where.free or source.op == "get_attr":
                self._copy(source)
        self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        return self.copies[node]

    def _sum(self, parts: Sequence[fx.Node]) -> fx.Node:
        """A stage's part of a gradient, added up in the order of backward, as torch does."""
        total = self.copies[parts[0]]
        for part in parts[1:]:
            value = total.meta["val"]
            total = self.graph.call_function(aten.add.Tensor, (total, self.copies[part]))
            with torch_compat.fake_mode_of([value]):
                total.meta = {"val": torch.empty_like(value)}
        return total
