"""Antichains: every set of layers that may be before a cut, found against all sets there are."""

from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream_profiles.graph_states import antichains, bits, prefixes
from pipedream_profiles.layer_graph import LayerGraph, ProfiledLayer


def graph_of(num_layers, edges, sizes=None):
    layers = tuple(
        ProfiledLayer(
            name=f"node{at}",
            kind="Conv2d(1, 1)",
            forward_seconds=1.0,
            backward_seconds=1.0,
            output_bytes=((sizes or [1] * num_layers)[at],),
            parameter_bytes=0,
        )
        for at in range(num_layers)
    )
    return LayerGraph(layers, tuple(edges))


DIAMOND = graph_of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


def test_branches_make_more_cuts_than_any_one_order():
    found = antichains(DIAMOND, most=10) or ()
    assert {one.layers for one in found} == {0b1, 0b11, 0b101, 0b111, 0b1111}
    assert found[0].layers == 0b1
    assert found[-1].layers == 0b1111


def test_a_cut_passes_what_is_read_behind_it():
    passed = {one.layers: one.passed for one in antichains(DIAMOND, most=10) or ()}
    assert passed[0b11] == 0b11  # the first layer is read by the third
    assert passed[0b1111] == 0b1000  # nothing but the last
    # PipeDream sends the first layer also where all its readers are before the cut.
    assert passed[0b111] == 0b111


def test_more_than_wanted_is_none():
    assert antichains(DIAMOND, most=4) is None
    assert len(antichains(DIAMOND, most=5) or ()) == 5


@settings(max_examples=60)
@given(st.data())
def test_sets_are_whole_each_comes_after_its_parts_and_the_last_has_all(data):
    number = data.draw(st.integers(1, 7))
    edges = [(at - 1, at) for at in range(1, number)]  # from the first, all are reached
    pairs = [(a, b) for b in range(number) for a in range(b - 1)]
    if pairs:
        edges += data.draw(st.lists(st.sampled_from(pairs), unique=True))
    kept = [edge for edge in edges if edge[1] - edge[0] > 1 or data.draw(st.booleans())]
    inputs = {b for _, b in kept}
    kept += [(0, at) for at in range(1, number) if at not in inputs]
    graph = graph_of(number, kept)
    found = antichains(graph, most=1000) or ()
    inputs_of = [sum(1 << one for one in set(own)) for own in graph.inputs]
    for one in found:
        assert all(inputs_of[layer] & ~one.layers == 0 for layer in bits(one.layers))
    for at, one in enumerate(found):
        assert one.before >> at == 0
        parts = {other for other in bits(one.before)}
        assert all(found[other].layers & ~one.layers == 0 for other in parts)
    assert found[-1].layers == (1 << number) - 1
    assert len({one.layers for one in found}) == len(found)


def test_prefixes_are_of_one_order_and_of_neighbours_the_cheapest():
    graph = graph_of(5, [(at, at + 1) for at in range(4)], sizes=[9, 1, 8, 2, 0])
    assert [one.layers for one in prefixes(graph, most=5)] == [1, 3, 7, 15, 31]
    assert [one.layers for one in prefixes(graph, most=3)] == [3, 15, 31]
    assert [one.passed for one in prefixes(graph, most=3)] == [2, 8, 0]
