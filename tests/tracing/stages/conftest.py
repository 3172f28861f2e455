"""A step cut into stages and carried out by hand in one process, next to plain training."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx

from bayplan.costing.pricing import free_prices
from bayplan.running.compiled_stage import KEEP_ALL, CompiledStage, compile_stage
from bayplan.step import TrainingStep
from bayplan.tracing.stages.drawing import Streams, find_draws
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole import InputKind, batch_dimensions
from bayplan.tracing.stages.whole_trace import (
    batch_tensors,
    named_tensors,
    num_samples_of,
    trace_whole,
)
from bayplan.tracing.traced_step import Decide, MemoryContext

SEED = 5


@dataclass
class Outcome:
    """What one step leaves behind."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor


def train_plainly(step: TrainingStep) -> Outcome:
    """One step without stages; the model's buffers are put back."""
    before = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
    torch.manual_seed(SEED)
    loss = step()
    gradients: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named_tensors(step).items():
        if id(tensor) not in seen and tensor.grad is not None:  # a tied one by its first name
            gradients[name] = tensor.grad.clone()
        seen.add(id(tensor))
    outcome = Outcome(loss, gradients, copied_buffers(step), torch.get_rng_state())
    with torch.no_grad():
        for name, buffer in step.model.named_buffers():
            buffer.copy_(before[name])
    return outcome


def copied_buffers(step: TrainingStep) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in step.model.named_buffers()}


@dataclass
class Stages:
    """A step with its cuts, carried out piece by piece and stage by stage."""

    step: TrainingStep
    cuts: Sequence[float]  # a part of all operators, or a whole number of them
    bounds: tuple[int, ...]  # of the pieces
    decide: Decide = KEEP_ALL

    def __post_init__(self) -> None:
        self.tensors, self.batch = named_tensors(self.step), batch_tensors(self.step.batch)
        self.num_samples = self.bounds[-1]
        sizes = sorted({end - begin for begin, end in pairwise(self.bounds)})
        wholes = {size: trace_whole(self.step, num_samples=size) for size in sizes}
        one = wholes[sizes[0]]
        other = wholes[sizes[-1]]
        if other is one:
            other = trace_whole(self.step, num_samples=sizes[0] + 1)
        dimensions = batch_dimensions(one, other)
        self.streams = Streams(find_draws(one, dimensions, num_samples=self.num_samples))
        self.num_ops = StagedStep(one, (0,)).step.program.first_backward - 1
        self._wholes = wholes
        self.cut_at(*self.cuts)

    def cut_at(self, *cuts: float) -> "Stages":
        """Cut the same graphs at other places."""
        self.firsts = (0, *map(self._place, cuts))
        self.staged = {size: StagedStep(one, self.firsts) for size, one in self._wholes.items()}
        context = MemoryContext(prices=free_prices)
        self.compiled = {
            size: [
                compile_stage(staged, stage, context, streams=self.streams, decide=self.decide)
                for stage in range(len(self.firsts))
            ]
            for size, staged in self.staged.items()
        }
        return self

    def _place(self, cut: float) -> int:
        return cut if isinstance(cut, int) else max(1, int(cut * self.num_ops))

    def run(self, *, seed: int | None = SEED) -> Outcome:
        if seed is not None:
            torch.manual_seed(seed)
        self.streams.begin_step()
        gradients: dict[str, torch.Tensor] = {}
        losses = [self._run_piece(*bounds, gradients) for bounds in pairwise(self.bounds)]
        loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        return Outcome(loss, gradients, copied_buffers(self.step), torch.get_rng_state())

    def _run_piece(self, begin: int, end: int, total: dict[str, torch.Tensor]) -> torch.Tensor:
        self.streams.begin, weight = begin, (end - begin) / self.num_samples
        stages, values, saved = self.compiled[end - begin], {}, []
        loss = torch.zeros(())
        for stage in stages:
            graph = stage.graph
            outputs = stage.forward(list(self._arguments(stage, values, begin, end)))
            for name, value in zip(graph.new_buffers, outputs, strict=False):
                self.tensors[name].copy_(value)
            values |= zip(graph.sent, outputs[len(graph.new_buffers) :], strict=False)
            if graph.has_loss:
                loss = outputs[graph.num_forward_outputs - 1] * weight
            saved.append(outputs[graph.num_forward_outputs :])
        back: dict[str, torch.Tensor] = {}
        for stage, kept in zip(reversed(stages), reversed(saved), strict=True):
            graph = stage.graph
            # A gradient may be overwritten by whoever gets it.
            given = [*kept, *(back[name].clone() for name in graph.gradients_in)]
            given += [graph.loss_gradient(weight)] if graph.has_loss else []
            gradients: dict[int, torch.Tensor] = {}
            outputs = stage.backward([*given, gradients.__setitem__])
            assert gradients.keys() == set(range(len(graph.parameters)))
            add_up(total, ((graph.parameters[at], one) for at, one in gradients.items()))
            back |= zip(graph.gradients_out, outputs, strict=True)
        return loss

    def _arguments(
        self, stage: CompiledStage, values: dict[str, torch.Tensor], begin: int, end: int
    ) -> Iterator[Any]:
        for given in stage.graph.inputs:
            if given.kind is InputKind.CARRIED:
                yield values[given.name]
            elif given.kind is InputKind.BATCH:
                whole = self.batch[int(given.name)]
                yield whole[begin:end] if whole.dim() else whole
            else:
                yield self.tensors[given.name].detach()


def add_up(total: dict[str, torch.Tensor], parts: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, part in parts:
        total[name] = total[name] + part if name in total else part


@pytest.fixture(scope="session")
def train_plain() -> Callable[[TrainingStep], Outcome]:
    return train_plainly


@pytest.fixture(scope="session")
def cut_into() -> Callable[..., Stages]:
    """Cut a step at parts or numbers of its operators: `cut_into(step, 0.5, sizes=(3, 2))`."""

    def cut(step: TrainingStep, *cuts: float, sizes: Sequence[int] = (), **more: Any) -> Stages:
        found = list(sizes) or [num_samples_of(step.batch)]
        bounds = tuple(sum(found[:at]) for at in range(len(found) + 1))
        return Stages(step, cuts, bounds, **more)

    return cut


@pytest.fixture(scope="session")
def compare() -> Callable[..., None]:
    """Compare two outcomes: `compare(plain, staged, tolerance=0.0)`, relative to the largest."""

    def check(plain: Outcome, staged: Outcome, *, tolerance: float = 0.0) -> None:
        assert staged.gradients.keys() == plain.gradients.keys()
        pairs = {"loss": (plain.loss, staged.loss)}
        pairs |= {f"gradient {n}": (plain.gradients[n], g) for n, g in staged.gradients.items()}
        pairs |= {f"buffer {n}": (plain.buffers[n], b) for n, b in staged.buffers.items()}
        for name, (wanted, found) in pairs.items():
            assert (wanted.shape, wanted.dtype) == (found.shape, found.dtype), name
            if not wanted.is_floating_point() or not tolerance:
                assert torch.equal(wanted, found), name
            else:
                largest = wanted.abs().max().item()
                assert (wanted - found).abs().max().item() <= tolerance * max(largest, 1e-3), name
        assert torch.equal(plain.random_state, staged.random_state)

    return check


@pytest.fixture(scope="session")
def make_step() -> Callable[..., TrainingStep]:
    """A step in float64, the same each time, from a function that makes model, batch and loss."""

    def make(build: Callable[[], tuple[Any, Any, Any]]) -> TrainingStep:
        torch.manual_seed(0)
        model, batch, loss_fn = build()
        return TrainingStep(model=model.double(), batch=batch, loss_fn=loss_fn)

    return make


@pytest.fixture(scope="session")
def check_stages(
    make_step: Callable[..., TrainingStep],
    cut_into: Callable[..., Stages],
    compare: Callable[..., None],
) -> Callable[..., Outcome]:
    """Train both ways and compare: `check_stages(build, 0.5, sizes=(3, 2), tolerance=1e-12)`."""

    def check(build: Any, *cuts: float, tolerance: float = 0.0, **more: Any) -> Outcome:
        step = make_step(build)
        plain = train_plainly(step)
        compare(plain, cut_into(step, *cuts, **more).run(), tolerance=tolerance)
        return plain

    return check


@pytest.fixture
def called() -> Callable[[fx.GraphModule], Counter[Any]]:
    """How often a graph calls what."""
    return lambda module: Counter(
        node.target for node in module.graph.nodes if node.op == "call_function"
    )
