"""What the operators of a traced step cost: measured here, or derived for a device elsewhere."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx, nn

from bayplan import torch_private
from bayplan.capturing.convert import convert
from bayplan.capturing.locate import Locator
from bayplan.capturing.tracer import StepTracer
from bayplan.data.device import DeviceKind
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock
from bayplan.devices.meters import open_meter
from bayplan.profiling.measure import clock_function
from bayplan.profiling.operator_cache import kept_prices
from bayplan.profiling.roofline import derive_profile
from bayplan.profiling.signatures import OperatorCosts, arguments_of, signature_of_call
from bayplan.profiling.watching import NodeWatch

__all__ = [
    "CallPrices",
    "DerivedCosts",
    "OutsideWatch",
    "Price",
    "derived_prices",
    "free_prices",
    "graph_of",
    "measured_prices",
    "scaled_prices",
]

Price = Callable[[fx.Node], tuple[float, int]]  # seconds and workspace bytes


@contextmanager
def measured_prices(
    device: torch.device, *, cache: Path, clock: Clock = Clock.WALL
) -> Iterator[OperatorCosts]:
    """Prices by running each distinct operator alone on a device that is here."""
    with (
        torch_private.outside_tracing(),
        open_meter(device, cache) as meter,
        kept_prices(cache, device=device, clock=clock, method=meter.method) as known,
    ):
        yield OperatorCosts(meter, clock_function(clock, device), known)


class CallPrices(Protocol):
    """Prices of single calls: measured (`OperatorCosts`) or derived (`DerivedCosts`)."""

    def price(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float, int]:
        """Seconds and workspace bytes of one call, with fake tensors for its arguments."""
        ...


@dataclass(frozen=True)
class DerivedCosts:
    """Prices from a device's description; what a kernel needs for itself is not known there."""

    kind: DeviceKind
    _known: dict[str, float] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> tuple[float, int]:
        """Seconds and workspace bytes of one node."""
        assert callable(node.target), "a joint graph calls functions only"
        return self._price(node.target, *arguments_of(node), made=node.meta["val"])

    def price(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float, int]:
        """Seconds and workspace bytes of one call, with fake tensors for its arguments."""
        return self._price(operator, args, kwargs, made=None)

    def _price(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, made: Any
    ) -> tuple[float, int]:
        """The same; what was made tells the fake mode of a call without tensors."""
        signature = signature_of_call(operator, args, kwargs)
        if signature not in self._known:
            graph = _operators(operator, args, kwargs, _mode_of((args, kwargs, made)))
            seconds = 0.0 if graph is None else sum(derive_profile(graph, self.kind).seconds)
            self._known[signature] = seconds
        return self._known[signature], 0


@contextmanager
def derived_prices(kind: DeviceKind) -> Iterator[DerivedCosts]:
    """The same, as prices that are measured are opened."""
    yield DerivedCosts(kind)


@contextmanager
def scaled_prices(
    small: Mapping[str, tuple[float, int]],
    large: Mapping[str, tuple[float, int]],
    share: float,
    *,
    otherwise: AbstractContextManager[Price],
) -> Iterator[Price]:
    """Prices on the line through those at two smaller batch sizes, by a node's name.

    Args:
        small: prices at the smaller size.
        large: at the larger.
        share: how far along the line: 0 is the smaller size, 1 the larger.
        otherwise: prices what is in neither.
    """
    with otherwise as price_alone:

        def price(node: fx.Node) -> tuple[float, int]:
            if node.name not in small or node.name not in large:
                return price_alone(node)
            low, high = small[node.name], large[node.name]
            seconds = low[0] + share * (high[0] - low[0])
            return max(0.0, seconds), max(0, round(low[1] + share * (high[1] - low[1])))

        yield price


class OutsideWatch(NodeWatch):
    """Follows a step on fake tensors and prices some of its nodes here.

    Attributes:
        seconds: of all chosen nodes met so far.
    """

    def __init__(self, nodes: Collection[int], costs: CallPrices) -> None:
        super().__init__(nodes)
        self.seconds = 0.0
        self._costs = costs

    def look_at(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the price of one."""
        self.seconds += self._costs.price(func, args, kwargs)[0]


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
    return torch_private.fake_mode_of(torch_private.tree_leaves(values))


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
