"""Prices the operators of a traced step: measured here, or derived for a device elsewhere.

A rank computes with one thread, so its operators are priced with one. On a CPU the clock is that
thread's processor time, so other processes do not distort prices; how ranks share cores is
simulated later (`SharedResources`).

A step with a lot of arithmetic is priced at two smaller batch sizes (`smaller_batches`), and its
prices lie on the line through them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from bayplan import torch_compat
from bayplan.costing.cache import Prices, kept_prices
from bayplan.costing.measure import clock_function, waiting_seconds
from bayplan.costing.operators import OperatorCosts, arguments_of, signature_of_call
from bayplan.costing.roofline import derive_profile
from bayplan.data.device import DeviceKind
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock
from bayplan.data.program import Cost, Op
from bayplan.devices.device import device_of
from bayplan.devices.machine import num_threads
from bayplan.devices.meters import open_meter
from bayplan.step import TrainingStep
from bayplan.tracing.capture import convert, follow_step
from bayplan.tracing.fake import OptimizerSource
from bayplan.tracing.joint import name_of_repeat
from bayplan.tracing.stages.drawing import whole_draw_bytes
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.traced_step import MemoryContext, Price
from bayplan.tracing.tracer import Locator, StepTracer, count_flops

__all__ = [
    "DerivedCosts",
    "RankPrices",
    "StagePrices",
    "derived_prices",
    "free_prices",
    "graph_of",
    "measured_prices",
    "one_thread_prices",
    "prices_by_name",
    "samples_to_price",
    "scaled_prices",
    "seconds_of_nodes",
    "smaller_batches",
    "with_whole_masks",
]


@contextmanager
def measured_prices(
    device: torch.device, *, cache: Path, clock: Clock = Clock.WALL, anew: Prices | None = None
) -> Iterator[OperatorCosts]:
    """Prices by running each distinct operator alone on a device that is here.

    Random numbers go on as if nothing had run, and the memory is given back.

    Args:
        anew: see `kept_prices`.
    """
    own, now = device_of(device), clock_function(clock, device)
    with (
        torch_compat.outside_tracing(),
        own.forked_generators(),
        open_meter(device, cache) as meter,
        kept_prices(cache, device=device, clock=clock, method=meter.method, anew=anew) as known,
    ):
        num_before = len(known)
        yield OperatorCosts(meter, now, known, waiting_seconds(now, device))
        if len(known) > num_before:
            own.empty_cache()


@dataclass(frozen=True)
class DerivedCosts:
    """Prices from a device's description; what a kernel needs for itself is not known there."""

    kind: DeviceKind
    _known: dict[str, Cost] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> Cost:
        assert callable(node.target), "a joint graph calls functions only"
        return self.price(node.target, *arguments_of(node), made=node.meta["val"])

    def price(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, made: Any = None
    ) -> Cost:
        """What one call on fake tensors costs.

        Where no argument is a tensor, what was made tells the fake mode.
        """
        signature = signature_of_call(operator, args, kwargs)
        if signature not in self._known:
            graph = _operators(operator, args, kwargs, _mode_of((args, kwargs, made)))
            profile = None if graph is None else derive_profile(graph, self.kind)
            sums = (
                (0.0, 0.0)
                if profile is None
                else (sum(profile.seconds), sum(profile.spread_seconds))
            )
            self._known[signature] = Cost(sums[0], 0, sums[1])
        return self._known[signature]


RankPrices = OperatorCosts | DerivedCosts  # measured or derived; of nodes and of single calls


@contextmanager
def derived_prices(kind: DeviceKind) -> Iterator[DerivedCosts]:
    yield DerivedCosts(kind)


@contextmanager
def scaled_prices(
    small: Mapping[str, Cost],
    large: Mapping[str, Cost],
    share: float,
    *,
    otherwise: AbstractContextManager[Price],
) -> Iterator[Price]:
    """Prices on the line through those at two smaller batch sizes, by a node's name.

    Args:
        share: how far along the line: 0 is the smaller size, 1 the larger.
        otherwise: prices what is in neither.
    """
    with otherwise as price_alone:

        def price(node: fx.Node) -> Cost:
            if node.name not in small or node.name not in large:
                return Cost.of(price_alone(node))
            low, high = small[node.name], large[node.name]
            seconds, size_bytes, _ = (
                max(0.0, a + share * (b - a)) for a, b in zip(low, high, strict=True)
            )
            # The line is as far off as its ends, in the worst case in opposite directions.
            spread_seconds = abs(1 - share) * low.spread_seconds + abs(share) * high.spread_seconds
            return Cost(seconds, round(size_bytes), spread_seconds)

        yield price


def seconds_of_nodes(
    step: TrainingStep, nodes: Collection[int], costs: RankPrices, *, optimizer: OptimizerSource
) -> float:
    """What some nodes of a captured step take, priced one by one."""
    seconds: list[float] = []

    def look_at(_: int, *call: Any) -> None:
        seconds.append(costs.price(*call)[0])

    follow_step(step, optimizer=optimizer, nodes=nodes, look_at=look_at)
    return sum(seconds)


@contextmanager
def free_prices(_: torch.device) -> Iterator[Price]:
    """No prices, for a step whose plan is made already."""
    yield lambda node: (0.0, 0)


def graph_of(node: fx.Node) -> StepGraph | None:
    """The operators behind one node of a traced step, as a graph of their own; None if none are."""
    assert callable(node.target), "a joint graph calls functions only"
    args, options = arguments_of(node)
    return _operators(node.target, args, options, _mode_of((args, options, node.meta["val"])))


def _mode_of(values: object) -> AbstractContextManager[Any]:
    return torch_compat.fake_mode_of(torch_compat.tree_leaves(values))


def _operators(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    mode: AbstractContextManager[Any],
) -> StepGraph | None:
    """A function may call several operators, so it is watched once on fake tensors."""
    tracer = StepTracer(Locator(nn.Identity()))
    with mode, tracer:
        function(*args, **options)
    return convert(tracer, model="", gradient_storages=[]) if tracer.nodes else None


_PRICED_FLOPS = 3e11  # of all samples; more would take minutes to price
_FEWEST = 2  # samples; one may take other kernels than many


@contextmanager
def one_thread_prices(device: torch.device, *, cache: Path) -> Iterator[OperatorCosts]:
    """Prices as a rank on this device finds them."""
    clock = Clock.CPU if device_of(device).counts_cpu_time else Clock.WALL
    with num_threads(1), measured_prices(device, cache=cache, clock=clock) as costs:
        yield costs


def smaller_batches(flops: float, num_samples: int) -> tuple[int, int] | None:
    """Two batch sizes at which pricing every operator takes a minute at most.

    Prices at the whole batch lie on the line through these two. None where the step itself is
    short enough, or too few samples remain to draw a line.

    Args:
        flops: of the step with all its samples.
        num_samples: the batch size.

    Example:
        >>> smaller_batches(3e12, 100), smaller_batches(1e9, 100), smaller_batches(3e12, 4)
        ((5, 10), None, None)
    """
    if flops <= _PRICED_FLOPS:
        return None
    large = max(2 * _FEWEST, int(num_samples * _PRICED_FLOPS / flops))
    return None if large >= num_samples else (max(_FEWEST, large // 2), large)


def samples_to_price(nodes: Iterable[fx.Node], num_samples: int) -> int:
    """How many of a graph's samples to price it with; see `smaller_batches`."""
    batches = smaller_batches(sum(map(_flops_of, nodes)), num_samples)
    return num_samples if batches is None else batches[1]


def prices_by_name(ops: Iterable[Op]) -> Prices:
    """The prices of operators and of their repeats, to draw lines through: see `scaled_prices`."""
    ops = tuple(ops)
    repeats = ((name_of_repeat(op.name), op.again()) for op in ops)
    return {
        name: Cost(op.seconds, op.workspace_bytes, op.spread_seconds)
        for name, op in (*((op.name, op) for op in ops), *repeats)
    }


def _flops_of(node: fx.Node) -> int:
    if node.op != "call_function" or not hasattr(node.target, "overloadpacket"):
        return 0
    return count_flops(node.target, *arguments_of(node), node.meta["val"])


@contextmanager
def with_whole_masks(
    prices: Callable[[torch.device], AbstractContextManager[Price]],
    num_pieces: float,
    device: torch.device,
) -> Iterator[Price]:
    """Prices of a stage, whose dropout draws for the whole batch and uses its own rows."""
    with prices(device) as price:

        def with_mask(node: fx.Node) -> Cost:
            cost = Cost.of(price(node))
            drawn_bytes = whole_draw_bytes(node, num_pieces)
            return cost._replace(workspace_bytes=max(cost.workspace_bytes, drawn_bytes))

        yield with_mask


@dataclass
class StagePrices:
    """Makes the function that prices a stage's operators.

    Attributes:
        staged: by number of samples, the step.
        num_samples: of the whole batch.
    """

    staged: Callable[[int], StagedStep]
    num_samples: int
    cache: Path
    granularity_bytes: int
    _known: dict[tuple[int, int], Prices] = field(default_factory=dict)

    def context(self, stage: int, num_samples: int) -> MemoryContext:
        """What a stage is traced with, at a number of samples."""

        def prices(device: torch.device) -> AbstractContextManager[Price]:
            here = one_thread_prices(device, cache=self.cache)
            nodes = self.staged(num_samples).graph(stage).joint.graph.nodes
            batches = smaller_batches(sum(map(_flops_of, nodes)), num_samples)
            if batches is None:
                return here
            small, large = batches
            share = (num_samples - small) / (large - small)
            return scaled_prices(
                self._at(stage, small), self._at(stage, large), share, otherwise=here
            )

        masked = partial(with_whole_masks, prices, self.num_samples / num_samples)
        return MemoryContext(prices=masked, granularity_bytes=self.granularity_bytes)

    def _at(self, stage: int, num_samples: int) -> Prices:
        key = (stage, num_samples)
        if key not in self._known:
            staged = self.staged(num_samples)
            context = MemoryContext(
                prices=lambda device: one_thread_prices(device, cache=self.cache),
                granularity_bytes=self.granularity_bytes,
            )
            traced = staged.traced(staged.graph(stage), context)
            self._known[key] = prices_by_name(traced.with_packs().program.ops)
        return self._known[key]
