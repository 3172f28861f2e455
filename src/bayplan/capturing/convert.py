"""From what the tracer saw to the frozen `StepGraph` of what plain training does."""

from collections.abc import Iterable

from bayplan.capturing.tracer import RawNode, RawStorage, StepTracer
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value

__all__ = ["convert"]


def convert(tracer: StepTracer, *, model: str, gradient_storages: Iterable[int]) -> StepGraph:
    """Name every storage's kind, undo what watching changed, and freeze."""
    kinds = dict.fromkeys(gradient_storages, StorageKind.GRADIENT)
    values, nodes = list(tracer.values), tracer.nodes
    storages = [
        Storage(
            size_bytes=raw.size_bytes,
            kind=raw.kind or kinds.get(index) or _kind_of(raw, tracer.num_nodes_at_backward),
            born=raw.born,
            released=raw.released,
            name=raw.name,
        )
        for index, raw in enumerate(tracer.storages)
    ]
    in_place = _sum_gradients_in_place(nodes, values, storages)
    return StepGraph(
        model=model,
        nodes=tuple(_frozen(node, index in in_place) for index, node in enumerate(nodes)),
        values=tuple(values),
        storages=tuple(storages),
    )


def _kind_of(raw: RawStorage, first_backward: int) -> StorageKind:
    if raw.born is None:
        return StorageKind.BUFFER  # constants the model holds without registering them
    outlives_forward = raw.released is None or raw.released >= first_backward
    if raw.born < first_backward and outlives_forward:
        return StorageKind.ACTIVATION
    return StorageKind.TEMPORARY


def _sum_gradients_in_place(
    nodes: list[RawNode], values: list[Value], storages: list[Storage]
) -> set[int]:
    """Turn the engine's sums of gradients back into the in-place sums of plain training.

    Where two gradients of one tensor meet, autograd's engine adds the newer into the older if it
    alone holds the older; but not while a dispatch mode watches, for then it adds out of place.
    Such a sum is an `add` of plain backward whose first operand comes from an earlier gradient
    formula and dies in it. The rewritten sum lives on in the older storage.

    Returns:
        The nodes that are in place.
    """
    rewritten = set()
    for index, node in enumerate(nodes):
        if node.op != "aten.add.Tensor" or node.phase is not Phase.BACKWARD:
            continue
        if node.arguments != "%, %" or len(node.reads) != 2:
            continue
        older, newer, total = (values[value] for value in (*node.reads, *node.writes))
        held, made = storages[older.storage], storages[total.storage]
        is_engines = (
            older.producer is not None
            and newer.producer is not None
            and nodes[older.producer].evaluation != node.evaluation
            and nodes[older.producer].phase is Phase.BACKWARD
        )
        whole = held.size_bytes == made.size_bytes == older.size_bytes
        if not (is_engines and whole and held.released == index and made.born == index):
            continue
        _merge(values, storages, kept=older.storage, gone=total.storage)
        rewritten.add(index)
    return rewritten


def _merge(values: list[Value], storages: list[Storage], *, kept: int, gone: int) -> None:
    """Let one storage live on in another; the emptied one stays, so that indices hold."""
    old, new = storages[kept], storages[gone]
    storages[kept] = Storage(
        size_bytes=old.size_bytes, kind=new.kind, born=old.born, released=new.released
    )
    storages[gone] = Storage(
        size_bytes=0, kind=StorageKind.TEMPORARY, born=new.born, released=new.born
    )
    for index, value in enumerate(values):
        if value.storage == gone:
            values[index] = Value(
                storage=kept,
                shape=value.shape,
                dtype=value.dtype,
                size_bytes=value.size_bytes,
                producer=value.producer,
            )


def _frozen(raw: RawNode, is_in_place: bool) -> Node:
    return Node(
        op="aten.add_.Tensor" if is_in_place else raw.op,
        phase=raw.phase,
        reads=tuple(raw.reads),
        writes=tuple(raw.writes),
        module=raw.module,
        source=raw.source,
        arguments=raw.arguments,
        flops=raw.flops,
        is_random=raw.is_random,
    )
