"""Where the samples of a batch lie in every value of a step.

Two sizes of a step tell which dimension grows with the batch, and how fast. Where that dimension is
made of several, a sample may be one block of it or be spread over it:

    [samples * heads, ...]    the rows of a sample follow each other
    [length * samples, ...]   a sample has every n-th row

Shapes do not tell these apart; the views that merged the dimensions do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from bayplan.data.errors import CaptureError

__all__ = ["Samples", "layout_of", "samples_in"]

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
    return tuple(sorted(range(value.dim()), key=lambda at: (-strides[at], at)))


def samples_in(node: fx.Node, twin: torch.Tensor, num_samples: int, known: Known) -> Samples | None:
    """How samples lie in a node's tensor; None if it is the same for every batch.

    Args:
        node: of the step at one batch size.
        twin: the tensor of this node at another one.
        num_samples: the batch size.
        known: the same of all nodes before, by name.

    Raises:
        CaptureError: the model relates samples of a batch to each other.
    """
    value: torch.Tensor = node.meta["val"]
    sizes = zip(value.shape, twin.shape, strict=True)
    growing = [at for at, (size, other) in enumerate(sizes) if size != other]
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
    found = {
        samples.outer
        for samples in (known.get(source.name) for source in _sources(node))
        if samples is not None and samples.outer and samples.outer * samples.rows == num_rows
    }
    return found.pop() if len(found) == 1 else None


def _sources(node: fx.Node) -> Iterable[fx.Node]:
    """What a node computes from; for a part of several outputs, what these come from."""
    for source in node.all_input_nodes:
        if isinstance(source.meta.get("val"), torch.Tensor):
            yield source
        else:
            yield from _sources(source)
