"""`Placement`: which devices compute each stage, as one short text.

Stages are parted by dots, the devices of a stage by commas, and a node's devices may be a range:

    0:0-6.0:7                  devices 0 to 6 of node 0, then its device 7
    0:0-7,1:0-7.0:0-7,1:0-7    two stages, both on all 16 devices of two nodes

The empty text stands for data parallel: one stage, on every device there is.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from bayplan.data.errors import UsageError

__all__ = ["Place", "Placement"]

_EXAMPLE = "write node:device or node:first-last, like 0:0-6.0:7"
# Longer numbers and ranges are slips of the keyboard; a range is held device by device.
_NUMBER = re.compile("[0-9]{1,6}")
_MOST_DEVICES = 2**16


class Place(NamedTuple):
    """One device of one node, both counted from 0."""

    node: int
    device: int


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The places of each stage, sorted and without repeats.

    Example:
        >>> placement = Placement.parse("0:0-6.0:7")
        >>> placement.ranks_of(1)
        (7,)
        >>> str(Placement.parse("0:3,0:1-2"))
        '0:1-3'
    """

    stages: tuple[tuple[Place, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages is empty; a placement needs at least one")
        for at, stage in enumerate(self.stages):
            if not stage:
                raise ValueError(f"stages[{at}] is empty; a stage needs at least one place")
            if list(stage) != sorted(set(stage)):
                raise ValueError(f"stages[{at}] is not sorted, or names a place twice")
            for place in stage:
                if place.node < 0 or place.device < 0:
                    raise ValueError(f"stages[{at}] has {place}, must be 0 or more")

    @classmethod
    def parse(cls, text: str, *, num_devices: int | None = None) -> "Placement":
        """Read a placement; the empty one is node 0's first `num_devices` devices."""
        if text:
            return cls(_Reader(text).read())
        if num_devices is None or num_devices < 1:
            known = "is not known" if num_devices is None else f"is {num_devices}"
            raise UsageError(
                "the empty placement means data parallel on all devices, but their number"
                f" {known}, must be at least 1; or {_EXAMPLE}"
            )
        return cls((tuple(Place(0, device) for device in range(num_devices)),))

    def __str__(self) -> str:
        return ".".join(",".join(_runs(stage)) for stage in self.stages)

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place once, sorted; a place's rank is its index here."""
        return tuple(sorted({place for stage in self.stages for place in stage}))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that compute a stage, rising."""
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
        counts = self.devices_per_node
        for node, device in self.places:
            if 0 in counts[:node]:
                missing = f"node {node}, but not node {counts.index(0)}"
            elif device >= counts[node]:
                named = {place.device for place in self.places if place.node == node}
                first = min(set(range(device)) - named)
                missing = f"device {device} of node {node}, but not device {first}"
            else:
                continue
            raise UsageError(
                f"placement {self} names {missing}; number them from 0 without a gap, like"
                f" {self.without_gaps()}"
            )

    def without_gaps(self) -> "Placement":
        """The same with every gap closed."""
        nodes = sorted({place.node for place in self.places})
        devices = {
            node: sorted(place.device for place in self.places if place.node == node)
            for node in nodes
        }
        return Placement(
            tuple(
                tuple(Place(nodes.index(node), devices[node].index(at)) for node, at in stage)
                for stage in self.stages
            )
        )

    def check_exists(self, devices_per_node: Sequence[int]) -> None:
        """Raise UsageError for the first place that a cluster of these nodes does not have."""
        num_nodes = len(devices_per_node)
        for node, device in self.places:
            if node >= num_nodes:
                raise UsageError(
                    f"placement {self} names node {node}, but {_there(num_nodes, 'node')}"
                )
            if device >= devices_per_node[node]:
                raise UsageError(
                    f"placement {self} names device {device} of node {node}, but"
                    f" {_there(devices_per_node[node], 'device')}"
                )


class _Reader:
    """A walk along the text, from left to right; `at` is what is read next."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> tuple[tuple[Place, ...], ...]:
        stages = [self._stage()]
        while self._take("."):
            stages.append(self._stage())
        if self.at < len(self.text):
            raise self._fault("'-', ',', '.' or the end" if self._may_range() else "',' or '.'")
        return tuple(stages)

    def _stage(self) -> tuple[Place, ...]:
        places: set[Place] = set()
        while True:
            begin = self.at
            for place in self._nodes():
                if place in places:
                    raise UsageError(
                        f"placement {self.text!r}: {self.text[begin : self.at]} at position {begin}"
                        f" names device {place.device} of node {place.node} twice in one stage"
                    )
                places.add(place)
            if not self._take(","):
                return tuple(sorted(places))

    def _nodes(self) -> list[Place]:
        node = self._number("a node's number")
        if not self._take(":"):
            raise self._fault("':'")
        begin = self.at
        first = last = self._number("a device's number")
        if self._take("-"):
            last = self._number("the last device's number")
        written = self.text[begin : self.at]
        if last < first:
            raise UsageError(
                f"placement {self.text!r}: the range {written} at position {begin} goes down;"
                f" write {last}-{first}"
            )
        if last - first >= _MOST_DEVICES:
            raise UsageError(
                f"placement {self.text!r}: the range {written} at position {begin} has"
                f" {last - first + 1} devices, at most {_MOST_DEVICES} are allowed"
            )
        return [Place(node, device) for device in range(first, last + 1)]

    def _number(self, what: str) -> int:
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            raise self._fault(what)
        self.at = match.end()
        return int(match[0])

    def _take(self, mark: str) -> bool:
        found = self.text.startswith(mark, self.at)
        self.at += found
        return found

    def _may_range(self) -> bool:
        """Whether what was just read is a device alone, so that a range may follow."""
        return re.search(r":[0-9]+\Z", self.text[: self.at]) is not None

    def _fault(self, wanted: str) -> UsageError:
        found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        return UsageError(
            f"placement {self.text!r}: expected {wanted} at position {self.at}, found {found};"
            f" {_EXAMPLE}"
        )


def _runs(stage: Sequence[Place]) -> list[str]:
    """Neighbouring devices of one node, as ranges."""
    # Along a run, device and index rise together, so their difference tells runs apart.
    grouped = groupby(enumerate(stage), lambda at: (at[1].node, at[1].device - at[0]))
    runs = [[place for _, place in group] for _, group in grouped]
    return [
        f"{run[0].node}:{run[0].device}" + (f"-{run[-1].device}" if len(run) > 1 else "")
        for run in runs
    ]


def _there(number: int, what: str) -> str:
    if number == 0:
        return f"there are no {what}s"
    if number == 1:
        return f"there is 1 {what}, {what} 0"
    return f"there are {number} {what}s, 0 to {number - 1}"
