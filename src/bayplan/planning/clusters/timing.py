"""A split's time by the event clock, also for batches of more micro-batches than are simulated.

In the middle of a long batch every micro-batch is like the one before. So where there are many, two
shorter batches are simulated, and what the longer of them takes more is added for each further one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from bayplan.data.record import Lane
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.split_costs import SplitCosts
from bayplan.planning.pipelines.clock import StepTimes, step_times
from bayplan.simulating.network import Network, Transfer

__all__ = ["Timed", "Times", "simulated_work"]

# GPipe's messages queue up, and a sum that others wait for in a short batch is hidden behind them
# in a long one: the time bends. So there as much as can be had is simulated.
_FILLS_FIRST = "gpipe"
_MOST_IN_FULL = 4000  # micro-batches on devices
_TOGETHER = 4  # micro-batches that may come in pairs or fours, and then not one like the other
_MORE = 16  # micro-batches that the longer of two short batches has more


@dataclass(frozen=True)
class Times:
    """Of a batch, in seconds, by simulated rank.

    Attributes:
        seconds: from batch to batch.
        receive_waits, sum_waits: in which a rank does nothing.
    """

    seconds: float
    compute: tuple[float, ...]
    receive_waits: tuple[float, ...]
    sum_waits: tuple[float, ...]


@dataclass(frozen=True)
class Timed:
    """A split that is timed, maybe several times with other figures.

    Attributes:
        costs: of the split.
        most_micro_batches: that are simulated; None for all.
    """

    costs: SplitCosts
    most_micro_batches: int | None = None

    def times(self, *, compute: float = 1.0, links: float = 1.0) -> Times:
        """With all seconds of one kind multiplied by a factor."""
        if self._shorter is None:
            return _times(self.costs, compute, links)
        short, longer = (_times(one, compute, links) for one in self._shorter)
        count = self.costs.split.num_micro_batches
        further = (count - self._shorter[1].split.num_micro_batches) / _MORE

        def on(before: float, after: float) -> float:
            return after + further * max(0.0, after - before)

        def each(name: str) -> tuple[float, ...]:
            return tuple(map(on, getattr(short, name), getattr(longer, name)))

        return Times(
            on(short.seconds, longer.seconds),
            each("compute"),
            each("receive_waits"),
            each("sum_waits"),
        )

    @cached_property
    def _shorter(self) -> tuple[SplitCosts, SplitCosts] | None:
        """Two batches that stand for a long one."""
        split = self.costs.split
        least = _longer(split, self.most_micro_batches)
        if least is None:
            return None
        size = -(-split.num_samples // split.num_micro_batches)
        short, longer = (
            replace(
                self.costs,
                split=replace(split, num_micro_batches=count, num_samples=count * size),
                _seconds={},
            )
            for count in (least - _MORE, least)
        )
        return short, longer


def _longer(split: Split, most_micro_batches: int | None) -> int | None:
    """The micro-batches of the longer of two batches that stand for one; None if none do."""
    if most_micro_batches is None or any(split.lags):
        return None
    # Until the last stage has work, and back, no micro-batch is like another.
    least = max(most_micro_batches, len(split.stages) + 2 * _MORE)
    if split.schedule == _FILLS_FIRST:
        least = max(least, _MOST_IN_FULL // _num_ranks(split))
    least += (split.num_micro_batches - least) % _TOGETHER
    return least if split.num_micro_batches > least else None


def _num_ranks(split: Split) -> int:
    """That are simulated, where one column stands for all."""
    return sum(split.replicas) // gcd(*split.replicas)


def simulated_work(split: Split, most_micro_batches: int | None) -> int:
    """About how many micro-batches on devices a simulation looks at.

    Example:
        >>> from bayplan.data.plan import Stage
        >>> stage = Stage(first=0, last=0, devices=(0, 1, 2), shares=(1, 1, 1))
        >>> one = Split(stages=(stage,), num_samples=600, num_micro_batches=10)
        >>> simulated_work(one, 32), simulated_work(replace(one, num_micro_batches=200), 32)
        (10, 56)
    """
    num_ranks = _num_ranks(split)
    longer = _longer(split, most_micro_batches)
    if longer is not None:
        return num_ranks * (2 * longer - _MORE)
    num_batches = 2 * max(split.lags) + 4 if any(split.lags) else 1
    return num_ranks * split.num_micro_batches * num_batches


def _times(costs: SplitCosts, compute: float, links: float) -> Times:
    given = costs.costs()
    scaled = replace(
        given,
        seconds=lambda rank, action: compute * costs.seconds(rank, action),
        early=lambda rank, action: {
            bucket: compute * early for bucket, early in costs.early(rank, action).items()
        },
        update_seconds=[compute * one for one in given.update_seconds],
        network=given.network if links == 1.0 else _Scaled(given.network, links),
    )
    found = step_times(costs.pipeline, costs.actions(), scaled, lags=costs.split.lags)
    everyone = costs.pipeline.ranks
    seconds = found.seconds
    if len(everyone) == 1 and len(costs.folded.devices[0]) > 1:
        # Who is alone needs nobody to know the loss; those that it stands for do.
        seconds += scaled.network.reduce(everyone, 0).alone_seconds
    return Times(
        seconds,
        _by_lane(found, Lane.COMPUTE),
        _by_lane(found, Lane.RECEIVE),
        _by_lane(found, Lane.REDUCE),
    )


def _by_lane(found: StepTimes, lane: Lane) -> tuple[float, ...]:
    return tuple(sum(one.seconds for one in own if one.lane is lane) for own in found.events)


@dataclass(frozen=True)
class _Scaled:
    """A network that takes some times as long."""

    network: Network
    factor: float

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        """From one device to another."""
        return self._scaled(self.network.message(sender, receiver, size_bytes))

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        """A sum that all of some devices get."""
        return self._scaled(self.network.reduce(devices, size_bytes))

    def _scaled(self, one: Transfer) -> Transfer:
        return replace(
            one,
            latency_seconds=one.latency_seconds * self.factor,
            seconds=one.seconds * self.factor,
        )
