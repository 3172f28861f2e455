"""What a step makes the caching allocator reserve, on graphs small enough to add up by hand."""

import pytest

from bayplan.data.errors import DoesNotFit
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind
from bayplan.simulating.allocator_settings import AllocatorSettings
from bayplan.simulating.reserving import reserve_step

MIB = 1 << 20
PHASES = {"f": Phase.FORWARD, "b": Phase.BACKWARD, "u": Phase.UPDATE}


def step_of(phases, *storages, op="aten.relu.default"):
    """A node for each letter; storages as MiB, kind, and the nodes of birth and release."""
    return StepGraph(
        model="tiny",
        nodes=tuple(Node(op=op, phase=PHASES[letter]) for letter in phases),
        values=(),
        storages=tuple(
            Storage(size_bytes=int(mib * MIB), kind=kind, born=born, released=released)
            for mib, kind, born, released in storages
        ),
    )


def reserved(graph, workspaces=None, **options):
    peaks = reserve_step(graph, workspaces or [0] * len(graph.nodes), **options)
    return peaks.allocated_bytes / MIB, peaks.reserved_bytes / MIB


def test_parameters_activations_and_gradients_have_segments():
    graph = step_of(
        "fb",
        (30, StorageKind.PARAMETER, None, None),
        (40, StorageKind.ACTIVATION, 0, 1),
        (30, StorageKind.GRADIENT, 1, None),
    )
    assert reserved(graph) == (100, 100)


def test_gradients_of_the_step_before_are_dropped_first():
    graph = step_of("fb", (30, StorageKind.GRADIENT, 1, None), (30, StorageKind.ACTIVATION, 0, 1))
    assert reserved(graph) == (60, 60)


def test_optimizer_state_comes_with_the_first_update_into_what_is_free_then():
    graph = step_of(
        "fbu",
        (40, StorageKind.ACTIVATION, 0, 1),
        (12, StorageKind.OPTIMIZER_STATE, None, None),
    )
    # The state takes 12 of the activation's 40 MiB, so the second step needs 40 MiB anew. What is
    # left of the first 40 MiB lies free and is of no use.
    assert reserved(graph) == (52, 80)


def test_a_workspace_is_in_use_while_its_node_runs():
    graph = step_of("f", (30, StorageKind.TEMPORARY, 0, 0))
    assert reserved(graph, [50 * MIB]) == (80, 80)


def test_a_thread_that_multiplies_keeps_a_workspace():
    products = {"op": "aten.addmm.default"}
    (forward, _), (both, _) = (reserved(step_of(word, **products)) for word in ("ff", "ffbbu"))
    assert (forward * MIB, both * MIB) == (8_519_680, 2 * 8_519_680)


def test_empty_storages_take_nothing():
    graph = step_of("f", (0, StorageKind.TEMPORARY, 0, 0), (0, StorageKind.PARAMETER, None, None))
    assert reserved(graph) == (0, 0)


def test_within_a_capacity_unused_segments_go_back():
    graph = step_of("ff", (40, StorageKind.TEMPORARY, 0, 0), (50, StorageKind.TEMPORARY, 1, 1))
    assert reserved(graph) == (50, 90)
    assert reserved(graph, capacity_bytes=60 * MIB) == (50, 50)
    with pytest.raises(DoesNotFit):
        reserved(graph, capacity_bytes=48 * MIB)


def test_settings_are_those_of_the_allocator():
    graph = step_of("ff", (40, StorageKind.TEMPORARY, 0, 0), (50, StorageKind.TEMPORARY, 1, 1))
    assert reserved(graph, settings=AllocatorSettings(expandable_segments=True)) == (50, 60)
