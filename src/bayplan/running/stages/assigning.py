"""Which stage each node of a whole step belongs to, from the cuts among its forward operators.

A cut is a place between two operators. What follows from it:

1. A node of forward belongs to the stage it lies in. One that is free, for it only looks at another
   value (a view) or depends on no sample (a transposed weight, a mask), goes to the first stage
   that reads it: nothing would be gained by sending it.
2. A node of backward belongs to the stage of the operator whose gradient it is part of; torch
   numbers both alike (`numbering.py`).
3. Sums of gradients carry the last number of all, whatever they add up. One over gradients of a
   single stage belongs there, and any other to the stage that reads it, which made the value whose
   gradient it is.
4. The gradient of a parameter that several stages read is a sum of which each stage has a part;
   that sum is never made by one of them.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from bayplan import torch_private
from bayplan.data.errors import CaptureError, UsageError
from bayplan.running.joint import JointStep
from bayplan.running.stages.numbering import Numbering
from bayplan.running.stages.whole import InputKind, WholeStep

__all__ = ["Assignment", "assign_stages"]

_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Assignment:
    """Where the nodes of a whole step belong.

    Attributes:
        stage_of: of each node that computes something.
        gradients: by stage, for each parameter it reads the nodes that its part is the sum of.
        free: the nodes that every stage may make for itself.
    """

    stage_of: dict[fx.Node, int]
    gradients: tuple[dict[str, tuple[fx.Node, ...]], ...]
    free: frozenset[fx.Node]


def assign_stages(whole: WholeStep, step: JointStep, firsts: Sequence[int]) -> Assignment:
    """Find the stage of every node.

    Args:
        whole: the step.
        step: the same, analysed.
        firsts: the first forward operator of each stage; 0, and then rising.
    """
    surroundings = _Surroundings(whole, step)
    stage_of = _forward_stages(surroundings, step, firsts)
    numbering = Numbering((node.meta["seq_nr"], stage_of[node]) for node in surroundings.forward)
    sums: list[fx.Node] = []
    for node in surroundings.backward:
        if surroundings.is_sum(node):
            sums.append(node)
        else:
            stage_of[node] = numbering.of_gradient(node.meta["seq_nr"])
    _place_sums(surroundings, sums, stage_of)
    gradients: list[dict[str, tuple[fx.Node, ...]]] = [{} for _ in firsts]
    for name, node in whole.gradients().items():
        for part in _parts(node, sums, stage_of):
            known = gradients[stage_of[part]]
            known[name] = (*known.get(name, ()), part)
    _check_filled(surroundings, stage_of, step, firsts)
    _check_direction(surroundings, stage_of)
    return Assignment(stage_of, tuple(gradients), surroundings.untrained)


class _Surroundings:
    """What is asked about nodes again and again.

    Attributes:
        forward, backward: the nodes that compute something, in order.
        sampleless: those of forward that depend on no sample.
        untrained: those of these that depend on no parameter to be trained, either.
    """

    def __init__(self, whole: WholeStep, step: JointStep) -> None:
        nodes = [node for node in whole.nodes if node.op == "call_function"]
        after: set[fx.Node] = {node for node in whole.nodes if torch_private.is_tangent(node)}
        for node in nodes:
            if not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        border = next((at for at, node in enumerate(nodes) if node in after), len(nodes))
        self.forward, self.backward = nodes[:border], nodes[border:]
        self._is_backward = frozenset(self.backward)
        self._last_number = max(node.meta["seq_nr"] for node in self.forward)
        self._ops = frozenset(node for node in step.op_nodes if node is not None)
        given = list(zip(whole.primals, whole.inputs, strict=True))
        batch = [node for node, one in given if one.kind is InputKind.BATCH]
        trained = [node for node, one in given if one.needs_gradient]
        changed = torch_private.changed_inputs(whole.joint.graph)
        self.sampleless = frozenset(self._independent_of(batch))
        self.untrained = frozenset(self._independent_of([*batch, *trained, *changed]))

    def is_view(self, node: fx.Node) -> bool:
        """Whether a node only looks at values that are there."""
        return node not in self._ops and node.target is not operator.getitem

    def is_sum(self, node: fx.Node) -> bool:
        """Whether a node of backward adds gradients of one value up."""
        return (
            node.target is _ADD
            and node.meta["seq_nr"] >= self._last_number
            and self._is_backward.issuperset(node.all_input_nodes)
        )

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Who reads a node's value; of one with several outputs, whoever reads any of them."""
        for reader in node.users:
            if reader.target is operator.getitem:
                yield from reader.users
            else:
                yield reader

    def _independent_of(self, sources: Iterable[fx.Node]) -> Iterator[fx.Node]:
        tainted = set(sources)
        for node in self.forward:
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if is_random or not tainted.isdisjoint(node.all_input_nodes):
                tainted.add(node)
            else:
                yield node


def _forward_stages(
    around: _Surroundings, step: JointStep, firsts: Sequence[int]
) -> dict[fx.Node, int]:
    """Rule 1."""
    begins = {step.op_nodes[first]: stage for stage, first in enumerate(firsts)}
    stage_of: dict[fx.Node, int] = {}
    first_of_number: dict[int, fx.Node] = {}
    stage = 0
    for node in around.forward:
        stage = begins.get(node, stage)
        # What shares a number is never cut apart, or its gradient would have no place.
        leader = first_of_number.setdefault(node.meta["seq_nr"], node)
        stage_of[node] = stage_of.get(leader, stage)
    is_forward = frozenset(around.forward)
    for node in reversed(around.forward):
        if node.target is operator.getitem:
            continue
        if node in around.sampleless or around.is_view(node):
            readers = [stage_of[one] for one in around.readers(node) if one in is_forward]
            stage_of[node] = min(readers, default=stage_of[node])
    for node in around.forward:
        if node.target is operator.getitem:
            stage_of[node] = stage_of[node.all_input_nodes[0]]
    return stage_of


def _parts(
    node: fx.Node, sums: Sequence[fx.Node], stage_of: dict[fx.Node, int]
) -> tuple[fx.Node, ...]:
    """Rule 4: what a parameter's gradient is the sum of; sums over several stages are no more."""
    sources = node.all_input_nodes
    if node not in sums or len(node.users) > 1 or len({stage_of[one] for one in sources}) < 2:
        return (node,)
    del stage_of[node]
    return tuple(part for source in sources for part in _parts(source, sums, stage_of))


def _place_sums(
    around: _Surroundings, sums: Sequence[fx.Node], stage_of: dict[fx.Node, int]
) -> None:
    """Rule 3: those of one stage first, in order; the others from their readers back."""
    mixed: list[fx.Node] = []
    for node in sums:
        stages = {stage_of.get(one) for one in node.all_input_nodes if one.op == "call_function"}
        stage = stages.pop() if len(stages) == 1 else None
        if stage is None:
            mixed.append(node)
        else:
            stage_of[node] = stage
    for node in reversed(mixed):
        stage_of[node] = max(
            (stage_of[one] for one in around.readers(node) if one in stage_of), default=0
        )


def _check_filled(
    around: _Surroundings, stage_of: dict[fx.Node, int], step: JointStep, firsts: Sequence[int]
) -> None:
    """Every stage has something to compute; what others make for themselves does not count."""
    filled = {stage for node, stage in stage_of.items() if node not in around.untrained}
    for stage, first in enumerate(firsts):
        if stage not in filled:
            name = step.program.ops[first].name
            raise UsageError(
                f"stage {stage} of {len(firsts)}, from {name} on, computes nothing: all of it"
                " depends on no sample, or belongs to an operator that is cut apart; cut later"
            )


def _check_direction(around: _Surroundings, stage_of: dict[fx.Node, int]) -> None:
    """Values of forward go to later stages only, and gradients to earlier ones."""
    is_forward = frozenset(around.forward)
    for node in (*around.forward, *around.backward):
        if node not in stage_of:
            continue
        for source in node.all_input_nodes:
            if source not in stage_of or source in around.untrained:
                continue
            rises = stage_of[source] > stage_of[node]
            falls = stage_of[source] < stage_of[node]
            if (rises and source in is_forward) or (falls and source not in is_forward):
                raise CaptureError(
                    f"{node.name} of stage {stage_of[node]} reads {source.name} of stage"
                    f" {stage_of[source]}, which is against the direction of the pipeline; cut the"
                    " model at another place"
                )
