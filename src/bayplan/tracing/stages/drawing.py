"""Random numbers that do not depend on how a batch is split: a piece draws as plain training does.

Plain training draws one mask for the whole batch, operator by operator. So does every rank: it
takes the generator's state that each operator would find, draws the mask of the whole batch, and
uses the rows of its own samples. That costs a mask of the whole batch per piece, and buys that a
step on any number of ranks gives the numbers of one device. Afterwards the generator is where plain
training would have left it, on every rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bayplan.data.errors import CaptureError
from bayplan.devices.device import device_of
from bayplan.rewriting.repeats import draw, draw_again, dropout_by, generator_state
from bayplan.tracing.joint import SWAPPER
from bayplan.tracing.stages.whole import Samples, WholeStep, layout_of

__all__ = ["Draw", "Streams", "draw_for_pieces", "find_draws", "mark_draws", "whole_mask_bytes"]

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
    """

    probability: float
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    dimension: int | None
    rows: int = 1
    outer: int = 1

    def whole_mask(self) -> torch.Tensor:
        mask = torch.empty_permuted(self.shape, self.layout, dtype=torch.bool)
        return mask.bernoulli_(1 - self.probability)

    def mask(self, begin: int, shape: Sequence[int]) -> torch.Tensor:
        """The mask of the samples from `begin` on that values of a shape have."""
        whole = self.whole_mask()
        if self.dimension is None:
            return whole
        apart = whole.unflatten(self.dimension, (self.outer, -1))
        num_rows = shape[self.dimension] // self.outer
        part = apart.narrow(self.dimension + 1, begin * self.rows, num_rows)
        return part.clone().flatten(self.dimension, self.dimension + 1)


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
            self._states[name] = torch.get_rng_state()
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
                " that, or draw the numbers in the data loader"
            )
        source, probability, *_ = node.args
        assert isinstance(source, fx.Node), "dropout is of a tensor"
        assert isinstance(probability, float), "and drops with a probability"
        draws[node.name] = _draw(probability, source, dimensions[source.name], num_samples)
    return draws


def _draw(probability: float, source: fx.Node, samples: Samples | None, num_samples: int) -> Draw:
    value = source.meta["val"]
    if not device_of(value.device).runs_cpu_kernels:
        raise CaptureError(
            f"{source.name} is on {value.device}; dropout of a split batch is known on a CPU only."
            " Set its probability to 0"
        )
    shape = list(value.shape)
    if samples is None:
        return Draw(probability, tuple(shape), layout_of(value), None)
    outer = samples.known_outer(source.name)
    shape[samples.dimension] = outer * num_samples * samples.rows
    return Draw(probability, tuple(shape), samples.layout, samples.dimension, samples.rows, outer)


def mark_draws(graph: fx.Graph) -> None:
    """Let copies of random nodes, under whatever name, be known by the one they have now."""
    for node in _random_nodes(graph):
        node.meta[DRAW] = node.name


def whole_mask_bytes(node: fx.Node, num_pieces: float) -> int:
    """What a node needs for the mask of the whole batch, over its own results; 0 if it draws none.

    Args:
        node: of a stage's graph whose random nodes are marked.
        num_pieces: how many times its own samples the whole batch is.
    """
    made = node.meta.get("val")
    is_dropout = isinstance(made, tuple | list) and len(made) == 2  # attention makes no mask
    if node.target is not draw or DRAW not in node.meta or not is_dropout:
        return 0
    values, mask = made
    # Values are made when the whole mask is gone again.
    return max(0, int(mask.nbytes * num_pieces) - values.nbytes)


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
        _, _, state, values, _ = node.args
        if state.target is generator_state:
            state.target, state.args = Streams.ticket, (name,)
            state.meta[SWAPPER] = streams
        node.target, node.args = _dropout_of_piece, (streams.draws[name], state, values)


def _dropout_of_piece(drawn: Draw, ticket: torch.Tensor, values: Any) -> Any:
    """Dropout of some samples of a batch, and its mask."""
    begin = int(ticket[-8:].view(torch.int64).item())
    with torch.random.fork_rng([]):
        torch.set_rng_state(ticket[:-8])
        mask = drawn.mask(begin, values.shape)
    return dropout_by(mask, values, drawn.probability)
