"""A forward that torch cannot trace as one graph, planned and run as its pieces together.

Where torch meets something that it cannot trace (a branch on a computed value, a size that depends
on one, a call into other libraries), it compiles what came before and goes on after it. Operators
in between run as they are written. How much memory all of that takes is seen by running the whole
step on fake tensors, pieces as planned (`piece_simulation.py`).

1. The step runs so with every piece as it is written, to see where gradients go
   (`tracing/piece_gradients.py`), and then with every piece in plain order.
2. An order is chosen for every piece (`planning/memory/pieces.py`).
3. The step runs so with these orders. If it takes more than the limit, the limit of 2 is lowered.
4. The model is compiled with the orders, which its pieces are known by (`piece_backend.py`).

A call that runs other pieces than planned, or more of them, is stopped there and planned anew: the
random numbers and the model's buffers are put back, and it begins again. Where that plan is the
same one, torch compiles something on real tensors that it left alone on those without memory: this
piece runs as it is written, as it was planned.
"""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.data.errors import CaptureError, DoesNotFit
from bayplan.data.plan import StepOrder
from bayplan.data.units import Limit, format_bytes
from bayplan.data.verdict import InPieces, PlanSummary
from bayplan.planning.memory.orders import FastestWithin, by_strategy, limit_for, planned_bytes
from bayplan.planning.memory.pieces import Surroundings, choose_orders, kept_bytes, plain_piece
from bayplan.planning.memory.strategies import keep
from bayplan.running.piece_backend import PieceBackend, Unplanned
from bayplan.running.piece_simulation import Simulated, simulate, watch_gradients
from bayplan.step import TrainingStep, split_batch
from bayplan.tracing.capture import BufferStates, GeneratorStates, ParameterStates
from bayplan.tracing.fake import OptimizerSource
from bayplan.tracing.joint import LossMemory, MemoryContext
from bayplan.tracing.joint_trace import compile_whole, uncompile
from bayplan.tracing.piece_gradients import Inexact, Operators, PieceGradients
from bayplan.tracing.shared_casts import OnePerAutocast
from bayplan.tracing.traced_step import Decide, TracedStep

__all__ = ["PiecePlan", "PiecewiseCall", "plan_pieces", "summarise_pieces"]

_MOST_ROUNDS = 6  # of choosing orders and seeing what they take
_SHORTEST_SEARCH = 0.05  # seconds
_NUM_LIMITS = 16  # that are tried at most for the smallest that works, evenly up to the plain peak


@dataclass(frozen=True)
class PiecePlan:
    """Orders for the pieces of a step, and what the step then takes.

    Attributes:
        orders: by a piece's fingerprint; for equal pieces in the order of their first runs.
        num_runs: how often pieces run in a step, by fingerprint.
        gradients: that each piece gets and hands out.
        written: pieces that run as they are written, with the bytes of their inputs.
        changed_parameters: that the forward itself writes to, by name.
        breaks: where and why the forward breaks.
    """

    orders: dict[str, list[StepOrder]]
    num_runs: dict[str, int]
    gradients: Mapping[Operators, PieceGradients]
    written: dict[Operators, int]
    changed_parameters: frozenset[str]
    breaks: tuple[str, ...]
    peak_bytes: int
    plain_peak_bytes: int
    seconds: float
    plain_seconds: float

    @property
    def way(self) -> tuple[dict[str, int], dict[Operators, int]]:
        """What a step runs."""
        return self.num_runs, self.written

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


class PiecesDoNotFit(DoesNotFit):
    """Pieces that do not fit together, with what is known of them."""

    def __init__(self, text: str, *, smallest_bytes: int, pieces: InPieces) -> None:
        super().__init__(text, smallest_bytes=smallest_bytes)
        self.pieces = pieces


def summarise_pieces(
    step: TrainingStep, optimizer: OptimizerSource, decide: FastestWithin, context: MemoryContext
) -> InPieces:
    """What `plan_pieces` finds, for a verdict."""
    try:
        plan = plan_pieces(step, optimizer, decide, context)
    except PiecesDoNotFit as refusal:
        return refusal.pieces
    orders = [order for equal in plan.orders.values() for order in equal]
    summary = PlanSummary(
        peak_bytes=plan.peak_bytes,
        time_ratio=plan.seconds / plan.plain_seconds,
        num_recomputed=sum(len(each.schedule) - len({*each.schedule}) for each in orders),
        num_packed=sum(len(each.packs) for each in orders),
        num_swapped=0,
        time_ratio_spread=max((each.time_ratio_spread for each in orders), default=0.0),
        price_spread=max((each.price_spread for each in orders), default=0.0),
    )
    num_pieces = sum(plan.num_runs.values())
    return InPieces(breaks=plan.breaks, num_pieces=num_pieces, planned=summary)


def plan_pieces(
    step: TrainingStep,
    optimizer: OptimizerSource,
    decide: FastestWithin,
    context: MemoryContext,
    varying: frozenset[Operators] = frozenset(),
    *,
    as_drawn: bool = False,
) -> PiecePlan:
    """Plan a step whose forward is not one graph.

    Args:
        decide: its limit is the step's, and its settings are those of every search.
        varying: pieces to leave as they are written.
        as_drawn: whether a step that is decided by random numbers is planned as the next call draws
            them, instead of the way that makes most.

    Raises:
        DoesNotFit: says the smallest limit that is known to work.
    """
    alone = _alone(context)
    watch = watch_gradients(step, optimizer, as_drawn=as_drawn)
    gradients, inexact = watch.found()
    written = varying | inexact

    def simulated(decide: Decide) -> Simulated:
        backend = PieceBackend(decide, alone, gradients, written)
        return simulate(step, optimizer, backend, as_drawn=as_drawn)

    plain = None
    while plain is None:
        try:
            plain = simulated(_in_plain_order)
        except Inexact as fault:
            written |= {fault.operators}
        except Unplanned as fault:
            raise CaptureError(
                "torch cuts the forward otherwise where it is planned than where its gradients are"
                f" watched: a piece is new{fault.place and f', which ends at {fault.place}'}. Take"
                " what torch cannot trace there out of the forward, or train the model as it is"
            ) from fault
    limit_bytes = decide.limit.of(decide.plain_peak_bytes or plain.peak_bytes)
    plan_of = partial(_plan_of, watch.changed_parameters, gradients, plain)
    if plain.peak_bytes <= planned_bytes(limit_bytes):
        orders = {index: _in_plain_order(each.traced) for index, each in enumerate(plain.pieces)}
        return plan_of(orders, plain)
    search = _Search(plain, decide, alone)

    def within(limit_bytes: int) -> PiecePlan:
        target_bytes = planned_bytes(limit_bytes)
        for _ in range(_MOST_ROUNDS):
            orders = choose_orders(plain.runs, search.plain, plain.outside, target_bytes, search)
            run = simulated(plan_of(orders, plain).decider())
            if run.peak_bytes <= planned_bytes(limit_bytes):
                return plan_of(orders, run)
            target_bytes -= run.peak_bytes - planned_bytes(limit_bytes)
        raise DoesNotFit(
            f"the pieces of the forward were planned {_MOST_ROUNDS} times, and always took more"
        )

    try:
        return within(limit_bytes)
    except DoesNotFit as refusal:
        smallest_bytes = _smallest(within, limit_bytes, limit_for(plain.peak_bytes))
        raise PiecesDoNotFit(
            f"the pieces of a forward that is not one graph do not fit {format_bytes(limit_bytes)}"
            f" together: {str(refusal).partition(' Fits with')[0].rstrip('.')}. All fit with"
            f" {smallest_bytes} bytes ({format_bytes(smallest_bytes)}). The graph breaks at"
            f" {'; '.join(_breaks(plain))}",
            smallest_bytes=smallest_bytes,
            pieces=InPieces(
                breaks=_breaks(plain),
                num_pieces=len(plain.runs),
                smallest_bytes=smallest_bytes,
            ),
        ) from refusal


def _smallest(within: Callable[[int], PiecePlan], too_few_bytes: int, most_bytes: int) -> int:
    """The smallest of some limits that a plan was found for; the same whatever was asked for."""
    limits = [most_bytes * part // _NUM_LIMITS for part in range(1, _NUM_LIMITS)]
    first, end = 0, len(limits)  # what lies before the first is too small, from the end it works
    while first < end:
        middle = (first + end) // 2
        try:
            if limits[middle] <= too_few_bytes:
                raise DoesNotFit("as was found")
            within(limits[middle])
            end = middle
        except DoesNotFit:
            first = middle + 1
    return [*limits, most_bytes][end]


def _breaks(simulated: Simulated) -> tuple[str, ...]:
    lines = tuple(dict.fromkeys(each.end for each in simulated.pieces if each.end))
    in_loops = (f"{line}, in a loop" for line in simulated.breaks_in_loops or ("a line",))
    return lines or tuple(f"{each}, whose frame torch does not compile" for each in in_loops)


_in_plain_order = by_strategy("keep", keep())


def _plan_of(
    changed_parameters: frozenset[str],
    gradients: Mapping[Operators, PieceGradients],
    plain: Simulated,
    orders: dict[int, StepOrder],
    run: Simulated,
) -> PiecePlan:
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
        gradients=gradients,
        written=run.largest_bytes,
        changed_parameters=changed_parameters,
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
        self.plain = {
            piece: plain_piece(self._pieces[piece].traced.with_packs().program)
            for piece in dict.fromkeys(run.piece for run in plain.runs)
        }

    def __call__(
        self, piece: int, around: Surroundings, limit_bytes: int, cap_bytes: int
    ) -> tuple[StepOrder, int]:
        traced = self._pieces[piece].traced
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
                _SHORTEST_SEARCH, self._decide.time_limit_seconds / (8 * len(self.plain))
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
    _unseen: set[Operators] = field(default_factory=set)
    _variants: list[Callable[..., Any]] = field(default_factory=list)
    _per_autocast: OnePerAutocast = field(default_factory=OnePerAutocast)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.step.model
        if not torch.is_grad_enabled():
            return self._variants[0](*args, **kwargs)
        state, num_plans, as_drawn = _State(model, self.changed_parameters), 0, False
        while True:
            for index, call in enumerate(self._variants):
                try:
                    outputs = call(*args, **kwargs)
                except Exception as fault:
                    if torch_compat.is_compile_fault(fault):  # whoever asks begins again
                        state.put_back()
                    unplanned = _unplanned(fault)
                    operators, unseen = unplanned.operators, unplanned.unseen
                    del unplanned
                else:
                    self._variants.insert(0, self._variants.pop(index))
                    return outputs
                # Here the fault is gone, whose frames hold all that the forward has computed.
                state.put_back()
                if operators is not None:
                    self._varying.add(operators)
                    self._variants.clear()  # they would compile it for every size
                    break
            is_of_no_use = num_plans > 0 and self.plans[0].way == self.plans[1].way
            # What a step that drops layers runs may be no part of what the fullest one runs.
            as_drawn, is_of_no_use = as_drawn or is_of_no_use, as_drawn and is_of_no_use
            if is_of_no_use and unseen is not None and unseen not in self._unseen:
                self._unseen.add(unseen)
                self._begin_with(self.plans[0])
                continue
            if is_of_no_use or num_plans == _MOST_PLANS_OF_A_CALL:
                raise CaptureError(
                    "the forward goes another way when it runs than on the tensors without memory"
                    f" that it is planned with; it was planned {num_plans} times for one batch. It"
                    f" breaks at {'; '.join(self.plans[0].breaks)}. Take what torch cannot trace"
                    " there out of the forward, or train the model as it is"
                )
            gc.collect()
            self.plan_for(args, kwargs, as_drawn=as_drawn)
            num_plans += 1

    @property
    def changed_parameters(self) -> frozenset[str]:
        """That forwards write to, by name."""
        return frozenset[str]().union(*(plan.changed_parameters for plan in self.plans))

    def plan_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, as_drawn: bool = False
    ) -> None:
        """Plan the step anew, as a call with these arguments has it run."""
        inputs, targets = split_batch(self.step.batch, self.step.loss_fn)
        if args and kwargs:
            raise CaptureError(
                "a batch that makes the forward break elsewhere than planned is planned when it"
                " comes; call the model with positional arguments only, or with keywords only"
            )
        inputs = kwargs or (args[0] if len(args) == 1 else args)
        batch = (inputs, *targets) if targets else inputs
        self.add(replace(self.step, batch=batch), as_drawn=as_drawn)

    def add(self, step: TrainingStep, *, as_drawn: bool = False) -> None:
        """Plan a step, and have the model run so from now on."""
        with self._uncompiled():  # the copy that is planned must not run what is compiled already
            varying = frozenset(self._varying)
            plan = plan_pieces(
                step, self.optimizer, self.decide, self.context, varying, as_drawn=as_drawn
            )
            self.plans.insert(0, plan)
        self._begin_with(plan)

    def _begin_with(self, plan: PiecePlan) -> None:
        with self._uncompiled():
            self._variants.insert(0, self._compiled(plan))
            del self._variants[_MOST_VARIANTS:]

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        model = self.step.model
        current = torch_compat.compiled_call(model)
        uncompile(model)
        try:
            yield
        finally:
            torch_compat.set_compiled_call(model, current)

    def _compiled(self, plan: PiecePlan) -> Callable[..., Any]:
        model, counts = self.step.model, Counter[str]()
        backend = PieceBackend(
            plan.decider(),
            _alone(self.context),
            plan.gradients,
            frozenset({*plan.written, *self._varying}),
            frozenset(self._unseen),
            largest_bytes=plan.written,
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
            if backend.casts_on is not None:
                self._per_autocast.check(backend.casts_on)
            return compiled(*args, **kwargs)

        return call


def _unplanned(fault: Exception) -> Unplanned:
    """About the piece that a call met and its plan does not have; other faults are raised again."""
    inner = torch_compat.compile_fault(fault)
    if not isinstance(inner, Unplanned):
        raise fault
    return inner


_MOST_VARIANTS = 8
_MOST_PLANS_OF_A_CALL = 8


class _State:
    """What a forward that is begun twice must find as it was: random numbers and tensors."""

    def __init__(self, model: nn.Module, changed_parameters: Collection[str]) -> None:
        self._generators, self._buffers = GeneratorStates(), BufferStates(model)
        self._parameters = ParameterStates(model, changed_parameters)

    def put_back(self) -> None:
        self._generators.put_back()
        self._buffers.put_back()
        self._parameters.put_back()


def _alone(context: MemoryContext) -> MemoryContext:
    """Of a piece, without what is beside it."""
    return replace(context, resident_bytes=0, loss=LossMemory(), update_bytes=None)
