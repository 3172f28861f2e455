"""Prices of operators where they stand: a planned step runs a few times, with a clock in it.

An operator alone finds its tensors in the processor's caches; in a step it mostly does not, and
takes up to a third longer. So before a model is trained as planned, a first plan is made by prices
of operators alone, that plan is run, and plans are ranked anew by what its operators took.

1. What runs are the plan's two graphs, below autograd, on the tensors that the model is called with
   and on a made-up gradient. Parameters and gradients are left alone; what forward changes is
   changed on copies, and random numbers go on as if nothing had run.
2. A plan that fits is run, never the step that keeps everything. What plain training would take is
   the sum of what each operator took at first, with memory of its own where there is room for it.
3. Nothing runs where that could do more than take time: with updates in the graph, with swaps, and
   in a group of processes, where others would have to run along.
"""

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import structs
from torch import distributed as dist

from bayplan import torch_compat
from bayplan.costing.cache import Prices
from bayplan.costing.measure import clock_function, waiting_seconds
from bayplan.costing.operators import arguments_of, made_up, signature_of_call
from bayplan.data import files
from bayplan.data.errors import DoesNotFit, FileFault
from bayplan.data.plan import StepOrder
from bayplan.data.profile import Clock
from bayplan.data.program import Cost, Program
from bayplan.devices.device import HOST, device_of
from bayplan.devices.machine import machine_key
from bayplan.planning.memory.orders import FastestWithin, repriced_order
from bayplan.planning.memory.reserved import WithinReserved
from bayplan.rewriting.repeats import CHANGED
from bayplan.running.backend import ordered_step, steps_of
from bayplan.running.executor import compile_graph
from bayplan.running.partition import cut
from bayplan.simulating.swaps import Swapped
from bayplan.tracing.joint import name_of_repeat
from bayplan.tracing.tangents import OutputGradient
from bayplan.tracing.traced_step import TracedStep

__all__ = [
    "Decided",
    "RankedInStep",
    "StepPrices",
    "StepRuns",
    "StepSeconds",
    "clock_of",
    "kept",
    "try_step",
]

_ROUNDS = 5
_SHORT_SECONDS, _LONG_SECONDS = 0.2, 5.0  # a step that takes less runs often; one of more never
_FIRST_SHARE = 0.25  # of the time to search: for the plan that is run


class StepPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operators of a step took while a plan ran; a file of the cache.

    Attributes:
        prices: by an operator's name, and by that of its repeat where it was repeated.
        others: of operators that were not run: by what their prices alone are multiplied.
    """

    schema: str = "bayplan/step-prices"
    version: int = 1
    prices: Prices
    others: float

    def repriced(self, program: Program) -> Program:
        """A program with these prices."""

        def op(op: Any) -> Any:
            if op.is_callers:
                return op
            price, again = self.prices.get(op.name), self.prices.get(name_of_repeat(op.name))
            factor = self.others
            if price is not None and op.seconds:
                factor = price.seconds / op.seconds
            repeat = op.repeat_seconds
            return structs.replace(
                op,
                seconds=op.seconds * factor if price is None else price.seconds,
                spread_seconds=(
                    op.spread_seconds * factor if price is None else price.spread_seconds
                ),
                repeat_seconds=(
                    again.seconds if again else None if repeat is None else repeat * factor
                ),
            )

        return structs.replace(program, ops=tuple(map(op, program.ops)))


@dataclass(frozen=True)
class Decided:
    """An order that was decided on by prices of the running step, in a traced step."""

    traced: TracedStep
    order: StepOrder

    @property
    def key(self) -> str:
        """What its seconds are kept under."""
        return _key(self.traced, self.order)

    def runs(self) -> "StepRuns":
        return StepRuns(self.traced, self.order)


@dataclass
class RankedInStep:
    """Decides as another, by prices of the running step.

    Attributes:
        decide: finds the fastest order by the prices that it is given.
        cache: where measurements are kept.
        again: measures even what is kept.
        is_on: whether steps may be run now.
        decided: the last order that was decided on by prices of the running step.
        took_kept: whether the last order was a kept one.
    """

    decide: FastestWithin | WithinReserved
    cache: Path
    again: bool = False
    is_on: bool = True
    decided: Decided | None = None
    took_kept: bool = field(default=False, init=False)

    def __call__(self, traced: TracedStep) -> StepOrder:
        """Decide for one traced step.

        Raises:
            DoesNotFit: as `decide`.
        """
        if not self.is_on or not _can_run(traced):
            return self._alone(traced)
        try:
            first = _within(self.decide, _FIRST_SHARE)(traced)
        except DoesNotFit:  # a longer search may find a plan
            first = self.decide(traced)
        program = traced.with_packs().program
        keeps_all = not first.packs and len(first.schedule) == len(program.ops)
        prices = None if keeps_all else self._measured(traced, first)
        if prices is None:
            return first if keeps_all else self._alone(traced)
        traced.reprice(prices.repriced)
        order = repriced_order(traced, first)
        with suppress(DoesNotFit):
            rest = _within(self.decide, 1 - _FIRST_SHARE)
            order = min(order, rest(traced), key=lambda order: order.seconds)
            self.took_kept = rest.took_kept
        self.decided = Decided(traced, order)
        return order

    def _alone(self, traced: TracedStep) -> StepOrder:
        order = self.decide(traced)
        self.took_kept = self.decide.took_kept
        return order

    def _measured(self, traced: TracedStep, order: StepOrder) -> StepPrices | None:
        """What the operators of an order take in the running step; None if it cannot be run."""
        if order.swaps or order.seconds > _LONG_SECONDS:
            return None
        return kept(
            self.cache / "steps" / f"{_key(traced, order)}.json",
            StepPrices,
            lambda: _prices_of(traced, order),
            again=self.again,
        )


_Noun = TypeVar("_Noun", bound=msgspec.Struct)


def kept(
    path: Path, noun: type[_Noun], measure: Callable[[], _Noun | None], *, again: bool
) -> _Noun | None:
    """What the cache has, or what is measured now, and kept if there is something."""
    if not again and path.exists():
        with suppress(FileFault, OSError):
            return files.read(path, noun)
    found = measure()
    if found is not None:
        with suppress(FileFault):
            files.write(path, found)
    return found


def _prices_of(traced: TracedStep, order: StepOrder) -> StepPrices | None:
    try:
        return StepRuns(traced, order).prices()
    except Exception:  # a made-up gradient that a kernel minds; prices alone are there
        return None


def _within(decide: FastestWithin | WithinReserved, share: float) -> FastestWithin | WithinReserved:
    """The same with a share of the time to search."""
    if isinstance(decide, WithinReserved):
        within = _within(decide.within, share)
        assert isinstance(within, FastestWithin), "of live bytes"
        return replace(decide, within=within)
    return replace(decide, time_limit_seconds=share * decide.time_limit_seconds)


def _can_run(traced: TracedStep) -> bool:
    if traced.context.updates is not None:
        return False
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return False
    places = traced.joint.graph.find_nodes(op="placeholder")
    wanted = [node.meta["val"] for node in places if not torch_compat.is_tangent(node)]
    return len(wanted) == len(traced.inputs) and all(map(_is_same, traced.inputs, wanted))


def _is_same(given: Any, wanted: Any) -> bool:
    """Whether a real tensor is as a traced one."""
    if type(given) not in (torch.Tensor, torch.nn.Parameter) or given.is_meta:
        return False
    return isinstance(wanted, torch.Tensor) and (given.shape, given.stride(), given.dtype) == (
        wanted.shape,
        wanted.stride(),
        wanted.dtype,
    )


def _key(traced: TracedStep, order: StepOrder) -> str:
    step = traced.with_packs(order.packs)
    nodes = (node for node in step.op_nodes if node is not None)
    calls = [signature_of_call(node.target, *arguments_of(node)) for node in nodes]
    parts = (step.program.fingerprint, order.schedule, calls, machine_key())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a planned step takes and what a plain one would, forward and backward; in the cache."""

    schema: str = "bayplan/step-seconds"
    version: int = 1
    planned: float
    plain: float
    ratio_spread: float


_ANY_GRADIENT = OutputGradient((), is_used=True)


def try_step(
    run: Callable[..., Any],
    args: Sequence[Any],
    changed: Sequence[int],
    gradients: Mapping[int, OutputGradient],
) -> float | None:
    """Seconds of a planned forward and backward, as torch runs them; None if they are not run.

    Args:
        run: the graph's function, of `args`.
        changed: positions of the arguments that forward changes.
        gradients: that its outputs get, by position, where that is known.
    """
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if any(map(torch_compat.has_gradient_hooks, tensors)):  # they would be called
        return None
    trained = [each for each in tensors if each.requires_grad]
    device = next((each.device for each in tensors), HOST.where)
    now = clock_of(device)
    with device_of(device).forked_generators(), torch.enable_grad():
        given = [each.clone() if index in changed else each for index, each in enumerate(args)]
        begun = now()
        outputs = run(*given)
        forward = now() - begun
        asked = [
            (output, gradients.get(position, _ANY_GRADIENT))
            for position, output in enumerate(outputs)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        pairs = [(each, how.made_up(each)) for each, how in asked if how.is_used]
        del outputs, asked
        begun = now()
        ends, made = zip(*pairs, strict=True)
        torch.autograd.grad(ends, trained, made, allow_unused=True)
        return forward + now() - begun


def clock_of(device: torch.device) -> Callable[[], float]:
    """Of one thread its processor time, where that can be; else the time, once a device is done."""
    is_alone = device_of(device).counts_cpu_time and torch.get_num_threads() == 1
    return clock_function(Clock.CPU if is_alone else Clock.WALL, device)


@dataclass
class StepRuns:
    """Runs an order's two graphs, with a clock between the operators or without one."""

    traced: TracedStep
    order: StepOrder

    def __post_init__(self) -> None:
        self.device = next(
            (each.device for each in self.traced.inputs if device_of(each.device).is_accelerator),
            self.traced.inputs[0].device,
        )
        self.now = clock_of(self.device)
        self.step, swapped = ordered_step(self.order, self.traced)
        self.program = self.step.program
        self.marks: list[tuple[tuple[int, ...], float]] = []
        self.ends: list[float] = []  # when forward and backward began and ended
        self.timed, self.as_it_is = (
            self._halves(swapped, is_timed=is_timed) for is_timed in (True, False)
        )

    def _halves(self, swapped: Swapped, *, is_timed: bool) -> list[Callable[[list[Any]], Any]]:
        halves = cut(
            self.step,
            steps_of(swapped, self.step, is_plain=is_timed),
            num_forward=swapped.program.first_backward,
            owner=self.traced.joint,
        )
        forward, backward = (half.graph.find_nodes(op="placeholder") for half in halves)
        self.is_changed = [bool(node.meta.get(CHANGED)) for node in forward]
        self.tangents = [node for node in backward if torch_compat.is_tangent(node)]
        return [compile_graph(half, self._mark if is_timed else None) for half in halves]

    def _mark(self, ops: tuple[int, ...]) -> None:
        self.marks.append((ops, self.now()))

    @contextmanager
    def _as_torch_runs(self) -> Iterator[None]:
        with (
            torch_compat.outside_tracing(),
            torch.no_grad(),
            torch.autocast(self.device.type, enabled=False),
            device_of(self.device).forked_generators(),
        ):
            yield

    def plain_seconds(self) -> tuple[float, float]:
        """What forward and backward of a plain step take: each operator once, in one more run."""
        with self._as_torch_runs():
            taken, clock = self._timed(), self._clock_seconds()
        sums = [0.0, 0.0]
        for (ops, count), seconds in taken.items():
            if count == 0:
                sums[ops[0] >= self.program.first_backward] += max(0.0, seconds - clock)
        return sums[0], sums[1]

    def prices(self) -> StepPrices:
        own = device_of(self.device)
        with self._as_torch_runs():
            self._timed()  # warms it
            begun, _, _, ended = self.ends
            rounds = _ROUNDS if ended - begun < _SHORT_SECONDS else 2
            taken = [self._timed() for _ in range(rounds)]
            clock = self._clock_seconds()
            whole = 0.0
            if own.is_accelerator:
                self._run(self.as_it_is)
                whole = self.ends[1] - self.ends[0] + self.ends[3] - self.ends[2]
            own.empty_cache()
        return self._summed(whole, taken, clock)

    def _run(self, halves: Sequence[Callable[[list[Any]], list[Any]]]) -> None:
        forward, backward = halves
        given = [
            each.clone() if is_changed else each
            for each, is_changed in zip(self.traced.inputs, self.is_changed, strict=True)
        ]
        self.marks.clear()
        begun = self.now()
        outputs = forward(given)
        self.ends = [begun, self.now()]
        made = [made_up(node.meta["val"]) for node in self.tangents]
        given = [*outputs[len(self.step.forward_outputs) :], *made]
        del outputs, made
        self.ends.append(self.now())
        backward(given)
        self.ends.append(self.now())

    def _timed(self) -> dict[tuple[tuple[int, ...], int], float]:
        """By the ops of each call and how often they ran before: what it took."""
        self._run(self.timed)
        begun, _, backward, _ = self.ends
        seconds: dict[tuple[tuple[int, ...], int], float] = {}
        counts: dict[tuple[int, ...], int] = defaultdict(int)
        before = begun
        for ops, at in self.marks:
            if before < backward <= at:
                before = backward
            seconds[ops, counts[ops[:1]]] = at - before
            counts[ops[:1]] += 1
            before = at
        return seconds

    def _clock_seconds(self) -> float:
        """What reading the clock takes, and on an accelerator waiting for it."""
        waiting = waiting_seconds(self.now, self.device)
        gaps = []
        for _ in range(50):
            self.marks.clear()
            self._mark(())
            self._mark(())
            gaps.append(self.marks[1][1] - self.marks[0][1])
        return max(waiting, statistics.median(gaps))

    def _summed(
        self,
        whole: float,
        taken: Sequence[dict[tuple[tuple[int, ...], int], float]],
        clock: float,
    ) -> StepPrices:
        ops = self.program.ops
        columns: dict[str, list[list[float]]] = defaultdict(list)  # by name, runs by round
        for key in taken[0]:
            (calls, count) = key
            column = [max(0.0, each[key] - clock) for each in taken]
            alone = sum(ops[index].seconds for index in calls)
            for index in calls:
                share = ops[index].seconds / alone if alone else 1 / len(calls)
                name = ops[index].name if count == 0 else name_of_repeat(ops[index].name)
                columns[name].append([seconds * share for seconds in column])
        scale = 1.0
        if device_of(self.device).is_accelerator:  # waited for, operators do not overlap
            every = sum(sum(column) for name in columns for column in columns[name])
            scale = min(1.0, whole * len(taken) / max(every, 1e-12))
        prices = {}
        for name, runs in columns.items():
            middle = [statistics.median(run) for run in runs]
            spread = max(m - min(run) for m, run in zip(middle, runs, strict=True))
            prices[name] = Cost(statistics.median(middle) * scale, 0, spread * scale)
        known = [op for op in ops if op.name in prices and op.seconds]
        alone = sum(op.seconds for op in known)
        others = sum(prices[op.name].seconds for op in known) / alone if alone else 1.0
        return StepPrices(prices=prices, others=others)
