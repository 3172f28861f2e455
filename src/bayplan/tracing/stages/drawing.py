"""Random numbers that do not depend on how a batch is split: a piece draws as plain training does.

Plain training draws one mask for the whole batch, operator by operator. So does every rank: it
takes the generator's state that each operator would find, draws the mask of the whole batch, and
uses the rows of its own samples. That costs a mask of the whole batch per piece, and buys that a
step on any number of ranks gives the numbers of one device. Afterwards the generator is where plain
training would have left it, on every rank.

An accelerator's kernel may give numbers to elements by the size of the whole launch, the dtype and
the layout (CUDA's does), and rounds in its own way. So there the device's own dropout runs on a
tensor like that of the whole batch, in which this rank's rows lie at their place. A piece needs
room for that tensor, its result and its mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bayplan.data.errors import CaptureError
from bayplan.devices.device import HOST, Device, device_of
from bayplan.rewriting.repeats import draw, draw_again, dropout_by, generator_state
from bayplan.tracing.joint import SWAPPER
from bayplan.tracing.stages.whole import Samples, WholeStep, layout_of

__all__ = [
    "Draw",
    "Streams",
    "draw_for_pieces",
    "drawing_bytes",
    "find_draws",
    "mark_draws",
    "whole_draw_bytes",
]

DRAW = "bayplan_draw"  # in a random node's meta: its name in the whole step

_DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(frozen=True)
class Draw:
    """One random operator of a step.

    Attributes:
        probability: of an element to be dropped.
        shape: of the mask for the whole batch.
        dimension: along which samples lie, None if the mask is the same for all.
        rows: how many in a row of that dimension belong to one sample.
        outer: how often all samples follow each other in it.
        layout: the dimensions from the outermost in memory to the innermost; numbers are drawn in
            that order.
        where: the device that draws it.
        dtype: of the values that are dropped.
    """

    probability: float
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    dimension: int | None
    rows: int = 1
    outer: int = 1
    where: torch.device = HOST.where
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> Device:
        return device_of(self.where)

    def whole_mask(self) -> torch.Tensor:
        if not self.device.runs_cpu_kernels:
            return _DROPOUT(self._whole(self.dtype), self.probability, True)[1]
        return self._whole(torch.bool).bernoulli_(1 - self.probability)

    def dropped(self, values: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dropout of the samples from `begin` on, and its mask."""
        if self.device.runs_cpu_kernels:
            mask = self._own(self.whole_mask(), begin, values)
            return dropout_by(mask, values, self.probability)
        if values.shape == self.shape:
            return _DROPOUT(values, self.probability, True)
        source = self._whole(self.dtype)
        self._rows(source, begin, values).copy_(self._apart(values))
        whole = _DROPOUT(source, self.probability, True)
        del source
        dropped, mask = (self._own(one, begin, values) for one in whole)
        return dropped, mask

    def _whole(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_permuted(self.shape, self.layout, dtype=dtype, device=self.where)

    def _apart(self, values: torch.Tensor) -> torch.Tensor:
        """A view in which the samples have a dimension that nothing else is in."""
        if self.dimension is None:
            return values
        return values.unflatten(self.dimension, (self.outer, -1))

    def _rows(self, whole: torch.Tensor, begin: int, values: torch.Tensor) -> torch.Tensor:
        """Of the whole batch, the rows of `values`, whose first sample is `begin`."""
        if self.dimension is None:
            return whole
        num_rows = values.shape[self.dimension] // self.outer
        return self._apart(whole).narrow(self.dimension + 1, begin * self.rows, num_rows)

    def _own(self, whole: torch.Tensor, begin: int, values: torch.Tensor) -> torch.Tensor:
        """The same as a tensor like `values`."""
        own = torch.empty_like(values, dtype=whole.dtype)
        self._apart(own).copy_(self._rows(whole, begin, values))
        return own


class Streams:
    """The random numbers of one rank's pieces.

    Attributes:
        draws: all random operators of the whole step, by name and in order.
        begin: the first sample of the piece that is computed now.
    """

    def __init__(self, draws: dict[str, Draw]) -> None:
        self.draws = draws
        self.begin = 0
        self._states: dict[str, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Note where each operator's numbers begin, and move on past all of them."""
        for name, drawn in self.draws.items():
            self._states[name] = drawn.device.generator_state()
            drawn.whole_mask()

    def ticket(self, name: str) -> torch.Tensor:
        """What an operator needs to draw the numbers of the present piece, now or again."""
        begin = torch.tensor([self.begin]).view(torch.uint8)
        return torch.cat([self._states[name], begin])


def find_draws(
    whole: WholeStep, dimensions: dict[str, Samples | None], *, num_samples: int
) -> dict[str, Draw]:
    """The random operators of a step, as they draw for a whole batch of so many samples.

    Raises:
        CaptureError: one that cannot be drawn for a piece alone.
    """
    draws: dict[str, Draw] = {}
    for node in _random_nodes(whole.joint.graph):
        if node.target is not _DROPOUT:
            raise CaptureError(
                f"{node.name} ({node.target}) draws random numbers in the forward; a split batch"
                " can do so only in dropout that is not in place and drops single elements. Use"
                " that (for attention, under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)), or"
                " draw the numbers in the data loader"
            )
        source, probability, *_ = node.args
        assert isinstance(source, fx.Node), "dropout is of a tensor"
        assert isinstance(probability, float), "and drops with a probability"
        draws[node.name] = _draw(probability, source, dimensions[source.name], num_samples)
    return draws


def _draw(probability: float, source: fx.Node, samples: Samples | None, num_samples: int) -> Draw:
    value = source.meta["val"]
    if not device_of(value.device).runs_cpu_kernels and not _is_like_new(value):
        raise CaptureError(
            f"{source.name} is a part of a larger tensor on {value.device}, where dropout of a part"
            " draws in an order of its own, so the batch cannot be split; call .contiguous() before"
            " dropout"
        )
    shape, where = list(value.shape), {"where": value.device, "dtype": value.dtype}
    if samples is None:
        return Draw(probability, tuple(shape), layout_of(value), None, **where)
    outer = samples.known_outer(source.name)
    shape[samples.dimension] = outer * num_samples * samples.rows
    rest = samples.dimension, samples.rows, outer
    return Draw(probability, tuple(shape), samples.layout, *rest, **where)


def _is_like_new(value: torch.Tensor) -> bool:
    """Whether it lies in memory as a tensor of its own would: at the begin, without gaps."""
    return value.storage_offset() == 0 and torch.empty_like(value).stride() == value.stride()


def mark_draws(graph: fx.Graph) -> None:
    """Let copies of random nodes, under whatever name, be known by the one they have now."""
    for node in _random_nodes(graph):
        node.meta[DRAW] = node.name


def drawing_bytes(whole: WholeStep) -> int:
    """The most that drawing all random numbers of a step takes; they are drawn one by one."""
    drawn = (node.meta["val"][0] for node in _random_nodes(whole.joint.graph) if _makes_mask(node))
    return max(map(_drawing_bytes, drawn), default=0)


def whole_draw_bytes(node: fx.Node, num_pieces: float) -> int:
    """What a node needs to draw for the whole batch, over its own results; 0 if it draws nothing.

    Args:
        node: of a stage's graph whose random nodes are marked.
        num_pieces: how many times its own samples the whole batch is.
    """
    if node.target is not draw or DRAW not in node.meta or not _makes_mask(node):
        return 0
    values, mask = node.meta["val"]
    whole_mask_bytes = int(mask.nbytes * num_pieces)
    if device_of(values.device).runs_cpu_kernels:
        # Values are made when the whole mask is gone again.
        return max(0, whole_mask_bytes - values.nbytes)
    if num_pieces == 1:
        return 0
    # Own results are made when the source is gone again.
    drawn_bytes = int(_drawing_bytes(values) * num_pieces)
    return max(
        drawn_bytes - values.nbytes - mask.nbytes,
        int(values.nbytes * num_pieces) + whole_mask_bytes,
    )


def _drawing_bytes(values: torch.Tensor) -> int:
    """What `Draw.whole_mask` takes for such values."""
    if device_of(values.device).runs_cpu_kernels:
        return values.numel()
    return values.numel() + 2 * values.nbytes  # a source and its result


def _makes_mask(node: fx.Node) -> bool:
    made = node.meta.get("val")  # attention makes no mask
    return isinstance(made, tuple | list) and len(made) == 2


def _random_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that draw numbers; fused attention could, but without dropout does not."""
    owner = graph.owning_module
    assert owner is not None, "a traced graph belongs to a module"
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            options = node.normalized_arguments(owner, normalize_to_only_use_kwargs=True)
            if options is None or options.kwargs.get("dropout_p") != 0.0:
                yield node


def draw_for_pieces(module: fx.GraphModule, streams: Streams) -> None:
    """Let the random nodes of a stage's forward or backward draw for the piece at hand."""
    for node in module.graph.nodes:
        if node.target not in (draw, draw_again) or DRAW not in node.meta:
            continue
        name = node.meta[DRAW]
        _, _, state, values, *_ = node.args
        if state.target is generator_state:
            state.target, state.args = Streams.ticket, (name,)
            state.meta[SWAPPER] = streams
        node.target, node.args = _dropout_of_piece, (streams.draws[name], state, values)


def _dropout_of_piece(drawn: Draw, ticket: torch.Tensor, values: Any) -> Any:
    """Dropout of some samples of a batch, and its mask."""
    begin = int(ticket[-8:].view(torch.int64).item())
    with drawn.device.forked_generators():
        drawn.device.set_generator_state(ticket[:-8])
        return drawn.dropped(values, begin)
