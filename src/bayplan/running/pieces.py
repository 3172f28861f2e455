"""A forward that torch cannot trace as one graph, planned and run as its pieces together.

Where torch meets something that it cannot trace (a branch on a computed value, a size that hangs on
one, a call into other libraries), it compiles what came before and goes on after it. Operators in
between run as they are written. How much memory all of that takes is seen by running the whole step
on fake tensors, pieces as planned, as a captured step is: releases, what autograd keeps and what
the operators in between take are then exact, whatever the forward does.

1. The step runs so with every piece in plain order.
2. An order is chosen for every piece (`planning/memory/pieces.py`).
3. The step runs so with these orders. If it takes more than the limit, the limit of 2 is lowered.
4. The model is compiled with the orders, which its pieces are known by.

A call that runs other pieces than planned, or more of them, is stopped there and planned anew: the
random numbers and the model's buffers are put back, and it begins again.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import fx, nn

from bayplan import torch_answers, torch_compat, torch_joint
from bayplan.costing.measure import born_bytes
from bayplan.costing.operators import OperatorCosts
from bayplan.data.errors import CaptureError, DoesNotFit
from bayplan.data.graph import StepGraph
from bayplan.data.live_memory import replay_memory
from bayplan.data.plan import StepOrder
from bayplan.data.units import Limit, format_bytes
from bayplan.planning.memory.orders import FastestWithin, by_strategy, planned_bytes
from bayplan.planning.memory.pieces import (
    Moment,
    PieceRun,
    choose_orders,
    kept_bytes,
    surroundings_of,
)
from bayplan.planning.memory.strategies import keep
from bayplan.rewriting.whole_operators import whole_operators
from bayplan.running.backend import halves_by
from bayplan.running.call_faults import explained_run, once_differentiable
from bayplan.running.executor import compile_graph
from bayplan.step import TrainingStep, split_batch
from bayplan.tracing.capture import GeneratorStates, NodeWatch, record_step, same_generators
from bayplan.tracing.checkpoints import with_checkpoints_checked
from bayplan.tracing.explain import explained
from bayplan.tracing.fake import OptimizerSource, correct_fakes, fake_step, without_memory
from bayplan.tracing.joint import LossMemory, MemoryContext
from bayplan.tracing.joint_trace import compile_whole, uncompile
from bayplan.tracing.shared_casts import sharing_casts
from bayplan.tracing.traced_step import Decide, TracedStep
from bayplan.tracing.tracer import StepTracer
from bayplan.tracing.values import KnownValues

__all__ = ["PieceBackend", "PiecePlan", "PiecewiseCall", "Unplanned", "plan_pieces"]

_MOST_ROUNDS = 6  # of choosing orders and seeing what they take
_WORKSPACE_SHARE = 0.15  # no kernel is taken to need more scratch memory than this of the peak
_SHORTEST_SEARCH = 0.05  # seconds

Operators = tuple[str, ...]  # of a graph of Dynamo's, whatever their sizes


def _operators_of(module: fx.GraphModule) -> Operators:
    calls = (node for node in module.graph.nodes if node.op in ("call_function", "call_method"))
    # With a size left open, torch asks for it in the graph.
    return tuple(str(node.target) for node in calls if not torch_compat.is_of_size(node))


class Unplanned(CaptureError):
    """A call of a model ran a piece that its plan does not have.

    Attributes:
        varying: a piece that was planned with other sizes or numbers, by its operators.
    """

    varying: Operators | None = None


@dataclass(frozen=True)
class Piece:
    """A part of a forward that is one graph; `end` says where it ends and why, if by a break."""

    traced: TracedStep
    operators: Operators
    end: str

    @property
    def fingerprint(self) -> str:
        return self.traced.with_packs().program.fingerprint


@dataclass
class PieceBackend:
    """Compiles every piece by an order, and tells when each begins and ends."""

    traces_as_eager: ClassVar[bool] = True  # see `torch_answers.answer_as_eager`

    decide: Decide
    context: MemoryContext
    varying: frozenset[Operators] = frozenset()  # what runs as it is written
    known: frozenset[Operators] = frozenset()  # what is planned, with some sizes
    pieces: list[Piece] = field(default_factory=list)
    largest_bytes: dict[Operators, int] = field(default_factory=dict)  # inputs of what varies
    is_planning: bool = False
    # Hears the piece, whether forward runs, and whether it begins.
    on_run: Callable[[int, bool, bool], None] = field(default=lambda *_: None)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        correct_fakes()
        torch_compat.guard_global_hooks()
        if not any(tensor.requires_grad for tensor in torch_compat.tensors_in(inputs)):
            return module.forward  # keeps nothing for a backward, so it may be of any size
        operators = _operators_of(module)
        if operators in self.varying:
            return self._as_written(module, operators)
        # The piece, and whether forward: of the graphs that are still to be compiled. Those of
        # backward are, when it first runs.
        waiting: list[tuple[int, bool]] = []

        def partition(
            joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            traced = TracedStep.of(joint, num_fwd_outputs, self.context, inputs)
            try:
                order = self.decide(traced)
            except Unplanned as fault:
                fault.varying = operators if operators in self.known else None
                raise
            halves = halves_by(order, traced, None)
            waiting.extend([(len(self.pieces), True), (len(self.pieces), False)])
            self.pieces.append(Piece(traced, operators, torch_answers.break_after(module)))
            return halves

        def compile_half(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            run = explained_run(compile_graph(graph))
            if not waiting:  # a forward without gradients
                return run
            return self._told(run, *waiting.pop(0))

        with sharing_casts(module, inputs):
            run = torch_joint.compile_joint(
                module,
                inputs,
                partition=with_checkpoints_checked(module, partition),
                compile_graph=compile_half,
                whole=whole_operators(),
            )
        return once_differentiable(run)

    def _as_written(self, module: fx.GraphModule, operators: Operators) -> Callable[..., Any]:
        """Run a piece whose sizes hang on values, which must not be larger than when planned."""

        def run(*args: Any) -> Any:
            if torch.is_grad_enabled():
                size_bytes = sum(each.nbytes for each in torch_compat.tensors_in(args))
                if self.is_planning:
                    known_bytes = self.largest_bytes.get(operators, 0)
                    self.largest_bytes[operators] = max(known_bytes, size_bytes)
                elif size_bytes > self.largest_bytes.get(operators, 0):
                    raise Unplanned("a piece of the forward that is larger than planned")
            return module.forward(*args)

        return run

    def _told(
        self, run: Callable[..., Any], piece: int, is_forward: bool
    ) -> Callable[[list[Any]], Any]:
        def told(arguments: list[Any]) -> Any:
            self.on_run(piece, is_forward, True)
            outputs = run(arguments)
            self.on_run(piece, is_forward, False)
            return outputs

        return torch_compat.boxed(told)


class _PieceTracer(StepTracer):
    """Records what runs also in compiled pieces, and between which operators each runs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spans: list[tuple[int, bool, int, int]] = []  # piece, is forward, first, end
        self._begun: list[int] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def hear(self, piece: int, is_forward: bool, begins: bool) -> None:
        if begins:
            self._begun.append(len(self.nodes))
        else:
            self.spans.append((piece, is_forward, self._begun.pop(), len(self.nodes)))


class _PieceNodeWatch(NodeWatch):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@dataclass(frozen=True)
class Simulated:
    """A whole step as its pieces' orders have it run."""

    pieces: Sequence[Piece]
    graph: StepGraph
    spans: Sequence[tuple[int, bool, int, int]]
    workspace_bytes: Sequence[int]
    granularity_bytes: int
    largest_bytes: dict[Operators, int]

    @cached_property
    def total_bytes(self) -> Sequence[int]:
        return self._totals(self.workspace_bytes)

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes)

    def _totals(self, workspace_bytes: Sequence[int]) -> Sequence[int]:
        live = replay_memory(self.graph, workspace_bytes, granularity_bytes=self.granularity_bytes)
        return live.total_bytes

    @cached_property
    def runs(self) -> list[PieceRun]:
        """Each execution of a piece that has a backward, in the order of their forwards."""
        totals = self._totals([0] * len(self.graph.nodes))
        born = born_bytes(self.graph, self.granularity_bytes)
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


def simulate(
    step: TrainingStep,
    optimizer: OptimizerSource,
    decide: Decide,
    context: MemoryContext,
    varying: frozenset[Operators] = frozenset(),
) -> Simulated:
    """Run a step on fake tensors, its pieces by the orders that are decided for them."""
    backend = PieceBackend(decide, context, varying, is_planning=True)
    tracers: list[_PieceTracer] = []

    def tracer_of(*args: Any) -> StepTracer:
        tracers.append(_PieceTracer(*args))
        backend.on_run = tracers[-1].hear
        return tracers[-1]

    with same_generators(), explained():
        states = GeneratorStates()

        def begin(mode: KnownValues) -> None:
            """Let every run draw the same random numbers, so that all go one way."""
            mode.draw_again()
            states.put_back()

        with without_memory(knows_all=True) as mode:
            fake = fake_step(step, optimizer)
            begin(mode)
            fake()
        compile_whole(fake.model, backend, fullgraph=False)
        with mode:
            begin(mode)
            fake()
            begin(mode)
            name = type(step.model).__name__
            graph = record_step(fake, name=name, tracer_of=tracer_of, sees_modules=False)
            backend.on_run = lambda *_: None
            begin(mode)
            workspaces = _workspaces(fake, graph, context)
    (tracer,) = tracers
    return Simulated(
        backend.pieces,
        graph,
        tracer.spans,
        workspaces,
        context.granularity_bytes,
        backend.largest_bytes,
    )


def _workspaces(fake: TrainingStep, graph: StepGraph, context: MemoryContext) -> list[int]:
    """The scratch memory of the operators that may be at the peak; 0 for all others."""
    workspaces = [0] * len(graph.nodes)
    live = replay_memory(graph, workspaces, granularity_bytes=context.granularity_bytes)
    least_bytes = (1 - _WORKSPACE_SHARE) * live.peak_bytes
    high = {index for index, total in enumerate(live.total_bytes) if total >= least_bytes}
    device = next(fake.model.parameters()).device
    with context.prices(device) as costs:
        assert isinstance(costs, OperatorCosts), "a fitted model runs here"

        def look_at(index: int, *call: Any) -> None:
            workspaces[index] = costs.price(*call)[1]

        with torch_compat.replayed_views(), _PieceNodeWatch(high, look_at):
            fake()
    return workspaces


@dataclass(frozen=True)
class PiecePlan:
    """Orders for the pieces of a step, and what the step then takes.

    Attributes:
        orders: by a piece's fingerprint; for equal pieces in the order of their first runs.
        num_runs: how often pieces run in a step, by fingerprint.
        operators: of each piece.
        largest_bytes: the inputs of pieces that run as they are written, for their sizes vary.
        breaks: where and why the forward breaks.
    """

    orders: dict[str, list[StepOrder]]
    num_runs: dict[str, int]
    operators: frozenset[Operators]
    largest_bytes: dict[Operators, int]
    breaks: tuple[str, ...]
    peak_bytes: int
    plain_peak_bytes: int
    seconds: float
    plain_seconds: float

    def decider(self) -> Decide:
        """Decides for the pieces of one compiled model, which come in the order of their runs.

        What is compiled anew later gets the order that takes least among those of equal pieces.
        """
        coming = {fingerprint: iter(orders) for fingerprint, orders in self.orders.items()}

        def decide(traced: TracedStep) -> StepOrder:
            fingerprint = traced.with_packs().program.fingerprint
            if fingerprint not in coming:
                raise Unplanned("a piece of the forward that the plan does not have")
            least = min(self.orders[fingerprint], key=lambda order: order.peak_bytes)
            return next(coming[fingerprint], least)

        return decide


def plan_pieces(
    step: TrainingStep,
    optimizer: OptimizerSource,
    decide: FastestWithin,
    context: MemoryContext,
    varying: frozenset[Operators] = frozenset(),
) -> PiecePlan:
    """Plan a step whose forward is not one graph.

    Args:
        decide: its limit is the step's, and its settings are those of every search.
        varying: pieces to leave as they are written.

    Raises:
        DoesNotFit: says the smallest limit that is known to work.
    """
    alone = _alone(context)
    plain = simulate(step, optimizer, _in_plain_order, alone, varying)
    limit_bytes = decide.limit.of(decide.plain_peak_bytes or plain.peak_bytes)
    if plain.peak_bytes <= limit_bytes:
        orders = {index: _in_plain_order(each.traced) for index, each in enumerate(plain.pieces)}
        return _plan_of(plain, orders, plain)
    search = _Search(plain, decide, alone)

    def within(limit_bytes: int) -> PiecePlan:
        target_bytes = planned_bytes(limit_bytes)
        for _ in range(_MOST_ROUNDS):
            orders = choose_orders(plain.runs, search.around, plain.outside, target_bytes, search)
            decider = _plan_of(plain, orders, plain).decider()
            simulated = simulate(step, optimizer, decider, alone, varying)
            if simulated.peak_bytes <= limit_bytes:
                return _plan_of(plain, orders, simulated)
            target_bytes -= simulated.peak_bytes - limit_bytes
        raise DoesNotFit(
            f"the pieces of the forward were planned {_MOST_ROUNDS} times, and always took more"
        )

    try:
        return within(limit_bytes)
    except DoesNotFit as refusal:
        smallest_bytes = plain.peak_bytes
        for share in _TRIED_LIMITS:
            larger_bytes = limit_bytes + int(share * (plain.peak_bytes - limit_bytes))
            with contextlib.suppress(DoesNotFit):
                within(larger_bytes)
                smallest_bytes = larger_bytes
                break
        raise DoesNotFit(
            f"the pieces of a forward that is not one graph do not fit {format_bytes(limit_bytes)}"
            f" together: {str(refusal).partition(' Fits with')[0]} All of them fit with"
            f" {smallest_bytes} bytes ({format_bytes(smallest_bytes)}). The graph breaks at"
            f" {'; '.join(_breaks(plain)) or _IN_A_LOOP}",
            smallest_bytes=smallest_bytes,
        ) from refusal


_TRIED_LIMITS = (0.25, 0.5, 0.75)  # between one that is too small and the plain peak
_IN_A_LOOP = "a loop, whose frame torch does not compile"


def _breaks(simulated: Simulated) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.end for each in simulated.pieces if each.end))


_in_plain_order = by_strategy("keep", keep())


def _plan_of(plain: Simulated, orders: dict[int, StepOrder], run: Simulated) -> PiecePlan:
    pieces = plain.pieces
    used = [orders[each.piece] for each in plain.runs]
    by_fingerprint: dict[str, list[StepOrder]] = {}
    for index, piece in enumerate(pieces):
        # A piece without a backward in this step keeps nothing for one.
        order = orders.get(index) or _in_plain_order(piece.traced)
        by_fingerprint.setdefault(piece.fingerprint, []).append(order)
    return PiecePlan(
        orders=by_fingerprint,
        num_runs=Counter(pieces[span[0]].fingerprint for span in run.spans if span[1]),
        operators=frozenset(piece.operators for piece in pieces),
        largest_bytes=run.largest_bytes,
        breaks=_breaks(plain),
        peak_bytes=run.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        seconds=sum(order.seconds for order in used),
        plain_seconds=sum(order.plain_seconds for order in used),
    )


class _Search:
    """Finds the order of one piece within so many bytes, of which it keeps no more than some."""

    def __init__(self, plain: Simulated, decide: FastestWithin, alone: MemoryContext) -> None:
        self._pieces, self._decide, self._alone = plain.pieces, decide, alone
        runs = {run.piece: [] for run in plain.runs}
        for run in plain.runs:
            runs[run.piece].append(run)
        self.around = {
            piece: surroundings_of(self._pieces[piece].traced.with_packs().program, of_piece)
            for piece, of_piece in runs.items()
        }

    def __call__(self, piece: int, limit_bytes: int, cap_bytes: int) -> tuple[StepOrder, int]:
        traced, around = self._pieces[piece].traced, self.around[piece]
        inputs_bytes = traced.with_packs().program.always_bytes
        context = replace(
            self._alone,
            resident_bytes=max(0, around.before_bytes - inputs_bytes),
            loss=LossMemory(
                peak_bytes=max(0, limit_bytes - around.before_bytes - cap_bytes),
                kept_bytes=around.added_bytes,
            ),
        )
        beside = TracedStep(traced.joint, traced.num_forward_outputs, context, traced.packs)
        decide = replace(
            self._decide,
            limit=Limit(size_bytes=limit_bytes),
            plain_peak_bytes=None,
            tier=None,
            time_limit_seconds=max(
                _SHORTEST_SEARCH, self._decide.time_limit_seconds / (8 * len(self.around))
            ),
            machine=f"{self._decide.machine}, piece {context.resident_bytes} {context.loss}",
        )
        order = decide(beside)
        program = beside.for_order(order).program
        return order, kept_bytes(program, order.schedule)


@dataclass
class PiecewiseCall:
    """What a model's calls run whose forward is planned in pieces.

    Attributes:
        step: the model, and the batch and loss that it was planned with first.
        decide, context: as for `plan_pieces`; the limit is in bytes.
        variants: compiled calls by plan, the latest first; calls that go another way have others.
    """

    step: TrainingStep
    optimizer: OptimizerSource
    decide: FastestWithin
    context: MemoryContext
    plans: list[PiecePlan] = field(default_factory=list)
    _varying: set[Operators] = field(default_factory=set)
    _variants: list[Callable[..., Any]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.step.model
        if not torch.is_grad_enabled():
            return self._variants[0](*args, **kwargs)
        state = _State(model)
        for _ in range(_MOST_PLANS_OF_A_CALL):
            for index, call in enumerate(self._variants):
                try:
                    outputs = call(*args, **kwargs)
                except Exception as fault:
                    inner = torch_compat.compile_fault(fault)
                    if not isinstance(inner, Unplanned):
                        raise
                    state.put_back()
                    if inner.varying is not None:
                        self._varying.add(inner.varying)
                        self._variants.clear()  # they would compile it for every size
                        break
                else:
                    self._variants.insert(0, self._variants.pop(index))
                    return outputs
            self.plan_for(args, kwargs)
        raise CaptureError(
            f"the forward was planned {_MOST_PLANS_OF_A_CALL} times for one batch, and each time"
            f" went another way when it ran; it breaks at {'; '.join(self.plans[0].breaks)}"
        )

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan the step anew, as a call with these arguments has it run."""
        inputs, targets = split_batch(self.step.batch, self.step.loss_fn)
        if args and kwargs:
            raise CaptureError(
                "a batch that makes the forward break elsewhere than planned is planned when it"
                " comes; call the model with positional arguments only, or with keywords only"
            )
        inputs = kwargs or (args[0] if len(args) == 1 else args)
        batch = (inputs, *targets) if targets else inputs
        self.add(replace(self.step, batch=batch))

    def add(self, step: TrainingStep) -> None:
        """Plan a step, and have the model run so from now on."""
        model = self.step.model
        current = torch_compat.compiled_call(model)
        uncompile(model)  # the copy that is planned must not run what is compiled already
        try:
            varying = frozenset(self._varying)
            plan = plan_pieces(step, self.optimizer, self.decide, self.context, varying)
            self.plans.insert(0, plan)
            self._variants.insert(0, self._compiled(plan))
            del self._variants[_MOST_VARIANTS:]
        finally:
            torch_compat.set_compiled_call(model, current)

    def _compiled(self, plan: PiecePlan) -> Callable[..., Any]:
        model, counts = self.step.model, Counter[str]()
        backend = PieceBackend(
            plan.decider(),
            _alone(self.context),
            frozenset(self._varying),
            plan.operators,
            largest_bytes=plan.largest_bytes,
        )

        def count(piece: int, is_forward: bool, begins: bool) -> None:
            if is_forward and begins:
                fingerprint = backend.pieces[piece].fingerprint
                counts[fingerprint] += 1
                if counts[fingerprint] > plan.num_runs.get(fingerprint, 0):
                    raise Unplanned("a piece of the forward that runs more often than planned")

        backend.on_run = count
        compile_whole(model, backend, fullgraph=False)
        compiled = torch_compat.compiled_call(model)
        assert compiled is not None, "just compiled"

        def call(*args: Any, **kwargs: Any) -> Any:
            counts.clear()
            return compiled(*args, **kwargs)

        return call


_MOST_VARIANTS = 8
_MOST_PLANS_OF_A_CALL = 8


class _State:
    """What a forward that is begun twice must find as it was: random numbers and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._generators = GeneratorStates()
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def put_back(self) -> None:
        self._generators.put_back()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


def _alone(context: MemoryContext) -> MemoryContext:
    """Of a piece, without what is beside it."""
    return replace(context, resident_bytes=0, loss=LossMemory(), update_bytes=None)
