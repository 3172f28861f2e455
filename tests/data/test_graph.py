import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bayplan
from bayplan.data import files
from bayplan.data.graph import StepGraph, Storage, StorageKind, Value

replace = msgspec.structs.replace


def with_node(graph: StepGraph, index: int, **fields: object) -> StepGraph:
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **fields)
    return replace(graph, nodes=tuple(nodes))


def with_value(graph: StepGraph, index: int, **fields: object) -> StepGraph:
    values = list(graph.values)
    values[index] = replace(values[index], **fields)
    return replace(graph, values=tuple(values))


def with_storage(graph: StepGraph, index: int, **fields: object) -> StepGraph:
    storages = list(graph.storages)
    storages[index] = replace(storages[index], **fields)
    return replace(graph, storages=tuple(storages))


# References.


@pytest.mark.parametrize(
    ("change", "index", "fields", "message"),
    [
        (with_node, 1, {"reads": (0, 5)}, r"nodes\[1\]\.reads\[1\] is 5, must be from 0 to 4"),
        (with_node, 2, {"writes": (-1,)}, r"nodes\[2\]\.writes\[0\] is -1, must be from 0 to 4"),
        (with_value, 3, {"storage": 9}, r"values\[3\]\.storage is 9, must be from 0 to 4"),
        (with_value, 0, {"producer": 3}, r"values\[0\]\.producer is 3, must be from 0 to 2"),
        (with_storage, 4, {"born": 3}, r"storages\[4\]\.born is 3, must be from 0 to 2"),
        (with_storage, 1, {"released": 7}, r"storages\[1\]\.released is 7, must be from 0 to 2"),
    ],
)
def test_a_reference_to_nothing_is_named(graph, change, index, fields, message):
    with pytest.raises(ValueError, match=message):
        change(graph, index, **fields)


def test_a_storage_is_not_released_before_it_is_born():
    with pytest.raises(ValueError, match="released after node 2 but born at node 3"):
        Storage(size_bytes=1, kind=StorageKind.TEMPORARY, born=3, released=2)


def test_a_storage_has_no_negative_size():
    with pytest.raises(ValueError, match="size_bytes is -1, must be 0 or more"):
        Storage(size_bytes=-1, kind=StorageKind.TEMPORARY)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (with_value, {"size_bytes": -1}, "size_bytes is -1, must be 0 or more"),
        (with_value, {"shape": (3, -4)}, r"shape\[1\] is -4, must be 0 or more"),
        (with_node, {"flops": -1}, "flops is -1, must be 0 or more"),
    ],
)
def test_no_figure_of_a_graph_is_negative(graph, change, fields, message):
    with pytest.raises(ValueError, match=message):
        change(graph, 0, **fields)


def test_an_empty_step_is_a_step():
    empty = StepGraph(model="empty", nodes=(), values=(), storages=())
    assert (empty.num_parameters, empty.readers) == (0, ())
    assert len(empty.fingerprint) == 16


def test_a_graph_cannot_be_changed(graph):
    with pytest.raises(AttributeError):
        graph.model = "other"


# The fingerprint.


@pytest.mark.parametrize(
    "fields",
    [{"source": "moved.py:99"}, {"module": "renamed.linear"}, {"flops": 1}],
)
def test_fingerprint_ignores_what_does_not_decide_the_step(graph, fields):
    changed = with_node(graph, 0, **fields)
    assert changed != graph
    assert changed.fingerprint == graph.fingerprint


def test_fingerprint_ignores_names(graph):
    assert replace(graph, model="other").fingerprint == graph.fingerprint
    assert with_storage(graph, 1, name="other").fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (with_node, {"op": "aten.addmm.default"}),
        (with_node, {"phase": "backward"}),
        (with_node, {"reads": (1, 0)}),
        (with_node, {"writes": (3,)}),
        (with_node, {"arguments": "stride=2"}),
        (with_value, {"shape": (3, 2)}),
        (with_value, {"dtype": "bfloat16"}),
        (with_value, {"size_bytes": 12}),
        (with_value, {"storage": 1}),
        (with_storage, {"size_bytes": 25}),
        (with_storage, {"kind": "buffer"}),
        (with_storage, {"released": 2}),
    ],
)
def test_fingerprint_changes_with_what_decides_the_step(graph, change, fields):
    assert change(graph, 0, **fields).fingerprint != graph.fingerprint


def test_fingerprint_changes_with_the_order_of_nodes(graph):
    assert replace(graph, nodes=graph.nodes[::-1]).fingerprint != graph.fingerprint


def test_fingerprint_is_the_same_after_reading_back(graph):
    read = files.decode(files.encode(graph), StepGraph, name="x")
    assert read.fingerprint == graph.fingerprint


def test_fingerprint_is_the_same_in_every_release(graph):
    # Profiles and plans on people's disks carry it: it changes only with the file version.
    assert graph.fingerprint == "ff77a5600f400a6a"


# What is read off a graph.


def test_readers_are_nodes_in_order_each_once(graph):
    assert graph.readers == ((0, 2), (0,), (1, 2), (), ())


def test_parameters_are_counted(graph):
    assert graph.num_parameters == 12


def test_tied_parameters_are_counted_once(graph):
    tied = (*graph.values, Value(storage=1, shape=(4, 3), dtype="float32", size_bytes=48))
    assert replace(graph, values=tied).num_parameters == 12


def test_a_parameter_seen_only_in_part_counts_in_full(graph):
    assert with_value(graph, 1, shape=(1, 4), size_bytes=16).num_parameters == 12


def test_a_parameter_that_no_value_shows_does_not_break_counting(graph):
    unseen = Storage(size_bytes=40, kind=StorageKind.PARAMETER, name="unused")
    assert replace(graph, storages=(*graph.storages, unseen)).num_parameters == 12


@given(st.data())
def test_any_reference_out_of_range_is_refused(graph, data):
    index = data.draw(st.integers().filter(lambda i: not 0 <= i < len(graph.values)))
    at = data.draw(st.integers(0, len(graph.nodes) - 1))
    with pytest.raises(ValueError, match=rf"nodes\[{at}\]\.reads\[0\] is {index}, must be"):
        with_node(graph, at, reads=(index,))


def test_an_operator_may_have_a_name_of_any_form(graph):
    # A graph file whose operator had no dots was read, and its simulation failed.
    assert [node.operator for node in graph.nodes] == ["mm", "sum", "mm"]
    odd = with_node(graph, 0, op="mine")
    assert odd.nodes[0].operator == "mine"
    assert bayplan.simulate(odd, device="h100").peak_bytes > 0
