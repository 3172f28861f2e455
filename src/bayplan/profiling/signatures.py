"""What single operators cost, measured alone, each distinct call once.

The whole step cannot be run where it does not fit, so each operator is run by itself on made-up
tensors of its true shapes: a few times warm, the fastest counts. Calls with the same operator,
shapes and other arguments cost the same and are measured once.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from bayplan import torch_private
from bayplan.devices.meters import MemoryMeter

__all__ = ["OperatorCosts", "arguments_of", "made_up", "signature_of", "signature_of_call"]

_REPEATS = 3


@dataclass
class OperatorCosts:
    """Measures operators of traced graphs and remembers them by signature."""

    meter: MemoryMeter
    now: Callable[[], float] = time.perf_counter
    known: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> tuple[float, int]:
        """Seconds and workspace bytes of one node."""
        return self.price(node.target, *arguments_of(node))

    def price(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float, int]:
        """Seconds and workspace bytes of one call, with fake tensors for its arguments."""
        signature = signature_of_call(operator, args, kwargs)
        if signature not in self.known:
            self.known[signature] = self._measure(operator, args, kwargs)
        return self.known[signature]

    def _measure(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float, int]:
        with torch_private.outside_tracing(), torch.no_grad():
            args, kwargs = torch_private.tree_map_only(torch.Tensor, made_up, (args, kwargs))
            operator(*args, **kwargs)  # warm: kernels are chosen and caches filled
            seconds, workspace_bytes = float("inf"), 0
            for _ in range(_REPEATS):
                self.meter.reset_peak()
                before = self.meter.live_bytes
                start = self.now()
                output = operator(*args, **kwargs)
                seconds = min(seconds, self.now() - start)
                grown = self.meter.live_bytes - before
                workspace_bytes = self.meter.peak_bytes - before - max(grown, 0)
                del output
        return seconds, max(0, workspace_bytes)


def arguments_of(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments, with the fake tensors that stand for its sources."""
    return fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])


def signature_of(node: fx.Node) -> str:
    """What a call's cost depends on, the same in every process."""
    return signature_of_call(node.target, *arguments_of(node))


def signature_of_call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The same of a call that is no node."""
    return f"{_described(operator)}{_described((args, kwargs))}"


def _described(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"{thing.dtype}{tuple(thing.shape)}{thing.stride()}"
    if isinstance(thing, list | tuple):
        return "[" + ",".join(_described(part) for part in thing) + "]"
    if isinstance(thing, dict):
        return "{" + ",".join(f"{key}={_described(part)}" for key, part in thing.items()) + "}"
    if inspect.isfunction(thing):  # one of ours; its own text tells where it lies in memory
        return f"{thing.__module__}.{thing.__qualname__}"
    return str(thing)


def made_up(fake: torch.Tensor) -> torch.Tensor:
    """A real tensor of the same geometry: ordinary numbers, and indices that are always valid."""
    numel = fake.untyped_storage().nbytes() // fake.element_size()
    flat = torch.zeros(numel, dtype=fake.dtype, device=fake.device)
    if flat.is_floating_point() and numel:
        flat.normal_().abs_()  # a root of negative numbers takes many times as long
    # By way of the flat one, for an expanded tensor cannot be written to.
    return flat.as_strided(tuple(fake.shape), fake.stride(), fake.storage_offset())
