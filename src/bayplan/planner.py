"""Plans for a question: one, a whole curve of memory against time, and the largest batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from bayplan.api import granularity_of
from bayplan.capturing.step import follow_step
from bayplan.choosing import Within, by_strategy, order_of, pack_variants, planned_bytes
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.graph import Phase, StepGraph
from bayplan.data.limit import Limit
from bayplan.data.order import StepOrder
from bayplan.data.plan import Plan, Request, Stage
from bayplan.data.profile import Clock
from bayplan.devices.machine import cache_directory, device_name
from bayplan.planned import Circumstances, TracedStep, arrangement_of
from bayplan.planning.decisions import decisions_of
from bayplan.planning.moment import peak_moment
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.search import Planned, pareto, smallest_peak
from bayplan.planning.strategies import Strategy, checkpoint, keep, ome, swap
from bayplan.planning.swaps import Arrangement, Tier
from bayplan.pricing import (
    OutsideWatch,
    Price,
    derived_prices,
    measured_prices,
    scaled_prices,
)
from bayplan.profiling.roofline import derive_profile
from bayplan.questions import Question
from bayplan.running.joint import name_of_repeat
from bayplan.running.optimizers import ParameterUpdates
from bayplan.swap_space import SwapSpace
from bayplan.tracing import circumstances_of, outside_nodes, plain_peak_bytes, trace_step
from bayplan.training import TrainingStep

__all__ = ["ASSUMED_TIER", "STRATEGIES", "Planner", "strategy_named"]

Progress = Callable[[str, int, int], None]
_Prices = dict[str, tuple[float, int]]  # seconds and workspace bytes, by op

# A step of more arithmetic than this is priced at two smaller batch sizes, and scaled.
_PRICED_FLOPS = 3e11
_FEWEST = 2  # samples; one may take other kernels than many
_PERCENT = 100  # progress is told in these
# What a host link of that generation moves; used where no tier can be measured.
ASSUMED_TIER = Tier(out_bytes_per_second=12e9, in_bytes_per_second=12e9, latency_seconds=1e-5)
STRATEGIES = ("auto", "keep", "checkpoint", "checkpoint-speed", "swap", "ome")


def strategy_named(name: str, *, tier: Tier | None = None) -> Strategy:
    """One of the reference strategies, with the settings its authors gave it."""
    known: dict[str, Callable[[], Strategy]] = {
        "keep": keep,
        "checkpoint": partial(checkpoint, "memory"),
        "checkpoint-speed": partial(checkpoint, "speed"),
        "swap": partial(swap, tier=tier),
        "ome": partial(ome, tier=tier),
    }
    if name not in known:
        raise UsageError(f"no strategy {name!r}; {did_you_mean(name, STRATEGIES)}")
    return known[name]()


@dataclass
class Planner:
    """A question, traced once, from which any number of plans are made.

    Attributes:
        question: the step and the device.
        space: where activations may be swapped to; None plans no swaps of its own.
        may_pack: whether activations may be packed.
        update_in_backward: whether each parameter is updated as soon as its gradient is complete.
        time_limit_seconds: for the search of one plan.
        clock: for pricing operators here.
        on_progress: hears what is being done.
    """

    question: Question
    space: SwapSpace | None = None
    may_pack: bool = True
    update_in_backward: bool = False
    time_limit_seconds: float = 10.0
    clock: Clock = Clock.WALL
    cache: Path = field(default_factory=cache_directory)
    on_progress: Progress = lambda what, done, total: None

    @cached_property
    def step(self) -> TrainingStep:
        """The step on tensors without memory."""
        return self.question.without_memory()

    @cached_property
    def graph(self) -> StepGraph:
        """The whole step as captured, plain."""
        self.on_progress("capturing", 0, 1)
        return self.question.capture()

    @cached_property
    def granularity_bytes(self) -> int:
        """The rounding of the device's allocator."""
        kind = self.question.device
        if kind is not None:
            return kind.allocation_granularity_bytes
        return granularity_of(next(self.step.model.parameters()).device.type)

    @cached_property
    def plain_peak_bytes(self) -> int:
        """Of the step as it would run without a plan."""
        return plain_peak_bytes(
            self.step,
            self.graph,
            optimizer=self.question.optimizer_source(),
            granularity_bytes=self.granularity_bytes,
            cache=self.cache if self.question.device is None else None,
        )

    @cached_property
    def around(self) -> Circumstances:
        """What counts beside the traced graph."""
        return circumstances_of(
            self.step,
            self.graph,
            prices=self._prices,
            granularity_bytes=self.granularity_bytes,
            updates=self._updates(),
        )

    def _updates(self) -> ParameterUpdates | None:
        if not self.update_in_backward:
            return None
        source = self.question.optimizer_source()
        if source is None:
            raise UsageError("--update-in-backward needs an optimizer; --optimizer is none")
        model = self.step.model
        return ParameterUpdates.of(model, source(p for p in model.parameters() if p.requires_grad))

    @cached_property
    def traced(self) -> TracedStep:
        """The graph that plans are made for."""
        self.on_progress("tracing", 0, 1)
        return trace_step(self.step, self.around)

    def _prices(self, device: torch.device) -> AbstractContextManager[Price]:
        if self.question.device is not None:
            return derived_prices(self.question.device)
        here = measured_prices(device, cache=self.cache, clock=self.clock)
        return here if self._smaller is None else scaled_prices(*self._smaller, otherwise=here)

    @cached_property
    def _smaller(self) -> tuple[_Prices, _Prices, float] | None:
        """Prices at two small batch sizes, for a step that is too long to be priced as it is."""
        samples = self.question.samples
        flops = sum(node.flops for node in self.graph.nodes)
        if samples is None or flops <= _PRICED_FLOPS or not self.question.target.takes_batch_size:
            return None
        large = max(2 * _FEWEST, int(samples * _PRICED_FLOPS / flops))
        small = max(_FEWEST, large // 2)
        if large >= samples:
            return None
        share = (samples - small) / (large - small)
        return self._prices_at(small), self._prices_at(large), share

    def _prices_at(self, batch: int) -> _Prices:
        traced = replace(self, question=self.question.at(batch)).traced
        every = tuple(pack.name for pack in traced.packs) if self.may_pack else ()
        ops = (*traced.with_packs().program.ops, *traced.with_packs(every).program.ops)
        prices = {op.name: (op.seconds, op.workspace_bytes) for op in ops}
        repeats = ((name_of_repeat(op.name), op.again()) for op in ops)
        return prices | {name: (op.seconds, op.workspace_bytes) for name, op in repeats}

    @cached_property
    def outside_seconds(self) -> float:
        """What loss and update take, which are the same with every plan."""
        nodes = outside_nodes(self.graph)
        kind = self.question.device
        if kind is not None:
            profile = derive_profile(self.graph, kind)
            return sum(profile.seconds[index] for index in nodes)
        device = next(self.step.model.parameters()).device
        with measured_prices(device, cache=self.cache, clock=self.clock) as costs:
            watch = OutsideWatch(nodes, costs)
            source = self.question.optimizer_source()
            follow_step(self.step, optimizer=source, watcher=watch)
        return watch.seconds

    @property
    def tier(self) -> Tier | None:
        """How fast swapped activations move, if they may."""
        return None if self.space is None else self.space.tier

    def order(self, limit: Limit, *, strategy: str = "auto") -> StepOrder:
        """Decide one plan.

        Raises:
            DoesNotFit: says what binds and the smallest limit that works.
        """
        if strategy != "auto":
            tier = self.tier or ASSUMED_TIER
            chosen = strategy_named(strategy, tier=tier)
            decide = by_strategy(
                strategy, chosen, plain_peak_bytes=self.plain_peak_bytes, tier=tier
            )
            return decide(self.traced)
        within = Within(
            limit,
            cache=self.cache,
            time_limit_seconds=self.time_limit_seconds,
            plain_peak_bytes=self.plain_peak_bytes,
            tier=self.tier,
            may_pack=self.may_pack,
            on_progress=lambda share: self.on_progress("planning", int(share * _PERCENT), _PERCENT),
        )
        return within(self.traced)

    def curve(
        self,
        limits_bytes: list[int],
        *,
        time_limit_seconds: float,
        starts: Mapping[tuple[str, ...], Planned] | None = None,
    ) -> Iterator[tuple[int, StepOrder]]:
        """Memory against time, as plans are found; a limit comes again when a faster one is.

        More memory is never slower. Recomputation and packing only: swaps depend on the moment.

        Args:
            limits_bytes: in any order.
            time_limit_seconds: for all limits together.
            starts: by `smallest`, so that no limit they fit is left without a plan.
        """
        starts, variants = starts or {}, self._variants
        best: dict[int, StepOrder] = {}
        plain = self.traced.with_packs().program
        plain_seconds = plain.plain_seconds
        plain_bytes = replay_schedule(plain, plain_schedule(plain)).peak_bytes
        limit_of = {
            limit_bytes if plain_bytes <= limit_bytes else planned_bytes(limit_bytes): limit_bytes
            for limit_bytes in limits_bytes
        }
        for number, packs in enumerate(variants):
            program = self.traced.with_packs(packs).program
            seconds = time_limit_seconds / len(variants)
            found = pareto(
                program,
                limit_of,
                time_limit_seconds=seconds,
                starts=[starts[packs].schedule] if packs in starts else [],
                cache_dir=self.cache,
            )
            for within_bytes, planned in found:
                limit_bytes = limit_of[within_bytes]
                self.on_progress("planning the curve", number, len(variants))
                known = best.get(limit_bytes)
                if known is not None and known.seconds <= planned.seconds:
                    continue
                best[limit_bytes] = order_of(
                    program,
                    Arrangement(planned.schedule),
                    strategy="auto",
                    packs=packs,
                    limit_bytes=limit_bytes,
                    plain_peak_bytes=self.plain_peak_bytes,
                    plain_seconds=plain_seconds,
                )
                yield limit_bytes, best[limit_bytes]

    def smallest(self, *, time_limit_seconds: float) -> dict[tuple[str, ...], Planned]:
        """The smallest peak found by recomputation, with nothing packed and with packs."""
        return {
            packs: smallest_peak(
                self.traced.with_packs(packs).program,
                time_limit_seconds=time_limit_seconds / len(self._variants),
                cache_dir=self.cache,
            )
            for packs in self._variants
        }

    @property
    def _variants(self) -> list[tuple[str, ...]]:
        """Nothing packed, what is worth it, and everything."""
        return pack_variants(self.traced) if self.may_pack else [()]

    def plan(self, order: StepOrder, *, limit: Limit | None = None) -> Plan:
        """A decided order as the file that `run` obeys."""
        program = self.traced.with_packs(order.packs).program
        question = self.question
        num_forward = sum(node.phase is Phase.FORWARD for node in self.graph.nodes)
        device = question.device.name if question.device else device_name(torch.device("cpu"))
        return Plan(
            model=self.graph.model,
            graph_fingerprint=self.graph.fingerprint,
            cluster_fingerprint=device,
            torch_version=str(torch.__version__),
            limit_bytes=None if limit is None else limit.of(self.plain_peak_bytes),
            stages=(
                Stage(first=0, last=num_forward - 1, devices=(0,), shares=(question.samples or 1,)),
            ),
            request=Request(
                target=question.target.name,
                batch=question.batch,
                optimizer=question.optimizer,
                autocast=question.autocast,
                memory="" if limit is None else str(limit),
                update_in_backward=self.update_in_backward,
            ),
            order=order,
            decisions=decisions_of(program, order),
            peak_moment=peak_moment(arrangement_of(order).apply(program)),
            actions=(("0F0", "0B0", "0U0"),),
            predicted_peak_bytes=(order.peak_bytes,),
            predicted_seconds=order.seconds + self.outside_seconds,
            gap=order.gap,
        )
