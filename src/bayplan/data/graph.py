"""`StepGraph`: one training step, op by op, in the order it executes.

Memory belongs to storages, not to tensors: a storage is born at a node, is read and written through
any number of values (tensors that alias it), and is released after a node. The release is recorded
rather than derived from the last reader, because a Python variable may hold a tensor far longer
than any operator needs it, and the true peak sees that.
"""

import hashlib
import math
from collections import Counter
from enum import StrEnum
from functools import cached_property

import msgspec

from bayplan.data.errors import check_figures, check_index, check_not_negative

__all__ = ["Node", "Phase", "StepGraph", "Storage", "StorageKind", "Value"]


class Phase(StrEnum):
    """The part of the step a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class StorageKind(StrEnum):
    """What a storage is there for; every byte of a step has exactly one kind."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"  # born in forward and still alive when backward starts
    TEMPORARY = "temporary"  # everything else that is born and released within the step


class Storage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of memory.

    Attributes:
        size_bytes: bytes asked of the allocator, before its rounding.
        kind: what it holds.
        born: the node that makes it; null if it exists before the step.
        released: the node after which it is released; null if it outlives the step.
        name: of a parameter or buffer; `batch` for the batch; an optimizer state has its
            parameter's.
    """

    size_bytes: int
    kind: StorageKind
    born: int | None = None
    released: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        check_not_negative(size_bytes=self.size_bytes)
        if self.born is not None and self.released is not None and self.released < self.born:
            raise ValueError(f"released after node {self.released} but born at node {self.born}")


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor: a typed, shaped look at one storage. `producer` is None for the step's inputs."""

    storage: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    producer: int | None = None

    def __post_init__(self) -> None:
        check_not_negative(size_bytes=self.size_bytes)
        check_figures("shape", self.shape)


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operator call.

    Attributes:
        op: operator with overload, `aten.mm.default`.
        phase: the part of the step it is in.
        reads, writes: indices of values; an in-place operator writes a new value on a storage it
            reads.
        module: path of the module it runs for; in the update, the parameter's name.
        source: the line of your code, `net.py:7`; a backward node has the line of its forward.
        arguments: other arguments written out: `%` is a tensor, `#` a float.
        flops: floating-point operations; 0 where only bytes are moved.
        is_random: whether it draws random numbers.
    """

    op: str
    phase: Phase
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    module: str = ""
    source: str = ""
    arguments: str = ""
    flops: int = 0
    is_random: bool = False

    def __post_init__(self) -> None:
        check_not_negative(flops=self.flops)

    @property
    def operator(self) -> str:
        """Its name without library and overload: `convolution` of `aten.convolution.default`."""
        return self.op.split(".")[1] if "." in self.op else self.op


class StepGraph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A whole step.

    Attributes:
        model: what the model is called.
        nodes: operator calls, in order.
        values: tensors.
        storages: blocks of memory.
        num_recorded: operators of the forward that autograd records.
        num_formulas: gradient formulas that autograd has recorded at the end of the forward; 0 if
            not counted.
        num_edges: edges between these formulas; 0 if not counted.
    """

    schema: str = "bayplan/graph"
    version: int = 1
    model: str
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    num_recorded: int = 0
    num_formulas: int = 0
    num_edges: int = 0

    def __post_init__(self) -> None:
        check_not_negative(
            num_recorded=self.num_recorded,
            num_formulas=self.num_formulas,
            num_edges=self.num_edges,
        )
        num_nodes, num_values, num_storages = map(len, (self.nodes, self.values, self.storages))
        for index, node in enumerate(self.nodes):
            for field, values in (("reads", node.reads), ("writes", node.writes)):
                for position, value in enumerate(values):
                    check_index(f"nodes[{index}].{field}[{position}]", value, num_values)
        for index, value in enumerate(self.values):
            check_index(f"values[{index}].storage", value.storage, num_storages)
            check_index(f"values[{index}].producer", value.producer, num_nodes)
        for index, storage in enumerate(self.storages):
            check_index(f"storages[{index}].born", storage.born, num_nodes)
            check_index(f"storages[{index}].released", storage.released, num_nodes)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides memory and time, and of nothing else.

        Module paths and source lines are left out, so that moving a file keeps profiles valid.
        """
        nodes = [
            (node.op, node.phase, node.reads, node.writes, node.arguments) for node in self.nodes
        ]
        storages = [(s.size_bytes, s.kind, s.born, s.released) for s in self.storages]
        content = msgspec.json.encode((nodes, self.values, storages))
        return hashlib.sha256(content).hexdigest()[:16]

    @cached_property
    def num_parameters(self) -> int:
        """Number of scalars in the parameters, tied ones counted once."""
        total = 0
        first_value_of = {value.storage: value for value in reversed(self.values)}
        for index, value in first_value_of.items():
            storage = self.storages[index]
            if storage.kind is StorageKind.PARAMETER:
                total += storage.size_bytes * math.prod(value.shape) // max(value.size_bytes, 1)
        return total

    @cached_property
    def parameter_dtypes(self) -> tuple[str, ...]:
        """The types that parameters have, the one with the most bytes first."""
        sizes: Counter[str] = Counter()
        for value in {value.storage: value for value in reversed(self.values)}.values():
            if self.storages[value.storage].kind is StorageKind.PARAMETER:
                sizes[value.dtype] += self.storages[value.storage].size_bytes
        return tuple(dtype for dtype, _ in sizes.most_common())

    @cached_property
    def batch_shapes(self) -> tuple[str, ...]:
        """The tensors of the batch, as `int64[1, 4096]`; those that the step does not read too."""
        return tuple(
            f"{value.dtype}{[*value.shape]}"
            for value in self.values
            if value.producer is None and self.storages[value.storage].kind is StorageKind.INPUT
        )

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the nodes that read it, in order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.reads):
                readers[value].append(index)
        return tuple(tuple(nodes) for nodes in readers)
