"""`Placement`: which devices compute each stage, as one short text.

Stages are parted by dots, the devices of a stage by commas, and a node's devices may be a range:

    0:0-6.0:7                  devices 0 to 6 of node 0, then its device 7
    0:0-7,1:0-7.0:0-7,1:0-7    two stages, both on all 16 devices of two nodes

The empty text stands for data parallel: one stage, on every device there is.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from bayplan.data.errors import UsageError

__all__ = ["MOST_DEVICES", "Place", "Placement", "numbers_text"]

_EXAMPLE = "write node:device or node:first-last, like 0:0-6.0:7"
# Longer numbers and ranges are slips of the keyboard; a range is held device by device.
_PART = re.compile("([0-9]{1,6}):([0-9]{1,6})(?:-([0-9]{1,6}))?")
MOST_DEVICES = 2**16


def numbers_text(numbers: Iterable[int]) -> str:
    """Print numbers with their ranges, like `0-2,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


class Place(NamedTuple):
    """One device of one node, both counted from 0."""

    node: int
    device: int


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The places of each stage, sorted and without repeats."""

    stages: tuple[tuple[Place, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages is empty; a placement needs at least one")
        for index, stage in enumerate(self.stages):
            if not stage:
                raise ValueError(f"stages[{index}] is empty; a stage needs at least one place")
            if list(stage) != sorted(set(stage)):
                raise ValueError(f"stages[{index}] is not sorted, or names a place twice")
            if min(map(min, stage)) < 0:
                raise ValueError(f"stages[{index}] has {min(stage)}, must be 0 or more")

    @classmethod
    def parse(cls, text: str, *, num_devices: int | None = None) -> "Placement":
        """Read a placement; the empty one is node 0's first `num_devices` devices."""
        if text:
            return cls(_parse(text))
        if num_devices is None or num_devices < 1:
            known = "is not known" if num_devices is None else f"is {num_devices}"
            raise UsageError(
                "the empty placement means data parallel on all devices, but their number"
                f" {known}, must be at least 1; or {_EXAMPLE}"
            )
        return cls((tuple(Place(0, device) for device in range(num_devices)),))

    def __str__(self) -> str:
        return ".".join(",".join(_ranges(stage)) for stage in self.stages)

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place once, sorted; a place's rank is its index here."""
        return tuple(sorted({place for stage in self.stages for place in stage}))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        rank_of = {place: rank for rank, place in enumerate(self.places)}
        return tuple(rank_of[place] for place in self.stages[stage])

    @property
    def devices_per_node(self) -> tuple[int, ...]:
        """How many devices of each node are named, from node 0 on."""
        nodes = [place.node for place in self.places]
        return tuple(nodes.count(node) for node in range(nodes[-1] + 1))

    def check_numbered(self) -> None:
        """Raise UsageError where a node or device is left out: ranks have no gaps.

        torchrun starts ranks 0, 1, ... on each of nodes 0, 1, ..., so that device 5 of a node means
        its sixth rank, and a placement without devices 0 to 4 means no job that can be started.
        """
        named = set(self.places)
        for node, device in self.places:
            if device and Place(node, device - 1) not in named:
                missing = next(other for other in range(device) if Place(node, other) not in named)
                gap = f"device {device} of node {node}, but not device {missing}"
            elif node and not device and Place(node - 1, 0) not in named:
                gap = f"node {node}, but not node {node - 1}"
            else:
                continue
            raise UsageError(
                f"placement {self} names {gap}; number them from 0 without a gap, like"
                f" {self.without_gaps()}"
            )

    def check_is_local(self) -> None:
        """Raise UsageError for ranks of other machines, which `run` cannot start."""
        counts = self.devices_per_node
        if len(counts) > 1:
            raise UsageError(
                f"placement {self} names {len(counts)} nodes, but `bayplan run` starts ranks of"
                " this machine, which is node 0; on several, write the plan to a file with `bayplan"
                f" plan` and start torchrun --nnodes {len(counts)} --nproc-per-node {max(counts)}"
                " on each"
            )

    def without_gaps(self) -> "Placement":
        """The same with every gap closed."""
        renumbered: dict[Place, Place] = {}
        grouped = groupby(self.places, lambda place: place.node)
        for node, (_, places) in enumerate(grouped):
            renumbered |= {place: Place(node, device) for device, place in enumerate(places)}
        return Placement(
            tuple(tuple(renumbered[place] for place in stage) for stage in self.stages)
        )

    def check_exists(self, devices_per_node: Sequence[int]) -> None:
        """Raise UsageError for the first place that a cluster of these nodes does not have."""
        num_nodes = len(devices_per_node)
        for node, device in self.places:
            if node >= num_nodes:
                fault = f"node {node}, but {_there(num_nodes, 'node')}"
            elif device >= devices_per_node[node]:
                existing = _there(devices_per_node[node], "device")
                fault = f"device {device} of node {node}, but {existing}"
            else:
                continue
            raise UsageError(f"placement {self} names {fault}")


def _parse(text: str) -> tuple[tuple[Place, ...], ...]:
    stages: list[tuple[Place, ...]] = []
    position = 0
    for stage in text.split("."):
        places: set[Place] = set()
        for part in stage.split(","):
            where = f"placement {text!r}: {part!r} at position {position}"
            named = _places(part, where)
            for node, device in sorted(places.intersection(named)):
                raise UsageError(f"{where} names device {device} of node {node} twice in one stage")
            places.update(named)
            position += len(part) + 1
        stages.append(tuple(sorted(places)))
    return tuple(stages)


def _places(part: str, where: str) -> list[Place]:
    match = _PART.fullmatch(part)
    if match is None:
        raise UsageError(f"{where} names no device; {_EXAMPLE}")
    node, first = int(match[1]), int(match[2])
    last = int(match[3] or first)
    if last < first:
        raise UsageError(f"{where} is a range that goes down; write {node}:{last}-{first}")
    if last - first >= MOST_DEVICES:
        raise UsageError(
            f"{where} has {last - first + 1} devices, at most {MOST_DEVICES} are allowed"
        )
    return [Place(node, device) for device in range(first, last + 1)]


def _ranges(stage: Sequence[Place]) -> Iterator[str]:
    for node, places in groupby(stage, key=lambda place: place.node):
        for devices in numbers_text(place.device for place in places).split(","):
            yield f"{node}:{devices}"


def _there(number: int, what: str) -> str:
    if number == 0:
        return f"there are no {what}s"
    if number == 1:
        return f"there is 1 {what}, {what} 0"
    return f"there are {number} {what}s, 0 to {number - 1}"
