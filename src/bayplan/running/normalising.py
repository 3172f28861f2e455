"""BatchNorm repeated from the statistics it has saved, so that its input is read only once.

In training, BatchNorm reads its input once for the mean, once for the deviation and once to
normalise. Mean and inverse deviation are saved for backward and are tiny, so a repeat that only
wants the normalised values computes just those. The arithmetic is that of torch's CPU kernel:

    scale = inverse_deviation * weight
    shift = bias - mean * scale              one rounding
    y     = x * scale + shift                one rounding

Whether a processor and a build of torch round like that is not promised anywhere. So it is tried
on small tensors, once for every kind of input, and where a bit differs the whole operator is
repeated.
"""

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from bayplan import torch_private
from bayplan.running.synchronised_norm import normalise_laid_out, synchronised_norm

__all__ = ["PartialRepeat", "normalise", "partial_repeat"]

aten = torch.ops.aten

# Channels or lengths, whatever is innermost, fill vector registers and leave a rest.
_TRIED_CHANNELS, _TRIED_LENGTH = (1, 5, 37), 21
_EPSILON = 1e-5
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions
_OUTPUT, _MEAN, _INVERSE_DEVIATION = range(3)  # among BatchNorm's outputs
# By operator, the position of the argument that says whether it normalises by the batch.
_TRAINING: dict[Any, int] = {
    aten._native_batch_norm_legit_functional.default: 5,
    aten._native_batch_norm_legit.no_stats: 3,
}


@dataclass(frozen=True)
class PartialRepeat:
    """A repeat that makes one output of an operator again, with the help of its others.

    Attributes:
        function: what to call.
        arguments: with which nodes and values.
        output: the node of the output that it makes.
    """

    function: Any
    arguments: tuple[Any, ...]
    output: fx.Node

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """The nodes it reads."""
        return tuple(part for part in self.arguments if isinstance(part, fx.Node))

    def alone(self, name: str) -> fx.Node:
        """The call as a node of a graph of its own, to be priced."""
        graph = fx.Graph()

        def stand_in(source: fx.Node) -> fx.Node:
            node = graph.placeholder(source.name)
            node.meta = {"val": source.meta["val"]}
            return node

        arguments = fx.node.map_arg(self.arguments, stand_in)
        node = graph.create_node("call_function", self.function, arguments, {}, name)
        node.meta = {"val": self.output.meta["val"]}
        return node


def partial_repeat(node: fx.Node) -> PartialRepeat | None:
    """How a node could be repeated for one of its outputs alone, if that gives the same bits."""
    is_synchronised = node.target is synchronised_norm
    position = _TRAINING.get(node.target)
    if not is_synchronised and (position is None or not node.args[position]):
        return None
    parts = [_parts(node, index) for index in (_OUTPUT, _MEAN, _INVERSE_DEVIATION)]
    # A second node of the same output would still show its older copy.
    if len(parts[_OUTPUT]) != 1 or not all(parts):
        return None
    image, weight, bias = node.args[:3]
    arguments = (image, weight, bias, parts[_MEAN][0], parts[_INVERSE_DEVIATION][0])
    if is_synchronised:  # so it was made in the first place
        arguments = (*arguments, node.args[-1])
        return PartialRepeat(normalise_laid_out, arguments, parts[_OUTPUT][0])
    kind = _kind_of(image, weight, bias)
    if kind is None or not _gives_same_bits(kind):
        return None
    return PartialRepeat(normalise, arguments, parts[_OUTPUT][0])


def normalise(
    image: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> torch.Tensor:
    """The normalised values of a BatchNorm whose statistics are known."""
    shape = (1, -1, *[1] * (image.dim() - 2))
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
    return torch.addcmul(shift.view(shape), image, scale.view(shape))


class _Kind(NamedTuple):
    """What decides which kernel runs; a dtype of None is an argument that is not given."""

    num_dimensions: int
    memory_format: torch.memory_format
    image_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None


def _parts(node: fx.Node, index: int) -> list[fx.Node]:
    return [
        user for user in node.users if user.target is operator.getitem and user.args[1] == index
    ]


def _kind_of(image: Any, weight: Any, bias: Any) -> _Kind | None:
    """None for what torch computes in another way: elsewhere, or with gaps between elements."""
    value: torch.Tensor = image.meta["val"]
    formats = (torch.contiguous_format, _CHANNELS_LAST.get(value.dim(), torch.contiguous_format))
    memory_format = next((f for f in formats if value.is_contiguous(memory_format=f)), None)
    if value.device.type != "cpu" or memory_format is None:
        return None
    dtypes = (None if source is None else source.meta["val"].dtype for source in (weight, bias))
    return _Kind(value.dim(), memory_format, value.dtype, *dtypes)


@cache
def _gives_same_bits(kind: _Kind) -> bool:
    with torch_private.outside_tracing(), torch.no_grad():
        return all(_is_same(kind, num_channels) for num_channels in _TRIED_CHANNELS)


def _is_same(kind: _Kind, num_channels: int) -> bool:
    # A generator of its own: the user's must not notice.
    generator = torch.Generator().manual_seed(num_channels)
    lengths = [3] * (kind.num_dimensions - 3) + [_TRIED_LENGTH] * (kind.num_dimensions > 2)

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).add_(0.5)

    image = draw((4, num_channels, *lengths), kind.image_dtype)
    image = image.contiguous(memory_format=kind.memory_format)
    weight, bias = (
        None if dtype is None else draw((num_channels,), dtype)
        for dtype in (kind.weight_dtype, kind.bias_dtype)
    )
    whole, mean, inverse_deviation = aten._native_batch_norm_legit.no_stats(
        image, weight, bias, True, 0.1, _EPSILON
    )
    again = normalise(image, weight, bias, mean, inverse_deviation)
    return again.dtype == whole.dtype and again.stride() == whole.stride() and again.equal(whole)
