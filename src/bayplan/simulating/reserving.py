"""What a plain step makes torch's caching allocator reserve on a CUDA device.

A graph says when each storage is born and released. Handed to the simulated allocator in that
order, step after step, they give the segments that a training loop ends up with:

    parameters, buffers, batch | step: gradients of the step before are dropped
                               |       at each node: what is born, workspace; then what is released
                               |       in the first step, before its update: the optimizer's state

Steps are repeated until one takes no new segment.
"""

from collections import defaultdict
from collections.abc import Sequence

from bayplan.data.graph import Phase, StepGraph, StorageKind
from bayplan.data.record import AllocatorPeaks
from bayplan.simulating.allocator import Block, CachingAllocator
from bayplan.simulating.allocator_settings import AllocatorSettings

__all__ = ["reserve_step"]

_MAX_STEPS = 8
# torch keeps a workspace for cuBLAS for each thread that multiplies, from its first product on: 2 x
# 4 MiB + 8 x 16 KiB (ATen/cuda/CublasHandlePool.cpp; so in traces of A10, RTX 5090, PRO 6000 and
# B200). Hopper has 32 MiB, which is not told apart here. Backward runs in a thread of its own.
_BLAS_WORKSPACE_BYTES = 8_519_680
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm"))


def reserve_step(
    graph: StepGraph,
    workspace_bytes: Sequence[int],
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
) -> AllocatorPeaks:
    """Repeat a step until the allocator needs no more.

    Args:
        workspace_bytes: the scratch memory of each node.
        settings: of the allocator; torch's own by default.
        capacity_bytes: what the driver has; None for enough.

    Raises:
        DoesNotFit: the driver has no more, though all that is not in use was given back.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    steps = _Steps(graph, workspace_bytes, allocator)
    for _ in range(_MAX_STEPS):
        before_bytes = allocator.peak_reserved_bytes
        steps.run()
        if allocator.peak_reserved_bytes == before_bytes:
            break
    return AllocatorPeaks(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
    )


class _Steps:
    """A training loop of one step."""

    def __init__(
        self, graph: StepGraph, workspace_bytes: Sequence[int], allocator: CachingAllocator
    ) -> None:
        self._graph, self._workspace_bytes, self._allocator = graph, workspace_bytes, allocator
        self._left: list[Block] = []  # by the step before
        self._born: dict[int, list[int]] = defaultdict(list)
        self._released: dict[int, list[int]] = defaultdict(list)
        self._states: list[int] = []
        self._multiplied: set[bool] = set()  # in backward, and elsewhere
        first: dict[bool, list[int]] = {True: [], False: []}
        for index, storage in enumerate(graph.storages):
            if not storage.size_bytes:
                continue
            if storage.born is not None:
                self._born[storage.born].append(index)
                if storage.released is not None:
                    self._released[storage.released].append(index)
            elif storage.kind is StorageKind.OPTIMIZER_STATE:
                self._states.append(index)
            else:
                first[storage.kind is StorageKind.INPUT].append(index)
        self._allocate(first[False] + first[True])

    def run(self) -> None:
        live: dict[int, Block] = {}
        for block in self._left:
            self._allocator.free(block)
        for index, node in enumerate(self._graph.nodes):
            if node.phase is Phase.UPDATE and self._states:
                self._allocate(self._states)
                self._states = []
            self._multiply(node.op, is_backward=node.phase is Phase.BACKWARD)
            born = self._born[index]
            live.update(zip(born, self._allocate(born), strict=True))
            if self._workspace_bytes[index]:
                self._allocator.free(self._allocator.allocate(self._workspace_bytes[index]))
            for storage in self._released[index]:
                self._allocator.free(live.pop(storage))
        self._left = list(live.values())

    def _multiply(self, op: str, *, is_backward: bool) -> None:
        if is_backward not in self._multiplied and op.split(".")[1] in _PRODUCTS:
            self._multiplied.add(is_backward)
            self._allocator.allocate(_BLAS_WORKSPACE_BYTES)

    def _allocate(self, storages: Sequence[int]) -> list[Block]:
        sizes = (self._graph.storages[index].size_bytes for index in storages)
        return [self._allocator.allocate(size_bytes) for size_bytes in sizes]
