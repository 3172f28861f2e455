"""A step whose forward is in pieces, run on fake tensors as its pieces' orders have it.

Releases, what autograd keeps and what the operators between the pieces take are then exact,
whatever the forward does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

import torch

from bayplan import torch_answers, torch_compat
from bayplan.costing.measure import born_bytes
from bayplan.costing.operators import OperatorCosts
from bayplan.costing.step_memory import WORKSPACE_SHARE, most_workspace_bytes
from bayplan.data.errors import BayplanError
from bayplan.data.graph import StepGraph
from bayplan.data.live_memory import replay_memory
from bayplan.data.program import Cost
from bayplan.planning.memory.pieces import Moment, PieceRun
from bayplan.running.piece_backend import Piece, PieceBackend
from bayplan.step import TrainingStep
from bayplan.tracing.capture import (
    BufferStates,
    GeneratorStates,
    record_step,
    same_generators,
)
from bayplan.tracing.explain import explained
from bayplan.tracing.fake import OptimizerSource, fake_step, without_memory
from bayplan.tracing.joint import MemoryContext
from bayplan.tracing.joint_trace import compile_whole
from bayplan.tracing.piece_gradients import GradientWatch, Operators
from bayplan.tracing.tracer import Locator, StepTracer
from bayplan.tracing.values import KnownValues

__all__ = ["Simulated", "simulate", "watch_gradients"]

PriceCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], Cost]


class _PieceTracer(StepTracer):
    """Records what runs also in compiled pieces, and between which operators each runs.

    Operators that may need scratch memory at the peak get a price: not all of them, since each is
    run for it.
    """

    def __init__(self, locator: Locator, price: PriceCall | None, peak_bytes: int) -> None:
        super().__init__(locator)
        self.spans: list[tuple[int, bool, int, int]] = []  # piece, is forward, first, end
        self.workspace_bytes: list[int] = []
        self._begun: list[int] = []
        self._price, self._peak_bytes = price, peak_bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        output = super().run(func, *args, **kwargs)
        workspace_bytes = 0
        most_bytes = max(
            WORKSPACE_SHARE * self._peak_bytes, most_workspace_bytes(self.nodes[-1], self.values)
        )
        if self._price is not None and self.live_bytes + most_bytes >= self._peak_bytes:
            workspace_bytes = self._price(func, args, kwargs).workspace_bytes
        self.workspace_bytes.append(workspace_bytes)
        return output

    def hear(self, piece: int, is_forward: bool, begins: bool) -> None:
        if begins:
            self._begun.append(len(self.nodes))
        else:
            self.spans.append((piece, is_forward, self._begun.pop(), len(self.nodes)))


@dataclass(frozen=True)
class Simulated:
    """A whole step as its pieces' orders have it run."""

    pieces: Sequence[Piece]
    graph: StepGraph
    spans: Sequence[tuple[int, bool, int, int]]
    workspace_bytes: Sequence[int]
    context: MemoryContext
    largest_bytes: dict[Operators, int]
    breaks_in_loops: tuple[str, ...] = ()

    @cached_property
    def total_bytes(self) -> Sequence[int]:
        return self._totals(self.workspace_bytes)

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes)

    def _totals(self, workspace_bytes: Sequence[int]) -> Sequence[int]:
        live = replay_memory(
            self.graph,
            workspace_bytes,
            granularity_bytes=self.context.granularity_bytes,
            record_bytes=self.context.objects.record,
        )
        return tuple(map(add, live.total_bytes, self._object_bytes()))

    def _object_bytes(self) -> Iterator[int]:
        """Of the objects that hold what pieces make, and of the call, at each operator."""
        objects = self.context.objects
        inside = {i for _, _, first, end in self.spans for i in range(first, end)}
        changes = [objects.step] + [0] * len(self.graph.nodes)
        for storage in self.graph.storages:
            if storage.born in inside:
                changes[storage.born] += objects.tensor
                if storage.released is not None:
                    changes[storage.released + 1] -= objects.tensor
        return accumulate(changes[:-1])

    @cached_property
    def runs(self) -> list[PieceRun]:
        """Each execution of a piece that has a backward, in the order of their forwards."""
        totals = self._totals([0] * len(self.graph.nodes))
        born = born_bytes(self.graph, self.context.granularity_bytes)
        waiting: dict[int, list[tuple[int, int]]] = {}
        runs = []
        for piece, is_forward, first, end in self.spans:
            if is_forward:
                waiting.setdefault(piece, []).append((first, end))
            elif waiting.get(piece):
                forward = waiting[piece].pop()  # backward goes from the last to the first
                before = [totals[index] - born[index] for index in (forward[0], first)]
                runs.append(PieceRun(piece, forward, (first, end), *before))
        return sorted(runs, key=lambda run: run.forward)

    @property
    def outside(self) -> list[Moment]:
        inside = {i for _, _, first, end in self.spans for i in range(first, end)}
        return [Moment(i, t) for i, t in enumerate(self.total_bytes) if i not in inside]


@contextmanager
def _faked(
    step: TrainingStep, optimizer: OptimizerSource, *, as_drawn: bool
) -> Iterator[tuple[TrainingStep, Callable[[], AbstractContextManager[None]], KnownValues]]:
    """A copy of a step on fake tensors that ran once, where to run it again, and their values.

    Every run draws the same random numbers and finds the same buffers, so that all go one way: the
    fullest, or the way that the next call goes.
    """
    with same_generators(), explained(), _unwrapped():
        states = GeneratorStates()
        with without_memory(knows_all=True) as mode:
            fake = fake_step(step, optimizer)
            buffers = BufferStates(fake.model)
            (mode.go_as_drawn if as_drawn else mode.go_fullest_way)(fake)

        @contextmanager
        def again() -> Iterator[None]:
            with mode, torch_answers.known_arrays(), torch_answers.written_numbers():
                mode.draw_again()
                states.put_back()
                buffers.put_back()
                yield

        yield fake, again, mode


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise errors of ours without torch's wrapping."""
    try:
        yield
    except Exception as fault:
        inner = torch_compat.compile_fault(fault)
        if inner is fault or not isinstance(inner, BayplanError):
            raise
        raise inner from fault


def watch_gradients(
    step: TrainingStep, optimizer: OptimizerSource, *, as_drawn: bool = False
) -> GradientWatch:
    """See which gradients the pieces of a step's forward get and hand out in plain training."""
    with _faked(step, optimizer, as_drawn=as_drawn) as (fake, again, mode):
        watch = GradientWatch(mode.num_writes)
        compile_whole(fake.model, watch, fullgraph=False)
        with again():
            parameters = dict(fake.model.named_parameters())
            before = {name: mode.num_writes(each) for name, each in parameters.items()}

            def at_loss(loss: torch.Tensor) -> None:
                watch.count_uses(loss)
                watch.changed_parameters = frozenset(
                    name
                    for name, each in parameters.items()
                    if mode.num_writes(each) != before[name]
                )

            fake(on_loss=at_loss)
        return watch


def simulate(
    step: TrainingStep,
    optimizer: OptimizerSource,
    backend: PieceBackend,
    *,
    as_drawn: bool = False,
) -> Simulated:
    """Run a step on fake tensors, its pieces as a backend compiles them."""
    backend.is_planning = True
    granularity_bytes = backend.context.granularity_bytes
    name = type(step.model).__name__

    def recorded(
        fake: TrainingStep, price: PriceCall | None = None, peak_bytes: int = 0
    ) -> tuple[StepGraph, _PieceTracer]:
        tracers: list[_PieceTracer] = []

        def tracer_of(locator: Locator) -> StepTracer:
            tracers.append(_PieceTracer(locator, price, peak_bytes))
            backend.on_run = tracers[-1].hear
            return tracers[-1]

        graph = record_step(fake, name=name, tracer_of=tracer_of, sees_modules=False)
        return graph, tracers[-1]

    with _faked(step, optimizer, as_drawn=as_drawn) as (fake, again, _):
        compile_whole(fake.model, backend, fullgraph=False)
        with again():
            fake()
        with again():
            graph, tracer = recorded(fake)
        # Not by their numbers: torch's guards, and what is kept for later, run some of their own.
        live = replay_memory(graph, tracer.workspace_bytes, granularity_bytes=granularity_bytes)
        device = next(fake.model.parameters()).device
        with backend.context.prices(device) as costs, again():  # in this order: prices are real
            assert isinstance(costs, OperatorCosts), "a fitted model runs here"
            graph, tracer = recorded(fake, costs.price, live.peak_bytes)
        backend.on_run = lambda *_: None
    return Simulated(
        backend.pieces,
        graph,
        tracer.spans,
        tracer.workspace_bytes,
        backend.context,
        backend.largest_bytes,
        torch_answers.breaks_in_loops(step.model),
    )
