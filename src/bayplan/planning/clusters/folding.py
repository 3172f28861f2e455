"""Replicas that do the same at the same time, simulated once.

Where every stage's replicas have equal shares, a pipeline of 512, 512 and 1024 devices is 512
columns of 1, 1 and 2 devices that never speak to each other until their gradients are summed up:

    stage 0    0  1  2  3          columns 0 to 3, of which two stand for all; their messages take
    stage 1    4  5  6  7          as long as all columns' messages take at once

Two and not one, for a sum needs somebody to sum with.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

from bayplan.data.plan import Stage
from bayplan.simulating.network import Network, Transfer

__all__ = ["Folded", "FoldedNetwork", "fold"]

_STANDING = 2  # columns that stand for all


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A pipeline's devices, numbered from 0 without a gap.

    Attributes:
        stages: of these numbers.
        devices: by number, the devices that it stands for; the first of them is itself.
        num_columns: in which all is the same, and how many of them are left.
    """

    stages: tuple[Stage, ...]
    devices: tuple[tuple[int, ...], ...]
    num_columns: int = 1
    num_standing: int = 1


def fold(stages: Sequence[Stage], *, is_alike: bool) -> Folded:
    """Number the devices of stages, and leave out those that others stand for.

    Args:
        stages: of a split.
        is_alike: whether the replicas of each stage are of one kind and have equal shares.
    """
    num_columns = gcd(*(len(stage.devices) for stage in stages)) if is_alike else 1
    if num_columns <= _STANDING:
        num_columns, num_standing = 1, 1
    else:
        num_standing = _STANDING
    found: list[Stage] = []
    devices: list[tuple[int, ...]] = []
    for stage in stages:
        width = len(stage.devices) // num_columns
        own = range(len(devices), len(devices) + width * num_standing)
        for column in range(num_standing):
            devices += [
                tuple(
                    stage.devices[(column + more) % num_columns * width + at]
                    for more in range(num_columns)
                )
                for at in range(width)
            ]
        found.append(
            Stage(
                first=stage.first,
                last=stage.last,
                devices=tuple(own),
                shares=stage.shares[: len(own)],
            )
        )
    return Folded(
        stages=tuple(found),
        devices=tuple(devices),
        num_columns=num_columns,
        num_standing=num_standing,
    )


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
        """A sum that all of some devices get."""
        key = (tuple(devices), size_bytes)
        if key not in self._known:
            everyone = sorted({real for one in devices for real in self.folded.devices[one]})
            whole = self.network.reduce(everyone, size_bytes)
            if self.folded.num_columns == 1:
                return self._known.setdefault(key, whole)
            wires = tuple(
                self._named(wire, column)
                for wire in whole.wires
                for column in range(self.folded.num_standing)
            )
            self._known[key] = Transfer(
                latency_seconds=whole.latency_seconds, seconds=whole.seconds, wires=wires
            )
        return self._known[key]

    def _message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        senders, receivers = self.folded.devices[sender], self.folded.devices[receiver]
        at_once = [
            self.network.message(one, other, size_bytes)
            for one, other in zip(senders, receivers, strict=True)
        ]
        if self.folded.num_columns == 1:
            return at_once[0]
        users = Counter(wire for one in at_once for wire in one.wires)

        def seconds(one: Transfer) -> float:
            return one.seconds * max((users[wire] for wire in one.wires), default=1)

        slowest = max(at_once, key=lambda one: one.latency_seconds + seconds(one))
        column = self._column(sender)
        return Transfer(
            latency_seconds=slowest.latency_seconds,
            seconds=seconds(slowest),
            wires=tuple(self._named(wire, column) for wire in slowest.wires),
        )

    def _column(self, device: int) -> int:
        stage = next(one for one in self.folded.stages if device in one.devices)
        width = len(stage.devices) // self.folded.num_standing
        return stage.devices.index(device) // width

    def _named(self, wire: str, column: int) -> str:
        """A wire as a column has it to itself: that others use it is in the seconds."""
        return wire if self.folded.num_standing == 1 else f"{wire}#{column}"
