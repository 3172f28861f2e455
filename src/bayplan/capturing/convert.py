"""From what the tracer saw to the frozen `StepGraph` of what plain training does."""

from collections.abc import Iterable

from bayplan.capturing.tracer import RawNode, RawStorage, StepTracer
from bayplan.data.graph import Node, StepGraph, Storage, StorageKind, Value

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
    alone holds the older's memory; but not while a dispatch mode watches, for then it adds out of
    place. It holds it alone if the older fills its storage, is not a view (those hold their base),
    is not the newer as well, and dies in the sum. The rewritten sum lives on in the older storage.

    Returns:
        The nodes that are in place.
    """
    rewritten: set[int] = set()
    for index, node in enumerate(nodes):
        if not (node.is_sum and node.op == "aten.add.Tensor"):
            continue
        older, newer, total = (values[value] for value in (*node.reads, *node.writes))
        held, made = storages[older.storage], storages[total.storage]
        is_whole = held.size_bytes == made.size_bytes == older.size_bytes
        is_alone = held.released == index and older.storage != newer.storage
        if is_whole and is_alone and not _is_view(older, nodes, values, storages, rewritten):
            _merge(values, storages, kept=older.storage, gone=total.storage)
            rewritten.add(index)
    return rewritten


def _is_view(
    value: Value,
    nodes: list[RawNode],
    values: list[Value],
    storages: list[Storage],
    rewritten: set[int],
) -> bool:
    """Whether a value is another look at the tensor that its storage was made for."""
    while value.producer not in (storages[value.storage].born, *rewritten):
        assert value.producer is not None, "an older storage is born before it is looked at"
        producer = nodes[value.producer]
        name = producer.op.split(".")[1]
        if not (name.endswith("_") or name == "_unsafe_view"):  # in place, or alone by contract
            return True
        value = next(
            values[read] for read in producer.reads if values[read].storage == value.storage
        )
    return False


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
