"""What a step makes the caching allocator reserve, on graphs small enough to add up by hand."""

import pytest

from bayplan.data.errors import DoesNotFit
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind
from bayplan.data.program import Op, Program
from bayplan.simulating.allocator_settings import AllocatorSettings
from bayplan.simulating.reserving import reserve_program, reserve_step

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


@pytest.mark.parametrize(
    ("architecture", "size_bytes"),
    [
        ("sm_75", 8_519_680),
        ("sm_89", 8_519_680),
        ("sm_90", 32 << 20),
        ("sm_100", 32 << 20),
        ("sm_120", 32 << 20),
        ("gfx90a", 32 << 20),
        ("gfx942", 128 << 20),
    ],
)
def test_a_workspace_is_as_large_as_torch_makes_it_on_that_gpu(architecture, size_bytes):
    """Every GPU had that of the A100: on a Hopper `check` reserved 48 MiB too few."""
    graph = step_of("ffbbu", op="aten.addmm.default")
    allocated, _ = reserved(graph, architecture=architecture)
    assert allocated * MIB == 2 * size_bytes


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


# A planned step, whose program is a parameter, an activation and its gradient.

UPDATE = step_of("fbu", (12, StorageKind.OPTIMIZER_STATE, None, None))


def planned(*ops, sizes=(30, 40, 30), outputs=(2,), architecture="", **fields):
    program = Program(
        buffers=tuple(size * MIB for size in sizes),
        ops=tuple(Op(seconds=0.0, **op) for op in ops),
        first_backward=1,
        inputs=frozenset({0}),
        outputs=frozenset(outputs),
        resident_bytes=12 * MIB,
        **fields,
    )
    peaks = reserve_program(program, UPDATE, architecture=architecture)
    return peaks.allocated_bytes / MIB, peaks.reserved_bytes / MIB


FORWARD = {"name": "relu", "reads": (0,), "writes": (1,)}
BACKWARD = {"name": "relu_backward", "reads": (1,), "writes": (2,)}
CALLERS = {"name": "update", "reads": (2,), "writes": (), "is_callers": True, "can_repeat": False}


def test_a_program_is_replayed_like_a_graph():
    graph = step_of(
        "fb",
        (30, StorageKind.PARAMETER, None, None),
        (12, StorageKind.PARAMETER, None, None),  # the state, which no update makes here
        (40, StorageKind.ACTIVATION, 0, 1),
        (30, StorageKind.GRADIENT, 1, None),
    )
    no_state = Program(
        buffers=(30 * MIB, 40 * MIB, 30 * MIB),
        ops=(Op(seconds=0.0, **FORWARD), Op(seconds=0.0, **BACKWARD)),
        first_backward=1,
        inputs=frozenset({0}),
        outputs=frozenset({2}),
        resident_bytes=12 * MIB,
    )
    peaks = reserve_program(no_state, step_of("fb"))
    assert (peaks.allocated_bytes / MIB, peaks.reserved_bytes / MIB) == reserved(graph)


def test_the_state_of_a_planned_step_comes_with_its_first_update():
    # As above: the state takes a part of what the activation had, which the next step misses.
    assert planned(FORWARD, BACKWARD) == (100, 100)
    assert planned(FORWARD, BACKWARD, CALLERS) == (112, 140)


def test_memory_that_is_taken_over_is_not_taken_again():
    takes_over = {**BACKWARD, "takes_over": (1,)}
    apart = planned(FORWARD, BACKWARD, sizes=(30, 40, 40))
    # What forward hands on is not overwritten, so the second op of backward does it.
    again = {"name": "neg", "reads": (2,), "writes": (3,)}
    sizes = (30, 40, 40, 40)
    two = planned(FORWARD, BACKWARD, again, sizes=sizes, outputs=(3,))
    joined = planned(FORWARD, takes_over, {**again, "takes_over": (2,)}, sizes=sizes, outputs=(3,))
    assert (apart, two, joined) == ((110, 110), (110, 110), (110, 110))
    held = {"name": "add", "reads": (1, 2), "writes": (3,)}
    assert planned(FORWARD, BACKWARD, held, sizes=sizes, outputs=(3,)) == (150, 150)
    over = {**held, "takes_over": (2,)}
    assert planned(FORWARD, BACKWARD, over, sizes=sizes, outputs=(3,)) == (110, 110)


def test_products_of_a_planned_step_have_their_workspace():
    product = {**FORWARD, "name": "mm_3"}
    assert planned(product, BACKWARD)[1] == 100 + 20


def test_a_planned_step_has_the_workspace_of_its_gpu():
    product = {**FORWARD, "name": "mm_3"}
    assert planned(product, BACKWARD, architecture="sm_90")[1] == 100 + 32
