"""Live bytes over a plain step, storage by storage.

At each node its new storages and its workspace are added before anything is released, as a kernel
has its inputs, outputs and scratch memory at once:

    before node i      during node i (a candidate for the peak)        after node i
    live               live + born at i + workspace of i               live + born - released at i
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bayplan.data.graph import Phase, StepGraph
from bayplan.data.units import round_up

__all__ = ["OBJECTS", "WORKSPACE", "LiveMemory", "replay_memory"]

# Beside the storage kinds: memory inside a running kernel, and of torch's own objects.
WORKSPACE, OBJECTS = "workspace", "objects"
_RECORDS_AROUND = 8


@dataclass(frozen=True)
class LiveMemory:
    """Live bytes during each node of a step.

    Attributes:
        by_kind: the totals split by storage kind, and workspace.
        peak_node: the first node of the highest total.
    """

    total_bytes: tuple[int, ...]
    by_kind: dict[str, tuple[int, ...]]
    peak_node: int

    @property
    def peak_bytes(self) -> int:
        return self.total_bytes[self.peak_node]

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """The kinds alive at the peak, the largest first."""
        kinds = {kind: curve[self.peak_node] for kind, curve in self.by_kind.items()}
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def replay_memory(
    graph: StepGraph,
    workspace_bytes: Sequence[int],
    *,
    granularity_bytes: int = 1,
    record_bytes: int = 0,
) -> LiveMemory:
    """Walk the step and add up what is alive, each storage rounded up as its allocator does.

    Args:
        workspace_bytes: the scratch memory of each node.
        record_bytes: what autograd's record of a forward node takes until its backward.
    """
    num_nodes = len(graph.nodes)
    assert num_nodes, "an empty step has no peak"
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (num_nodes + 1))  # by kind and node
    for storage in graph.storages:
        size_bytes, born = round_up(storage.size_bytes, granularity_bytes), storage.born or 0
        changes[storage.kind][born] += size_bytes
        if storage.released is not None:
            changes[storage.kind][max(storage.released, born) + 1] -= size_bytes
    by_kind = {str(kind): tuple(accumulate(column))[:-1] for kind, column in changes.items()}
    by_kind[WORKSPACE] = tuple(workspace_bytes)
    if record_bytes:
        by_kind[OBJECTS] = tuple(record_bytes * count for count in _records(graph))
    totals = tuple(sum(column) for column in zip(*by_kind.values(), strict=True))
    return LiveMemory(totals, by_kind, peak_node=totals.index(max(totals)))


def _records(graph: StepGraph) -> list[int]:
    """How many records there are during each node; backward forgets them evenly.

    One for each forward node, and as much as a few more take for the calls around them.
    """
    num_forward, num_backward = (
        sum(node.phase is phase for node in graph.nodes)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    counts, num_seen = [], 0
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            counts.append(len(counts) + _RECORDS_AROUND)
        elif node.phase is Phase.BACKWARD:
            left = num_forward * (num_backward - num_seen) // num_backward
            counts.append(left + _RECORDS_AROUND)
            num_seen += 1
        else:
            counts.append(0)
    return counts
