"""One whole training step, loss included, as a joint graph at any batch size.

Stages are cut from this graph. It is traced once for each number of samples that a rank computes
at a time, always without memory. Graphs of different sizes must have the same nodes: only then does
a cut in one of them mean the same in all.

Two sizes tell which dimension grows with the batch, and how fast. Where several dimensions were
merged into that one, a sample may be one block of it or be spread over it:

    [samples * heads, ...]    the rows of a sample follow each other
    [length * samples, ...]   a sample has every n-th row

Shapes do not tell these apart; the views that merged the dimensions do.

torch traces one sample differently: a dimension of size 1 needs no copy before a view, so operators
are missing and cuts do not match. What two samples compute is right for one as well, with smaller
sizes. Sizes grow evenly with the batch, so those for one follow from those for two and three; every
shape is then checked on tensors without memory.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.data.errors import CaptureError
from bayplan.tracing.joint import Cost, JointStep, analyse_joint

__all__ = [
    "Input",
    "InputKind",
    "Samples",
    "WholeStep",
    "batch_dimensions",
    "layout_of",
    "shrink_to_one",
]

aten = torch.ops.aten

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


@dataclass(frozen=True)
class Samples:
    """How samples lie in a value.

    Attributes:
        dimension: the one that grows with the batch.
        outer: how often all samples follow each other in it; None if that is not known.
        rows: of each time, how many belong to one sample.
        layout: the dimensions from the outermost in memory to the innermost.
    """

    dimension: int
    outer: int | None
    rows: int
    layout: tuple[int, ...]

    def known_outer(self, name: str) -> int:
        """How often all samples follow each other, or an error for the value of that name."""
        if self.outer is None:
            raise CaptureError(
                f"in what order dimension {self.dimension} of {name} holds its samples, with"
                f" {self.rows} rows for each, cannot be told, so it cannot be split by samples;"
                " cut the model at another place"
            )
        return self.outer


Known = Mapping[str, Samples | None]


def layout_of(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost."""
    strides = value.stride()
    return tuple(sorted(range(value.dim()), key=lambda dimension: (-strides[dimension], dimension)))


def _samples_in(
    node: fx.Node, twin: torch.Tensor, num_samples: int, known: Known
) -> Samples | None:
    """How samples lie in a node's tensor; None if it is the same for every batch.

    Args:
        twin: the tensor of this node at another number of samples.
        known: the same of all nodes before, by name.

    Raises:
        CaptureError: the model relates samples of a batch to each other.
    """
    value: torch.Tensor = node.meta["val"]
    sizes = zip(value.shape, twin.shape, strict=True)
    growing = [index for index, (size, other) in enumerate(sizes) if size != other]
    if not growing:
        return None
    if len(growing) > 1:
        raise CaptureError(
            f"{node.name} relates samples to each other: its shape is {tuple(value.shape)} for"
            f" {num_samples} samples and {tuple(twin.shape)} for others, so dimensions"
            f" {growing[0]} and {growing[1]} both grow; such a batch cannot be split"
        )
    (dimension,) = growing
    num_rows = value.shape[dimension] // num_samples
    outer = 1 if num_rows == 1 else _outer(node, dimension, num_rows, known)
    # One sample does not tell where in memory its dimension is: the strides of both are the same.
    layout = layout_of(max(value, twin, key=torch.Tensor.numel))
    return Samples(dimension, outer, num_rows // (outer or 1), layout)


def _outer(node: fx.Node, dimension: int, num_rows: int, known: Known) -> int | None:
    """How often all samples follow each other in a dimension with several rows for each."""
    if node.target in _VIEWS:
        (source,) = node.all_input_nodes
        samples = known[source.name]
        if samples is None or samples.outer is None:
            return None
        # A view keeps how many elements follow between one sample and the next.
        distance = samples.rows * prod(source.meta["val"].shape[samples.dimension + 1 :])
        rows, rest = divmod(distance, prod(node.meta["val"].shape[dimension + 1 :]))
        return None if rest or not rows or num_rows % rows else num_rows // rows
    sources = (known.get(source.name) for source in _sources(node))
    counts = {
        samples.outer
        for samples in sources
        if samples is not None and samples.outer and samples.outer * samples.rows == num_rows
    }
    return counts.pop() if len(counts) == 1 else None


def _sources(node: fx.Node) -> Iterable[fx.Node]:
    """What a node computes from; for a part of several outputs, what these come from."""
    for source in node.all_input_nodes:
        if isinstance(source.meta.get("val"), torch.Tensor):
            yield source
        else:
            yield from _sources(source)


class InputKind(StrEnum):
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
        inputs: of the graph, without the gradient of the loss.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    inputs: tuple[Input, ...]
    num_samples: int

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.joint.graph.nodes)

    @property
    def outputs(self) -> Sequence[Any]:
        outputs = self.joint.graph.output_node().args[0]
        assert isinstance(outputs, tuple | list), "a joint graph returns a list"
        return outputs

    @property
    def primals(self) -> list[fx.Node]:
        placeholders = self.joint.graph.find_nodes(op="placeholder")
        return [node for node in placeholders if not torch_compat.is_tangent(node)]

    @property
    def loss(self) -> fx.Node:
        """The last output of forward; before it come the new values of buffers."""
        return self.outputs[self.num_forward_outputs - 1]

    def analysed(self, cost_of: Cost) -> JointStep:
        """The step as operators and buffers."""
        return analyse_joint(
            self.joint, num_forward_outputs=self.num_forward_outputs, cost_of=cost_of
        )

    @cached_property
    def fingerprint(self) -> str:
        """Tells steps apart by their operators; the same for every batch size."""
        nodes = [(node.op, str(node.target), node.name) for node in self.nodes]
        return hashlib.sha256(repr(nodes).encode()).hexdigest()[:24]

    @cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """What a value or gradient looks like, by the name of its node.

        Nodes that make several tensors are left out: their parts are nodes too.
        """
        return {
            node.name: node.meta["val"]
            for node in self.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
        }

    def new_buffers(self) -> dict[str, fx.Node]:
        """By name of the buffer, the node of its value after the step."""
        changed = torch_compat.changed_inputs(self.joint.graph)
        position_of = {node: position for position, node in enumerate(self.primals)}
        names = [self.inputs[position_of[node]].name for node in changed]
        return dict(zip(names, self.outputs[: self.num_forward_outputs - 1], strict=True))

    def gradients(self) -> dict[str, fx.Node]:
        """By name of the parameter, the node of its gradient."""
        pairs = zip(self.inputs, self.outputs[self.num_forward_outputs :], strict=True)
        return {given.name: node for given, node in pairs if given.needs_gradient and node}

    def check_same_nodes(self, other: "WholeStep") -> None:
        """Refuse another size of the step if the model computes something else then."""
        # Both end with their output, so a row that is shorter differs at its end.
        for mine, theirs in zip(self.nodes, other.nodes, strict=False):
            if (mine.op, mine.target, mine.name) != (theirs.op, theirs.target, theirs.name):
                raise CaptureError(
                    f"the model computes {mine.name} with {self.num_samples} samples where it"
                    f" computes {theirs.name} with {other.num_samples}; a model whose operators"
                    " depend on the batch size cannot be split by samples"
                )


def batch_dimensions(step: WholeStep, resized: WholeStep) -> dict[str, Samples | None]:
    """By name of a node, how samples lie in its tensor; None if it is the same for every batch."""
    step.check_same_nodes(resized)
    samples_of: dict[str, Samples | None] = {}
    for node in step.nodes:
        if node.name in step.values:
            twin = resized.values[node.name]
            samples_of[node.name] = _samples_in(node, twin, step.num_samples, samples_of)
    return samples_of


def shrink_to_one(two: WholeStep, three: WholeStep) -> WholeStep:
    """The step for one sample, with the nodes of `two`, whose graph it takes over.

    Raises:
        CaptureError: something does not grow evenly with the batch.
    """
    two.check_same_nodes(three)
    nodes = two.nodes
    values = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    with torch_compat.fake_mode_of(values):
        for node, later in zip(nodes, three.nodes, strict=True):
            _shrink(node, later)
    return replace(two, num_samples=1)


def _shrink(node: fx.Node, later: fx.Node) -> None:
    value, later_value = node.meta.get("val"), later.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.Tensor):
        assert later_value is not None, "both sizes have the same nodes"
        shape = _smaller(node, tuple(value.shape), tuple(later_value.shape))
        if value.shape != shape:
            node.meta["val"] = value.new_empty_strided(shape, value.stride())
    if node.op != "call_function":
        return
    node.args = _smaller(node, node.args, later.args)
    node.kwargs = _smaller(node, node.kwargs, later.kwargs)
    arguments = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    assert isinstance(arguments, tuple), "as it was given"
    assert callable(node.target), "it is called"
    args, options = arguments
    results = node.meta["val"] = node.target(*args, **options)
    pairs = zip(*map(torch_compat.tree_leaves, (value, later_value, results)), strict=True)
    for two, three, made in pairs:
        if isinstance(two, torch.Tensor):
            shapes = tuple(two.shape), tuple(three.shape)
            if made.shape != _smaller(node, *shapes):
                raise _uneven(node, *shapes)


def _smaller(node: fx.Node, two: Any, three: Any) -> Any:
    """What an argument is for one sample."""
    if isinstance(two, fx.Node) or two is three:
        return two
    if isinstance(two, tuple | list) and len(two) == len(three):
        return type(two)(_smaller(node, a, b) for a, b in zip(two, three, strict=True))
    if isinstance(two, dict):
        return {key: _smaller(node, two[key], three[key]) for key in two}
    if two == three:
        return two
    if isinstance(two, int) and isinstance(three, int):
        return two - (three - two)
    raise _uneven(node, two, three)


def _uneven(node: fx.Node, two: Any, three: Any) -> CaptureError:
    return CaptureError(
        f"{node.name} has {two} for 2 samples and {three} for 3, from which it cannot be told for"
        " 1; split the batch into pieces of 2 samples or more"
    )
