"""One capture of a step for all its batch sizes.

It is taken at a prime number of samples that no other dimension of an image model is a multiple of.
So a dimension that the prime divides grows with the batch, and nothing else does. A step of
thousands of operators takes seconds to capture and milliseconds to scale.
"""

from dataclasses import replace as dataclass_replace

from gpu_truth.loops import Recording
from msgspec.structs import replace

from bayplan.data.graph import Node, Value

__all__ = ["TRACED_BATCH", "with_batch"]

TRACED_BATCH = 1009


def with_batch(recording: Recording, batch: int) -> Recording:
    """The recording at `batch` samples, from one of `TRACED_BATCH`."""
    graph = recording.graph
    growing = [any(side and side % TRACED_BATCH == 0 for side in v.shape) for v in graph.values]
    storages = {value.storage for value, grows in zip(graph.values, growing, strict=True) if grows}

    def scaled(amount: int) -> int:
        return amount * batch // TRACED_BATCH

    def value_at(value: Value) -> Value:
        shape = (side if side % TRACED_BATCH else scaled(side) for side in value.shape)
        return replace(value, shape=tuple(shape), size_bytes=scaled(value.size_bytes))

    def node_at(node: Node) -> Node:
        if not any(growing[value] for value in (*node.reads, *node.writes)):
            return node
        return replace(node, flops=scaled(node.flops))

    return dataclass_replace(
        recording,
        graph=replace(
            graph,
            nodes=tuple(node_at(node) if node.flops else node for node in graph.nodes),
            values=tuple(
                value_at(value) if grows else value
                for value, grows in zip(graph.values, growing, strict=True)
            ),
            storages=tuple(
                replace(storage, size_bytes=scaled(storage.size_bytes))
                if index in storages
                else storage
                for index, storage in enumerate(graph.storages)
            ),
        ),
    )
