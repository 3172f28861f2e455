"""Replicas that do the same at the same time, simulated once.

Where every stage's replicas have equal shares, a pipeline of 512, 512 and 1024 devices is 512
columns of 1, 1 and 2 devices that never speak to each other until their gradients are summed up:

    stage 0    0  1  2  3          four columns, of which the first stands for all; a message of it
    stage 1    4  5  6  7          takes as long as all four columns' messages take at once
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from bayplan.data.plan import Stage
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.simulating.network import Network, Transfer

__all__ = ["Folded", "FoldedNetwork", "FoldedPipeline", "fold"]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A pipeline's devices, numbered from 0 without a gap.

    Attributes:
        stages: of these numbers.
        devices: by number, the devices that it stands for; the first of them is itself.
        num_columns: that the first one stands for.
    """

    stages: tuple[Stage, ...]
    devices: tuple[tuple[int, ...], ...]
    num_columns: int = 1


def fold(stages: Sequence[Stage], *, is_alike: bool) -> Folded:
    """Number the devices of stages, and leave out those that others stand for.

    Args:
        stages: of a split.
        is_alike: whether the replicas of each stage are of one kind and have equal shares.

    Example:
        >>> stages = [Stage(first=0, last=0, devices=(4, 5, 6, 7), shares=(1, 1, 1, 1)),
        ...     Stage(first=1, last=1, devices=(0, 1), shares=(1, 1))]
        >>> fold(stages, is_alike=True).devices
        ((4, 6), (5, 7), (0, 1))
    """
    num_columns = gcd(*(len(stage.devices) for stage in stages)) if is_alike else 1
    found: list[Stage] = []
    devices: list[tuple[int, ...]] = []
    for stage in stages:
        width = len(stage.devices) // num_columns
        own = tuple(range(len(devices), len(devices) + width))
        devices += [stage.devices[at::width] for at in range(width)]
        found.append(
            Stage(first=stage.first, last=stage.last, devices=own, shares=stage.shares[:width])
        )
    return Folded(stages=tuple(found), devices=tuple(devices), num_columns=num_columns)


@dataclass(frozen=True)
class FoldedPipeline(Pipeline):
    """A pipeline where a rank may stand for several, and so has somebody to sum up with."""

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The ranks that reduce each bucket together; also one alone."""
        found: dict[int, set[int]] = defaultdict(set)
        for stage, buckets in zip(self.stages, self.buckets, strict=True):
            for bucket in buckets:
                found[bucket].update(stage.devices)
        return {bucket: tuple(sorted(ranks)) for bucket, ranks in found.items()}


@dataclass(frozen=True)
class FoldedNetwork:
    """A network as those see it that stand for others.

    A message takes as long as the slowest of those that it stands for, all sent at once.

    Attributes:
        network: of all devices.
        folded: who stands for whom.
    """

    network: Network
    folded: Folded
    _known: dict[object, Transfer] = field(default_factory=dict)

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        """From one device to another."""
        key = (sender, receiver, size_bytes)
        if key not in self._known:
            self._known[key] = self._message(sender, receiver, size_bytes)
        return self._known[key]

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        """A sum that all of some devices get, and those that they stand for."""
        key = (tuple(devices), size_bytes)
        if key not in self._known:
            everyone = sorted(real for one in devices for real in self.folded.devices[one])
            self._known[key] = self.network.reduce(everyone, size_bytes)
        return self._known[key]

    def _message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        at_once = [
            self.network.message(one, other, size_bytes)
            for one, other in zip(
                self.folded.devices[sender], self.folded.devices[receiver], strict=True
            )
        ]
        if len(at_once) == 1:
            return at_once[0]
        users = Counter(wire for one in at_once for wire in one.wires)

        def seconds(one: Transfer) -> float:
            return one.seconds * max((users[wire] for wire in one.wires), default=1)

        slowest = max(at_once, key=lambda one: one.latency_seconds + seconds(one))
        # That other columns use its wires is in the seconds; other messages of this one share them.
        return Transfer(
            latency_seconds=slowest.latency_seconds,
            seconds=seconds(slowest),
            wires=slowest.wires,
        )
