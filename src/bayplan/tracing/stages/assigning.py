"""Assigns each node of a whole step to a stage, and weighs operators for cuts.

torch numbers an operator when it is called, and its gradient when that is recorded. Both numbers
are the same, except for operators that write in place: these are recorded first, then copy and
compute under a higher number. So a gradient belongs to the first operator of its own number or a
higher one (`by_gradient`).

A cut is a place between two operators. What follows from it:

1. A forward node belongs to the stage it lies in. A free node, which only views another value or
   depends on no sample (a transposed weight, a mask), goes to the first stage that reads it:
   sending it would gain nothing.
2. A backward node belongs to the stage of the operator whose gradient it is part of.
3. Sums of gradients carry the last number of all, whatever they add up. A sum over gradients of a
   single stage belongs there. Any other belongs to the stage that reads it, which made the value
   whose gradient it is.
4. If several stages read a parameter, each has a part of its gradient, and no stage makes the sum.

`operator_counts` repeats published runs of OneFlow's staged pipeline, which cuts by share of
operators. A cut is the same only if everything counts as it does in OneFlow's graph, which has
operators that torch has inside others, or not at all:

1. A parameter, a buffer and a tensor of the batch are each an operator. It goes with the first
   operator that reads it.
2. A bias is added by an operator of its own, a dropout mask is drawn by one, and a mean is a sum
   and a product.
3. A reshape of activations is an operator. The transpose of a weight is an option of the product.
4. OneFlow's training functions return the loss, the labels and the predictions, which take a
   softmax: four operators after the loss.

Values that are only kept for the next step, like BatchNorm's count of batches, do not exist there.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.data.errors import CaptureError, UsageError
from bayplan.data.program import Program
from bayplan.rewriting.free import nodes_after_tangents
from bayplan.tracing.joint import JointStep
from bayplan.tracing.stages.whole import InputKind, WholeStep

__all__ = [
    "Assignment",
    "StageAssigner",
    "by_gradient",
    "operator_counts",
    "parameter_bytes",
    "seconds_with_backward",
    "sent_bytes",
]

T = TypeVar("T")


def by_gradient(numbered: Iterable[tuple[int, T]]) -> Callable[[int], T]:
    """Finds what is known about the operator that the gradient with a number belongs to.

    Args:
        numbered: pairs of a number and what is known about its operator, in order of execution.
    """
    first: dict[int, T] = {}
    for number, known in numbered:
        first.setdefault(number, known)
    numbers = sorted(first)
    return lambda number: first[numbers[min(bisect_left(numbers, number), len(numbers) - 1)]]


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


class StageAssigner:
    """Finds the stage of every node.

    Attributes:
        firsts: the first forward operator of each stage; 0, and then rising.
        stage_of: what was found so far.
        forward, backward: the nodes that compute something, in order.
        sums: those of backward that add up gradients of one value.
        sampleless: those of forward that depend on no sample.
        untrained: those of these that depend on no parameter to be trained, either.
    """

    def __init__(self, whole: WholeStep, step: JointStep, firsts: Sequence[int]) -> None:
        self.whole, self.step, self.firsts = whole, step, firsts
        self.stage_of: dict[fx.Node, int] = {}
        nodes = [node for node in whole.nodes if node.op == "call_function"]
        after = set(nodes_after_tangents(whole.nodes))
        self.forward = list(takewhile(lambda node: node not in after, nodes))
        self.backward = nodes[len(self.forward) :]
        self._is_forward = frozenset(self.forward)
        is_backward = frozenset(self.backward)
        last_number = max(node.meta["seq_nr"] for node in self.forward)
        self.sums = {
            node: None
            for node in self.backward
            if node.target is _ADD
            and node.meta["seq_nr"] >= last_number
            and is_backward.issuperset(node.all_input_nodes)
        }
        given = list(zip(whole.primals, whole.inputs, strict=True))
        batch = [node for node, source in given if source.kind is InputKind.BATCH]
        trained = [node for node, source in given if source.needs_gradient]
        changed = torch_compat.changed_inputs(whole.joint.graph)
        self.sampleless = frozenset(self._independent_of(batch))
        self.untrained = frozenset(self._independent_of([*batch, *trained, *changed]))

    def _independent_of(self, sources: Iterable[fx.Node]) -> Iterator[fx.Node]:
        tainted = set(sources)
        for node in self.forward:
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if is_random or not tainted.isdisjoint(node.all_input_nodes):
                tainted.add(node)
            else:
                yield node

    def assignment(self) -> Assignment:
        stage_of = self.stage_of
        self._place_forward()
        stage_of_gradient = by_gradient(
            (node.meta["seq_nr"], stage_of[node]) for node in self.forward
        )
        for node in self.backward:
            if node not in self.sums:
                stage_of[node] = stage_of_gradient(node.meta["seq_nr"])
        self._place_sums()
        gradients: list[dict[str, tuple[fx.Node, ...]]] = [{} for _ in self.firsts]
        for name, node in self.whole.gradients().items():
            for part in self._parts(node):
                known = gradients[stage_of[part]]
                known[name] = (*known.get(name, ()), part)
        self._check_filled()
        self._check_direction()
        return Assignment(stage_of, tuple(gradients), self.untrained)

    def _place_forward(self) -> None:
        """Rule 1."""
        stage_of, op_nodes = self.stage_of, self.step.op_nodes
        begins = {op_nodes[first]: stage for stage, first in enumerate(self.firsts)}
        first_of_number: dict[int, fx.Node] = {}
        stage = 0
        for node in self.forward:
            stage = begins.get(node, stage)
            # What shares a number is never cut apart, or its gradient would have no place.
            leader = first_of_number.setdefault(node.meta["seq_nr"], node)
            stage_of[node] = stage_of.get(leader, stage)
        is_op = frozenset(op_nodes)
        for node in reversed(self.forward):
            is_view = node not in is_op
            if node.target is not operator.getitem and (is_view or node in self.sampleless):
                readers = (r for r in _readers(node) if r in self._is_forward)
                stage_of[node] = min(map(stage_of.__getitem__, readers), default=stage_of[node])
        for node in self.forward:
            if node.target is operator.getitem:
                stage_of[node] = stage_of[node.all_input_nodes[0]]

    def _place_sums(self) -> None:
        """Rule 3: those of one stage first, in order; the others from their readers back."""
        mixed: list[fx.Node] = []
        for node in self.sums:
            sources = [part for part in node.all_input_nodes if part.op == "call_function"]
            stages = {self.stage_of.get(part) for part in sources}
            stage = stages.pop() if len(stages) == 1 else None
            if stage is None:
                mixed.append(node)
            else:
                self.stage_of[node] = stage
        for node in reversed(mixed):
            readers = (reader for reader in _readers(node) if reader in self.stage_of)
            self.stage_of[node] = max(map(self.stage_of.__getitem__, readers), default=0)

    def _parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Rule 4: what a parameter's gradient is the sum of; sums over stages are no more."""
        sources = node.all_input_nodes
        is_of_one_stage = len({self.stage_of.get(part) for part in sources}) < 2
        if node not in self.sums or len(node.users) > 1 or is_of_one_stage:
            return (node,)
        del self.stage_of[node]
        return tuple(part for source in sources for part in self._parts(source))

    def _check_filled(self) -> None:
        """Every stage has something to compute; what others make for themselves does not count."""
        filled = {stage for node, stage in self.stage_of.items() if node not in self.untrained}
        for stage, first in enumerate(self.firsts):
            if stage not in filled:
                name = self.step.program.ops[first].name
                raise UsageError(
                    f"stage {stage} of {len(self.firsts)}, from {name} on, computes nothing: all of"
                    " it depends on no sample, or belongs to an operator that is cut apart; cut"
                    " later"
                )

    def _check_direction(self) -> None:
        """Values of forward go to later stages only, and gradients to earlier ones."""
        for node, stage in self.stage_of.items():
            for source in node.all_input_nodes:
                made = self.stage_of.get(source, stage)
                is_wrong = made > stage if source in self._is_forward else made < stage
                if is_wrong and source not in self.untrained:
                    raise CaptureError(
                        f"{node.name} of stage {stage} reads {source.name} of stage {made}, which"
                        " is against the direction of the pipeline; cut the model at another place"
                    )


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node's value; of one with several outputs, whoever reads any of them."""
    for reader in node.users:
        if reader.target is operator.getitem:
            yield from reader.users
        else:
            yield reader


def seconds_with_backward(step: JointStep) -> list[float]:
    """For each forward operator its seconds and those of its gradient (`by_gradient`).

    Sums of gradients count as the last operator's: they carry its number.
    """
    program = step.program
    num_forward = program.first_backward - 1  # the loss is the caller's
    seconds = [op.seconds for op in program.ops[:num_forward]]
    numbers = [None if node is None else node.meta["seq_nr"] for node in step.op_nodes]
    index_of_gradient = by_gradient(
        (number, index) for index, number in enumerate(numbers[:num_forward]) if number is not None
    )
    for number, op in zip(numbers[num_forward:], program.ops[num_forward:], strict=True):
        if number is not None:
            seconds[index_of_gradient(number)] += op.seconds
    return seconds


def parameter_bytes(whole: WholeStep, step: JointStep) -> list[float]:
    """For each forward operator the bytes of the parameters that it is the first to read."""
    num_forward = step.program.first_backward - 1
    weights = [0.0] * num_forward
    index_of = {node: index for index, node in enumerate(step.op_nodes)}
    for node, given in zip(whole.primals, whole.inputs, strict=True):
        if given.needs_gradient:
            reader = _first_reader(node, index_of)
            if reader is not None and reader < num_forward:
                weights[reader] += node.meta["val"].nbytes
    return weights


def _first_reader(node: fx.Node, index_of: dict[fx.Node | None, int]) -> int | None:
    """The first operator that reads a node, itself or through views.

    Args:
        index_of: all operators; those of backward too, or this would follow all ways there.
    """
    readers = [
        index_of[user] if user in index_of else _first_reader(user, index_of) for user in node.users
    ]
    return min((index for index in readers if index is not None), default=None)


def sent_bytes(program: Program) -> list[int]:
    """For each forward operator, what a cut before it would send: made before, read after."""
    num_forward = program.first_backward - 1
    sent = [0] * num_forward
    for buffer, producer in enumerate(program.producers):
        readers = [reader for reader in program.readers[buffer] if reader < num_forward]
        if 0 <= producer < num_forward and readers:
            for cut in range(producer + 1, readers[-1] + 1):
                sent[cut] += program.buffers[buffer]
    return sent


_aten = torch.ops.aten
_NUM_RETURNED = 4  # rule 4 of OneFlow's
_MEAN = 1  # torch's number for the reduction of a loss
_NOT_THERE = (operator.getitem, _aten.detach.default, _aten.alias.default)


def operator_counts(whole: WholeStep, step: JointStep) -> list[int]:
    """For each forward operator of a step, how many operators of OneFlow it counts as."""
    nodes = step.op_nodes[: step.program.first_backward - 1]
    needed = {whole.loss}
    for node in reversed(whole.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    index_of = {node: index for index, node in enumerate(step.op_nodes)}
    counts = [1 + _inside(node) if node in needed else 0 for node in nodes]
    for node in (*whole.primals, *_reshapes(whole, index_of)):
        reader = _first_reader(node, index_of) if node in needed else None
        if reader is not None and reader < len(nodes):
            counts[reader] += 1
    counts[-1] += _NUM_RETURNED
    return counts


def _inside(node: fx.Node | None) -> int:
    """How many of OneFlow's operators one of torch's holds beside the one it is named after."""
    if node is None:
        return 0
    if node.target is _aten.convolution.default:
        return int(node.args[2] is not None)
    if node.target is _aten.nll_loss_forward.default:
        return int(node.args[3] == _MEAN)
    return int(
        node.target in (_aten.addmm.default, _aten.native_dropout.default, _aten.mean.default)
    )


def _reshapes(whole: WholeStep, index_of: dict[fx.Node | None, int]) -> Iterator[fx.Node]:
    """Other views of what operators made."""
    made: set[fx.Node] = set()
    for node in whole.nodes:
        if node in index_of:
            made.add(node)
        elif any(source in made for source in node.all_input_nodes):
            made.add(node)
            if node.op == "call_function" and node.target not in _NOT_THERE:
                yield node
