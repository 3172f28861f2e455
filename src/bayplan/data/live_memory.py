"""Live bytes over a plain step, storage by storage.

At each node its new storages and its workspace are added before anything is released, as a kernel
has its inputs, outputs and scratch memory at once:

    before node i      during node i (a candidate for the peak)        after node i
    live               live + born at i + workspace of i               live + born - released at i
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bayplan.data.graph import StepGraph, Storage
from bayplan.data.units import round_up

__all__ = ["WORKSPACE", "LiveMemory", "replay_memory"]

WORKSPACE = "workspace"  # beside the storage kinds: memory inside a running kernel


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
    graph: StepGraph, workspace_bytes: Sequence[int], *, granularity_bytes: int = 1
) -> LiveMemory:
    """Walk the step and add up what is alive.

    `workspace_bytes` is the scratch memory of each node, `granularity_bytes` what the allocator
    rounds each storage up to.
    """
    num_nodes = len(graph.nodes)
    assert num_nodes, "an empty step has no peak"
    born: list[list[Storage]] = [[] for _ in range(num_nodes)]
    released: list[list[Storage]] = [[] for _ in range(num_nodes)]
    live: Counter[str] = Counter()
    for storage in graph.storages:
        if storage.born is None:
            live[storage.kind] += round_up(storage.size_bytes, granularity_bytes)
        else:
            born[storage.born].append(storage)
        if storage.released is not None:
            released[max(storage.released, storage.born or 0)].append(storage)

    totals: list[int] = []
    kinds = dict.fromkeys([*(storage.kind for storage in graph.storages), WORKSPACE])
    curves: dict[str, list[int]] = {str(kind): [] for kind in kinds}
    for index in range(num_nodes):
        for storage in born[index]:
            live[storage.kind] += round_up(storage.size_bytes, granularity_bytes)
        live[WORKSPACE] = workspace_bytes[index]
        totals.append(sum(live.values()))
        for kind, curve in curves.items():
            curve.append(live[kind])
        for storage in released[index]:
            live[storage.kind] -= round_up(storage.size_bytes, granularity_bytes)
    return LiveMemory(
        total_bytes=tuple(totals),
        by_kind={kind: tuple(curve) for kind, curve in curves.items()},
        peak_node=max(range(num_nodes), key=totals.__getitem__),
    )
