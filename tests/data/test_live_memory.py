"""Live bytes against brute force: for each node, every storage asked whether it is alive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind
from bayplan.data.live_memory import OBJECTS, WORKSPACE, RecordBytes, replay_memory


def graph_of(num_nodes: int, storages: list[Storage]) -> StepGraph:
    node = Node(op="aten.mul.Tensor", phase=Phase.FORWARD)
    return StepGraph(model="drawn", nodes=(node,) * num_nodes, values=(), storages=tuple(storages))


@st.composite
def drawn_storages(draw, num_nodes: int) -> Storage:
    born = draw(st.none() | st.integers(0, num_nodes - 1))
    released = draw(st.none() | st.integers(born or 0, num_nodes - 1))
    return Storage(
        size_bytes=draw(st.integers(0, 2000)),
        kind=draw(st.sampled_from(list(StorageKind))),
        born=born,
        released=released,
    )


@st.composite
def drawn_steps(draw) -> tuple[StepGraph, list[int]]:
    num_nodes = draw(st.integers(1, 12))
    storages = draw(st.lists(drawn_storages(num_nodes), max_size=12))
    workspace = draw(st.lists(st.integers(0, 500), min_size=num_nodes, max_size=num_nodes))
    return graph_of(num_nodes, storages), workspace


def is_alive(storage: Storage, node: int) -> bool:
    is_born = storage.born is None or storage.born <= node
    is_gone = storage.released is not None and storage.released < node
    return is_born and not is_gone


def rounded(size_bytes: int, granularity_bytes: int) -> int:
    while size_bytes % granularity_bytes:
        size_bytes += 1
    return size_bytes


@given(drawn_steps(), st.sampled_from([1, 16, 64, 512]))
def test_replay_is_brute_force(step, granularity_bytes):
    graph, workspace = step
    memory = replay_memory(graph, workspace, granularity_bytes=granularity_bytes)
    for node in range(len(graph.nodes)):
        expected = dict.fromkeys(memory.by_kind, 0)
        for storage in graph.storages:
            if is_alive(storage, node):
                expected[storage.kind] += rounded(storage.size_bytes, granularity_bytes)
        expected[WORKSPACE] = workspace[node]
        assert {kind: curve[node] for kind, curve in memory.by_kind.items()} == expected
        assert memory.total_bytes[node] == sum(expected.values())


@given(drawn_steps())
def test_kinds_add_up_to_the_total(step):
    memory = replay_memory(*step)
    sums = [sum(column) for column in zip(*memory.by_kind.values(), strict=True)]
    assert tuple(sums) == memory.total_bytes
    assert sum(memory.peak_by_kind.values()) == memory.peak_bytes


@given(drawn_steps())
def test_peak_is_the_first_highest_node(step):
    memory = replay_memory(*step)
    assert memory.peak_bytes == max(memory.total_bytes)
    assert memory.peak_node == memory.total_bytes.index(memory.peak_bytes)


@given(drawn_steps(), st.integers(1, 600))
def test_rounding_adds_less_than_a_block_for_each_storage(step, granularity_bytes):
    graph, workspace = step
    exact = replay_memory(graph, workspace)
    coarse = replay_memory(graph, workspace, granularity_bytes=granularity_bytes)
    for node, (low, high) in enumerate(zip(exact.total_bytes, coarse.total_bytes, strict=True)):
        num_alive = sum(is_alive(storage, node) for storage in graph.storages)
        assert low <= high <= low + num_alive * (granularity_bytes - 1)


# A drawing a human can check.

TEMPORARY, PARAMETER = StorageKind.TEMPORARY, StorageKind.PARAMETER


def test_outputs_are_there_before_inputs_go():
    # node       0     1     2     3
    # weight   [100   100   100   100]
    # a        [ 10    10]
    # b              [ 20    20]
    # c                          [ 40 ->
    graph = graph_of(
        4,
        [
            Storage(size_bytes=100, kind=PARAMETER),
            Storage(size_bytes=10, kind=TEMPORARY, born=0, released=1),
            Storage(size_bytes=20, kind=TEMPORARY, born=1, released=2),
            Storage(size_bytes=40, kind=StorageKind.GRADIENT, born=3),
        ],
    )
    memory = replay_memory(graph, [0, 0, 5, 0])
    assert memory.total_bytes == (110, 130, 125, 140)
    assert memory.by_kind["temporary"] == (10, 30, 20, 0)
    assert memory.by_kind["gradient"] == (0, 0, 0, 40)
    assert memory.by_kind[WORKSPACE] == (0, 0, 5, 0)
    assert memory.peak_by_kind == {"parameter": 100, "gradient": 40, "temporary": 0, WORKSPACE: 0}
    assert list(memory.peak_by_kind) == ["parameter", "gradient", "temporary", WORKSPACE]


def test_storage_of_one_node_counts_in_it():
    graph = graph_of(3, [Storage(size_bytes=7, kind=TEMPORARY, born=1, released=1)])
    assert replay_memory(graph, [0, 0, 0]).total_bytes == (0, 7, 0)


def test_workspace_belongs_to_its_node_alone():
    graph = graph_of(3, [Storage(size_bytes=7, kind=PARAMETER)])
    memory = replay_memory(graph, [0, 100, 0], granularity_bytes=64)
    assert memory.total_bytes == (64, 164, 64)  # a kernel's scratch memory is measured, not rounded
    assert memory.peak_node == 1


def test_storage_from_before_the_step_may_be_released_in_it():
    graph = graph_of(3, [Storage(size_bytes=7, kind=StorageKind.INPUT, released=0)])
    assert replay_memory(graph, [0, 0, 0]).total_bytes == (7, 0, 0)


def test_storage_that_is_never_released_stays():
    graph = graph_of(3, [Storage(size_bytes=7, kind=StorageKind.GRADIENT, born=1)])
    assert replay_memory(graph, [0, 0, 0]).total_bytes == (0, 7, 7)


def test_step_without_storages_has_only_workspace():
    memory = replay_memory(graph_of(2, []), [3, 4])
    assert memory.by_kind == {WORKSPACE: (3, 4)}
    assert memory.peak_bytes == 4


def test_step_without_nodes_has_no_peak():
    with pytest.raises(AssertionError, match="an empty step has no peak"):
        replay_memory(graph_of(0, []), [])


def test_record_grows_in_forward_and_goes_in_part_in_backward():
    phases = [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4 + [Phase.UPDATE]
    nodes = tuple(Node(op="aten.mul.Tensor", phase=phase) for phase in phases)
    graph = StepGraph(
        model="drawn",
        nodes=nodes,
        values=(),
        storages=(),
        num_recorded=4,
        num_formulas=2,
        num_edges=3,
    )
    each = RecordBytes(made=(4, 6, 4), kept=(0, 2, 0), engine=(0, 0, 1))
    live = replay_memory(graph, [0] * 9, record_bytes=each)
    assert live.by_kind[OBJECTS] == (10, 20, 30, 40, 34, 25, 16, 7, 4)
    assert OBJECTS not in replay_memory(graph, [0] * 9).by_kind
