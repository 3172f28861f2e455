"""Assigns each node of a whole step to a stage, and weighs operators for cuts.

torch numbers an operator when it is called, and its gradient when that is recorded. Both numbers
are the same, except for operators that write in place: these are recorded first, then copy and
compute under a higher number. So a gradient belongs to the first operator of its own number or a
higher one (`Numbering`).

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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
    "Numbering",
    "assign_stages",
    "operator_counts",
    "parameter_bytes",
    "seconds_with_backward",
    "sent_bytes",
]

T = TypeVar("T")


class Numbering(Generic[T]):
    """Something about the first operator of each number.

    Args:
        numbered: pairs of a number and what is known about its operator, in order of execution.

    Example:
        >>> numbering = Numbering([(3, "add"), (5, "mul"), (5, "view")])
        >>> numbering.of_gradient(4), numbering.of_gradient(9)
        ('mul', 'mul')
    """

    def __init__(self, numbered: Iterable[tuple[int, T]]) -> None:
        first: dict[int, T] = {}
        for number, known in numbered:
            first.setdefault(number, known)
        self._numbers = sorted(first)
        self._first = first

    def of_gradient(self, number: int) -> T:
        index = min(bisect_left(self._numbers, number), len(self._numbers) - 1)
        return self._first[self._numbers[index]]


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
        after = set(nodes_after_tangents(whole.nodes))
        border = next((index for index, node in enumerate(nodes) if node in after), len(nodes))
        self.forward, self.backward = nodes[:border], nodes[border:]
        self._is_backward = frozenset(self.backward)
        self._last_number = max(node.meta["seq_nr"] for node in self.forward)
        self._ops = frozenset(node for node in step.op_nodes if node is not None)
        given = list(zip(whole.primals, whole.inputs, strict=True))
        batch = [node for node, source in given if source.kind is InputKind.BATCH]
        trained = [node for node, source in given if source.needs_gradient]
        changed = torch_compat.changed_inputs(whole.joint.graph)
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
    context: _Surroundings, step: JointStep, firsts: Sequence[int]
) -> dict[fx.Node, int]:
    """Rule 1."""
    begins = {step.op_nodes[first]: stage for stage, first in enumerate(firsts)}
    stage_of: dict[fx.Node, int] = {}
    first_of_number: dict[int, fx.Node] = {}
    stage = 0
    for node in context.forward:
        stage = begins.get(node, stage)
        # What shares a number is never cut apart, or its gradient would have no place.
        leader = first_of_number.setdefault(node.meta["seq_nr"], node)
        stage_of[node] = stage_of.get(leader, stage)
    is_forward = frozenset(context.forward)
    for node in reversed(context.forward):
        if node.target is operator.getitem:
            continue
        if node in context.sampleless or context.is_view(node):
            readers = [stage_of[reader] for reader in context.readers(node) if reader in is_forward]
            stage_of[node] = min(readers, default=stage_of[node])
    for node in context.forward:
        if node.target is operator.getitem:
            stage_of[node] = stage_of[node.all_input_nodes[0]]
    return stage_of


def _parts(
    node: fx.Node, sums: Sequence[fx.Node], stage_of: dict[fx.Node, int]
) -> tuple[fx.Node, ...]:
    """Rule 4: what a parameter's gradient is the sum of; sums over several stages are no more."""
    sources = node.all_input_nodes
    if node not in sums or len(node.users) > 1 or len({stage_of[part] for part in sources}) < 2:
        return (node,)
    del stage_of[node]
    return tuple(part for source in sources for part in _parts(source, sums, stage_of))


def _place_sums(
    context: _Surroundings, sums: Sequence[fx.Node], stage_of: dict[fx.Node, int]
) -> None:
    """Rule 3: those of one stage first, in order; the others from their readers back."""
    mixed: list[fx.Node] = []
    for node in sums:
        sources = [part for part in node.all_input_nodes if part.op == "call_function"]
        stages = {stage_of.get(part) for part in sources}
        stage = stages.pop() if len(stages) == 1 else None
        if stage is None:
            mixed.append(node)
        else:
            stage_of[node] = stage
    for node in reversed(mixed):
        readers = (reader for reader in context.readers(node) if reader in stage_of)
        stage_of[node] = max(map(stage_of.__getitem__, readers), default=0)


def _check_filled(
    context: _Surroundings, stage_of: dict[fx.Node, int], step: JointStep, firsts: Sequence[int]
) -> None:
    """Every stage has something to compute; what others make for themselves does not count."""
    filled = {stage for node, stage in stage_of.items() if node not in context.untrained}
    for stage, first in enumerate(firsts):
        if stage not in filled:
            name = step.program.ops[first].name
            raise UsageError(
                f"stage {stage} of {len(firsts)}, from {name} on, computes nothing: all of it"
                " depends on no sample, or belongs to an operator that is cut apart; cut later"
            )


def _check_direction(context: _Surroundings, stage_of: dict[fx.Node, int]) -> None:
    """Values of forward go to later stages only, and gradients to earlier ones."""
    is_forward = frozenset(context.forward)
    for node in (*context.forward, *context.backward):
        if node not in stage_of:
            continue
        for source in node.all_input_nodes:
            if source not in stage_of or source in context.untrained:
                continue
            rises = stage_of[source] > stage_of[node]
            falls = stage_of[source] < stage_of[node]
            if (rises and source in is_forward) or (falls and source not in is_forward):
                raise CaptureError(
                    f"{node.name} of stage {stage_of[node]} reads {source.name} of stage"
                    f" {stage_of[source]}, which is against the direction of the pipeline; cut the"
                    " model at another place"
                )


def seconds_with_backward(step: JointStep) -> list[float]:
    """For each forward operator its seconds and those of its gradient.

    See `Numbering`. Sums of gradients count as the last operator's: they carry its number.
    """
    program = step.program
    num_forward = program.first_backward - 1  # the loss is the caller's
    seconds = [op.seconds for op in program.ops[:num_forward]]
    numbering = Numbering(
        (node.meta["seq_nr"], index)
        for index, node in enumerate(step.op_nodes[:num_forward])
        if node is not None
    )
    later = zip(step.op_nodes[num_forward:], program.ops[num_forward:], strict=True)
    for node, op in later:
        if node is not None:
            seconds[numbering.of_gradient(node.meta["seq_nr"])] += op.seconds
    return seconds


def parameter_bytes(whole: WholeStep, step: JointStep) -> list[float]:
    """For each forward operator the bytes of the parameters that it is the first to read."""
    num_forward = step.program.first_backward - 1
    weights = [0.0] * num_forward
    index_of = {node: index for index, node in enumerate(step.op_nodes)}
    for node, given in zip(whole.primals, whole.inputs, strict=True):
        if given.needs_gradient:
            value: torch.Tensor = node.meta["val"]
            reader = _first_reader(node, index_of)
            if reader is not None and reader < num_forward:
                weights[reader] += value.numel() * value.element_size()
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
