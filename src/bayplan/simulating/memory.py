"""The simulated record of a plain step on one device: its memory replayed, its seconds added up."""

from itertools import accumulate

from bayplan.data.graph import StepGraph, Storage
from bayplan.data.live_memory import RecordBytes, replay_memory
from bayplan.data.profile import Origin, Profile
from bayplan.data.record import DeviceRecord, LiveStorage, MemoryCurve, RunRecord, Source
from bayplan.simulating.planned_step import step_events
from bayplan.simulating.reserving import reserve_step

__all__ = ["CPU_GRANULARITY_BYTES", "place_of", "simulate_step"]

# glibc rounds a block to 16 bytes and torch aligns it to 64; measured, see docs/how-it-predicts.md.
CPU_GRANULARITY_BYTES = 64
_NUM_LARGEST = 5


def simulate_step(
    graph: StepGraph,
    profile: Profile,
    *,
    granularity_bytes: int = CPU_GRANULARITY_BYTES,
    record_bytes: RecordBytes | None = None,
    not_counted: tuple[str, ...] = (),
    reserves: bool = False,
    architecture: str = "",
    context_bytes: int | None = None,
) -> RunRecord:
    """Replay a step with the costs of its profile.

    Args:
        granularity_bytes, record_bytes: as for `replay_memory`.
        not_counted: in words, what the peak leaves out.
        reserves: the device has torch's caching allocator.
        architecture: of a GPU; empty if it is not known.
        context_bytes: what is taken of the device before the first tensor; None if unknown.
    """
    profile.check_belongs_to(graph)
    memory = replay_memory(
        graph,
        profile.workspace_bytes,
        granularity_bytes=granularity_bytes,
        record_bytes=record_bytes,
    )
    allocator = total_bytes = None
    if reserves:
        allocator = reserve_step(graph, profile.workspace_bytes, architecture=architecture)
    if allocator is not None and context_bytes is not None:
        total_bytes = allocator.reserved_bytes + context_bytes
    starts = tuple(accumulate(profile.seconds, initial=0.0))[:-1]
    device = DeviceRecord(
        device=profile.device,
        peak_bytes=memory.peak_bytes,
        total_bytes=total_bytes,
        allocator=allocator,
        peak_by_kind=memory.peak_by_kind,
        peak_node=memory.peak_node,
        peak_place=place_of(graph, memory.peak_node),
        largest=_largest_alive(graph, memory.peak_node),
        events=tuple(
            step_events(
                (node.phase, node.module, start, start + seconds)
                for node, start, seconds in zip(graph.nodes, starts, profile.seconds, strict=True)
            )
        ),
        curve=MemoryCurve(seconds=starts, total_bytes=memory.total_bytes, by_kind=memory.by_kind),
    )
    return RunRecord(
        source=Source.SIMULATED,
        method="liveness",
        model=graph.model,
        fingerprint=graph.fingerprint,
        clock=profile.clock,
        step_seconds=(profile.step_seconds,),
        # Derived figures err together, measured ones as a whole step does.
        step_spread_seconds=sum(profile.spread_seconds)
        if profile.origin is Origin.DERIVED
        else profile.step_spread_seconds,
        devices=(device,),
        not_counted=not_counted,
        versions=profile.versions,
    )


def place_of(graph: StepGraph, index: int) -> str:
    """A node in words: its phase, operator, module and source line."""
    node = graph.nodes[index]
    return " ".join(filter(None, (node.phase, node.operator, node.module, node.source)))


def _largest_alive(graph: StepGraph, node: int) -> tuple[LiveStorage, ...]:
    alive = [
        storage
        for storage in graph.storages
        if (storage.born is None or storage.born <= node)
        and (storage.released is None or storage.released >= node)
    ]
    alive.sort(key=lambda storage: -storage.size_bytes)
    return tuple(_described(graph, storage) for storage in alive[:_NUM_LARGEST])


def _described(graph: StepGraph, storage: Storage) -> LiveStorage:
    name, source = storage.name, ""
    if storage.born is not None:
        node = graph.nodes[storage.born]
        operator = node.operator
        name, source = f"{node.module} ({operator})" if node.module else operator, node.source
    return LiveStorage(size_bytes=storage.size_bytes, kind=storage.kind, name=name, source=source)
