"""Live bytes over a plain step, storage by storage.

At each node its new storages and its workspace are added before anything is released, as a kernel
has its inputs, outputs and scratch memory at once:

    before node i      during node i (a candidate for the peak)        after node i
    live               live + born at i + workspace of i               live + born - released at i
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from bayplan.data.graph import Phase, StepGraph
from bayplan.data.units import round_up

__all__ = ["OBJECTS", "WORKSPACE", "LiveMemory", "RecordBytes", "replay_memory"]

# Beside the storage kinds: memory inside a running kernel, and of torch's own objects.
WORKSPACE, OBJECTS = "workspace", "objects"


class RecordBytes(NamedTuple):
    """What autograd's record of a step takes, each by recorded node, by formula and by edge.

    Attributes:
        made: when the forward ends, with the tensor objects that formulas save.
        kept: of these, what stays to the step's end, because the loss holds all formulas.
        engine: what the engine takes while backward runs.
    """

    made: tuple[int, int, int]
    kept: tuple[int, int, int]
    engine: tuple[int, int, int]


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
    record_bytes: RecordBytes | None = None,
) -> LiveMemory:
    """Walk the step and add up what is alive, each storage rounded up as its allocator does.

    Args:
        workspace_bytes: the scratch memory of each node.
        record_bytes: what autograd's own objects take.
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
    if record_bytes is not None:
        by_kind[OBJECTS] = tuple(_recorded(graph, record_bytes))
    totals = tuple(sum(column) for column in zip(*by_kind.values(), strict=True))
    return LiveMemory(totals, by_kind, peak_node=totals.index(max(totals)))


def _recorded(graph: StepGraph, each: RecordBytes) -> Iterator[int]:
    """The bytes of the record during each node; forward makes and backward frees them evenly."""
    num_nodes, num_seen = Counter(node.phase for node in graph.nodes), Counter[Phase]()
    counts = graph.num_recorded, graph.num_formulas, graph.num_edges
    made, kept, engine = (sum(map(mul, counts, sizes)) for sizes in each)
    for node in graph.nodes:
        num_seen[node.phase] += 1
        share = num_seen[node.phase] / num_nodes[node.phase]
        if node.phase is Phase.FORWARD:
            yield int(share * made)
        elif node.phase is Phase.BACKWARD:
            yield int(made + share * (kept - made)) + engine
        else:
            yield kept
