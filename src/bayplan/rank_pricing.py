"""What the operators of stages cost a rank.

A rank computes with one thread, so its operators are priced with one. On a CPU the clock is the
processor time of that thread: how ranks share cores is the clock's business
(`SharedResources`), and what other processes do while prices are measured is nobody's.

A stage with a lot of arithmetic is priced at two smaller numbers of samples, as a step on one
device is, and its prices lie on the line through them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import fx

from bayplan.capturing.flops import count_flops
from bayplan.data.profile import Clock
from bayplan.planned import Circumstances
from bayplan.pricing import CallPrices, Price, measured_prices, scaled_prices
from bayplan.profiling.signatures import OperatorCosts, arguments_of
from bayplan.running.joint import name_of_repeat
from bayplan.running.stages.drawing import whole_mask_bytes
from bayplan.staged import StagedStep

__all__ = ["RankPrices", "StagePrices", "one_thread_prices", "samples_to_price", "with_whole_masks"]

_PRICED_FLOPS = 3e11  # of all samples; more would take minutes to price
_FEWEST = 2  # samples; one may take other kernels than many

_Prices = dict[str, tuple[float, int]]  # seconds and workspace bytes, by op


class RankPrices(CallPrices, Protocol):
    """Prices of nodes and of single calls."""

    def __call__(self, node: fx.Node) -> tuple[float, int]:
        """Seconds and workspace bytes of one node."""
        ...


@contextmanager
def one_thread_prices(device: torch.device, *, cache: Path) -> Iterator[OperatorCosts]:
    """Prices as a rank on this device finds them."""
    clock = Clock.CPU if device.type == "cpu" else Clock.WALL
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with measured_prices(device, cache=cache, clock=clock) as costs:
            yield costs
    finally:
        torch.set_num_threads(num_threads)


def samples_to_price(nodes: Iterable[fx.Node], num_samples: int) -> int:
    """So many of a graph's samples that pricing its operators takes a minute at most."""
    flops = sum(map(_flops_of, nodes))
    share = min(1.0, _PRICED_FLOPS / flops) if flops else 1.0
    return min(num_samples, max(2 * _FEWEST, int(share * num_samples)))


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

        def with_mask(node: fx.Node) -> tuple[float, int]:
            seconds, workspace_bytes = price(node)
            return seconds, max(workspace_bytes, whole_mask_bytes(node, num_pieces))

        yield with_mask


@dataclass
class StagePrices:
    """Makes the function that prices a stage's operators.

    Attributes:
        staged: by number of samples, the step.
        num_samples: of the whole batch.
        on_stage: hears of each stage before it is priced, and of its samples.
    """

    staged: Callable[[int], StagedStep]
    num_samples: int
    cache: Path
    granularity_bytes: int
    on_stage: Callable[[int, int], None] = lambda stage, num_samples: None
    _known: dict[tuple[int, int], _Prices] = field(default_factory=dict)

    def around(self, stage: int, num_samples: int) -> Circumstances:
        """What a stage is traced with, at a number of samples."""
        self.on_stage(stage, num_samples)

        def prices(device: torch.device) -> AbstractContextManager[Price]:
            here = one_thread_prices(device, cache=self.cache)
            nodes = self.staged(num_samples).graph(stage).joint.graph.nodes
            large = samples_to_price(nodes, num_samples)
            if large >= num_samples:
                return here
            small = max(_FEWEST, large // 2)
            share = (num_samples - small) / (large - small)
            both = self._at(stage, small), self._at(stage, large)
            return scaled_prices(*both, share, otherwise=here)

        masked = partial(with_whole_masks, prices, self.num_samples / num_samples)
        return Circumstances(prices=masked, granularity_bytes=self.granularity_bytes)

    def _at(self, stage: int, num_samples: int) -> _Prices:
        key = (stage, num_samples)
        if key not in self._known:
            staged = self.staged(num_samples)
            around = Circumstances(
                prices=lambda device: one_thread_prices(device, cache=self.cache),
                granularity_bytes=self.granularity_bytes,
            )
            ops = staged.traced(staged.graph(stage), around).with_packs().program.ops
            found = {op.name: (op.seconds, op.workspace_bytes) for op in ops}
            repeats = ((name_of_repeat(op.name), op.again()) for op in ops)
            found |= {name: (op.seconds, op.workspace_bytes) for name, op in repeats}
            self._known[key] = found
        return self._known[key]
