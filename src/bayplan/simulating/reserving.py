"""What a step makes torch's caching allocator reserve on a CUDA device: plain, or as planned.

A graph says when each storage is born and released, a program the same of its buffers. Handed to
the simulated allocator in that order, step after step, they give the segments that a training loop
ends up with:

    parameters, buffers, batch | step: gradients of the step before are dropped
                               |       at each node: what is born, workspace; then what is released
                               |       in the first step, before its update: the optimizer's state

Steps are repeated until one takes no new segment.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from bayplan.data.graph import Phase, StepGraph, StorageKind
from bayplan.data.program import Program
from bayplan.data.record import AllocatorPeaks
from bayplan.simulating.allocator import Block, CachingAllocator
from bayplan.simulating.allocator_settings import AllocatorSettings
from bayplan.simulating.schedule import plain_schedule, replay_schedule

__all__ = ["blas_workspace_bytes", "reserve_program", "reserve_step"]

_MAX_STEPS = 8
# torch keeps a workspace for cuBLAS for each thread that multiplies, from its first product on, and
# cuBLASLt's products use it, too; backward runs in a thread of its own. Its size is that of
# parseChosenWorkspaceSize in torch 2.13's aten/src/ATen/cuda/CublasHandlePool.cpp: 2 x 4 MiB + 8 x
# 16 KiB, or 32 MiB by compute capability; Blackwell, 10 and 12, since pytorch/pytorch#175344, where
# traces of older versions show 8 MiB. AMD's GPUs have 32 MiB, and 128 those that are named here.
_BLAS_WORKSPACE_BYTES, _LARGE_WORKSPACE_BYTES = 8_519_680, 32 << 20
_LARGE_ON = re.compile(r"sm_(9|10|12)[0-9]|gfx")
_LARGEST_ON, _LARGEST_WORKSPACE_BYTES = re.compile("gfx9[45]"), 128 << 20
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm"))


def blas_workspace_bytes(architecture: str) -> int:
    """What torch keeps for the products of a thread, on a GPU of an architecture.

    Example:
        >>> [blas_workspace_bytes(name) >> 20 for name in ("sm_80", "sm_90", "sm_120", "gfx942")]
        [8, 32, 32, 128]
    """
    if _LARGEST_ON.match(architecture):
        return _LARGEST_WORKSPACE_BYTES
    is_large = _LARGE_ON.match(architecture) is not None
    return _LARGE_WORKSPACE_BYTES if is_large else _BLAS_WORKSPACE_BYTES


def reserve_step(
    graph: StepGraph,
    workspace_bytes: Sequence[int],
    *,
    architecture: str = "",
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
) -> AllocatorPeaks:
    """Repeat a plain step until the allocator needs no more.

    Args:
        workspace_bytes: the scratch memory of each node.
        architecture: of the GPU; empty if it is not known.
        settings: of the allocator; torch's own by default.
        capacity_bytes: what the driver has; None for enough.

    Raises:
        DoesNotFit: the driver has no more, though all that is not in use was given back.
    """
    storages = graph.storages
    there = [
        index
        for index, storage in enumerate(storages)
        if storage.born is None and storage.kind is not StorageKind.OPTIMIZER_STATE
    ]
    there.sort(key=lambda index: storages[index].kind is StorageKind.INPUT)
    return _repeated(
        [storages[index].size_bytes for index in there],
        list(_graph_events(graph, workspace_bytes, blas_workspace_bytes(architecture))),
        CachingAllocator(settings, capacity_bytes=capacity_bytes),
    )


def reserve_program(
    program: Program,
    graph: StepGraph,
    *,
    architecture: str = "",
    settings: AllocatorSettings | None = None,
) -> AllocatorPeaks:
    """Repeat a planned step until the allocator needs no more.

    Args:
        program: whose plain order is the plan, with repeats and swaps unrolled.
        graph: of the same step as captured, whose update is that of the plan, too.
        architecture: of the GPU; empty if it is not known.
        settings: of the allocator; torch's own by default.
    """
    states_bytes = sum(
        storage.size_bytes
        for storage in graph.storages
        if storage.kind is StorageKind.OPTIMIZER_STATE
    )
    targets_bytes = max(0, program.resident_bytes - states_bytes)
    return _repeated(
        [*(program.buffers[buffer] for buffer in sorted(program.inputs)), targets_bytes],
        list(_program_events(program, graph, blas_workspace_bytes(architecture))),
        CachingAllocator(settings),
    )


class _Event(NamedTuple):
    """Something is allocated, or freed if its size is 0; what lasts is allocated once and kept."""

    key: Hashable
    size_bytes: int = 0
    is_lasting: bool = False


def _repeated(
    there: Iterable[int], events: Sequence[_Event], allocator: CachingAllocator
) -> AllocatorPeaks:
    """A training loop of one step, in which some sizes are there from the start."""
    for size_bytes in filter(None, there):
        allocator.allocate(size_bytes)
    live: dict[Hashable, Block] = {}
    lasting: set[Hashable] = set()
    for _ in range(_MAX_STEPS):
        before_bytes = allocator.peak_reserved_bytes
        for key in list(live):  # left by the step before
            allocator.free(live.pop(key))
        for key, size_bytes, is_lasting in events:
            if is_lasting:
                if key not in lasting:
                    lasting.add(key)
                    allocator.allocate(size_bytes)
            elif size_bytes:
                live[key] = allocator.allocate(size_bytes)
            elif key in live:
                allocator.free(live.pop(key))
        if allocator.peak_reserved_bytes == before_bytes:
            break
    return AllocatorPeaks(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
    )


def _graph_events(
    graph: StepGraph,
    workspace_bytes: Sequence[int],
    product_bytes: int,
    *,
    is_update_only: bool = False,
) -> Iterator[_Event]:
    """What each node of a graph allocates and frees."""
    born: dict[int, list[int]] = defaultdict(list)
    released: dict[int, list[int]] = defaultdict(list)
    states: list[int] = []
    for index, storage in enumerate(graph.storages):
        if not storage.size_bytes:
            continue
        if storage.born is not None:
            born[storage.born].append(index)
            if storage.released is not None:
                released[storage.released].append(index)
        elif storage.kind is StorageKind.OPTIMIZER_STATE:
            states.append(index)
    for index, node in enumerate(graph.nodes):
        if node.phase is Phase.UPDATE:
            for state in states:
                yield _Event(("state", state), graph.storages[state].size_bytes, is_lasting=True)
            states = []
        elif is_update_only:
            continue
        is_backward = node.phase is Phase.BACKWARD
        yield from _multiplied(node.operator, product_bytes, is_backward=is_backward)
        for storage in born[index]:
            yield _Event(("storage", storage), graph.storages[storage].size_bytes)
        yield from _scratch(workspace_bytes[index])
        for storage in released[index]:
            yield _Event(("storage", storage))


def _program_events(program: Program, graph: StepGraph, product_bytes: int) -> Iterator[_Event]:
    """What each op of a plan allocates and frees; the update as the graph has it."""
    replay = replay_schedule(program, plain_schedule(program))
    holder = list(range(len(program.buffers)))  # of a buffer's memory, which another may take over
    no_workspace = [0] * len(graph.nodes)
    for index, op in enumerate(program.ops):
        operator, is_backward = op.name.rstrip("_0123456789"), index >= program.first_backward
        yield from _multiplied(operator, product_bytes, is_backward=is_backward)
        taken = replay.taken_over[index]
        if taken is not None:
            holder[op.writes[0]] = holder[taken]
        else:
            for buffer in op.writes:
                if program.buffers[buffer]:
                    yield _Event(buffer, program.buffers[buffer])
        if op.is_callers and op.name == "update":
            yield from _graph_events(graph, no_workspace, product_bytes, is_update_only=True)
        else:
            yield from _scratch(op.workspace_bytes)
        for buffer in replay.releases[index]:
            yield _Event(holder[buffer])


def _multiplied(operator: str, size_bytes: int, *, is_backward: bool) -> Iterator[_Event]:
    if operator in _PRODUCTS:
        yield _Event(("products", is_backward), size_bytes, is_lasting=True)


def _scratch(size_bytes: int) -> Iterator[_Event]:
    if size_bytes:
        yield from (_Event("workspace", size_bytes), _Event("workspace"))
