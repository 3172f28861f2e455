"""Carrying a profile over to another batch size, against made-up costs and a real capture."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bayplan
from bayplan.costing.roofline import bytes_moved
from bayplan.costing.scaling import same_operators, scale_profile
from bayplan.data.errors import CaptureError, ForeignPlan
from bayplan.data.graph import Phase, StepGraph
from bayplan.data.profile import Clock, Origin, Profile

FLOPS_PER_S = 1e10
BYTES_PER_S = 5e9


def capture(batch: int) -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 32 * 32, 10)
    )
    inputs = torch.empty(batch, 3, 32, 32, device="meta")
    return bayplan.capture(
        model, inputs, lambda output: output.square().mean(), optimizer=torch.optim.AdamW
    )


@pytest.fixture(scope="module")
def graphs() -> dict[int, StepGraph]:
    return {batch: capture(batch) for batch in (4, 8, 32)}


def ideal_profile(graph: StepGraph, *, overhead_seconds: float = 0.25) -> Profile:
    """A machine of one rate for arithmetic and one for traffic, and workspace half the traffic."""
    seconds = tuple(
        node.flops / FLOPS_PER_S + bytes_moved(graph, node) / BYTES_PER_S for node in graph.nodes
    )
    return Profile(
        model=graph.model,
        fingerprint=graph.fingerprint,
        device="cpu",
        origin=Origin.MEASURED,
        clock=Clock.CPU,
        threads=1,
        repeats=3,
        versions={"torch": "2.13.0"},
        seconds=seconds,
        spread_seconds=tuple(figure / 10 for figure in seconds),
        workspace_bytes=tuple(bytes_moved(graph, node) // 2 for node in graph.nodes),
        overhead_seconds=overhead_seconds,
        step_spread_seconds=sum(seconds) / 10,
    )


def test_same_batch_is_the_same_profile(graphs):
    profile = ideal_profile(graphs[8])
    assert scale_profile(profile, graphs[8], graphs[8]) is profile


def test_convolutions_follow_the_batch(graphs):
    profile = ideal_profile(graphs[8])
    scaled = scale_profile(profile, graphs[8], graphs[32])
    for index, node in enumerate(graphs[8].nodes):
        if "convolution" in node.op:
            ratio = scaled.seconds[index] / profile.seconds[index]
            assert ratio == pytest.approx(4.0, rel=0.02)


def test_updates_do_not_know_the_batch(graphs):
    profile = ideal_profile(graphs[8])
    scaled = scale_profile(profile, graphs[8], graphs[32])
    updates = [i for i, node in enumerate(graphs[8].nodes) if node.phase is Phase.UPDATE]
    assert updates
    for index in updates:
        assert scaled.seconds[index] == pytest.approx(profile.seconds[index])
        assert scaled.workspace_bytes[index] == profile.workspace_bytes[index]


def test_product_that_mostly_reads_its_weights_lies_between(graphs):
    profile = ideal_profile(graphs[4])
    scaled = scale_profile(profile, graphs[4], graphs[8])
    index = next(i for i, node in enumerate(graphs[4].nodes) if node.op == "aten.addmm.default")
    assert 1.0 < scaled.seconds[index] / profile.seconds[index] < 2.0


def test_workspace_follows_the_bytes_a_node_touches(graphs):
    profile = ideal_profile(graphs[8])
    scaled = scale_profile(profile, graphs[8], graphs[32])
    for index, node in enumerate(graphs[32].nodes):
        expected = bytes_moved(graphs[32], node) / 2
        assert scaled.workspace_bytes[index] == pytest.approx(expected, abs=4)
    index = next(i for i, n in enumerate(graphs[8].nodes) if n.op == "aten.convolution.default")
    assert scaled.workspace_bytes[index] > 3.9 * profile.workspace_bytes[index]


@pytest.mark.parametrize(("measured", "wanted"), [(4, 8), (8, 32), (4, 32), (32, 4), (8, 4)])
def test_machine_of_constant_rates_is_predicted(graphs, measured, wanted):
    scaled = scale_profile(ideal_profile(graphs[measured]), graphs[measured], graphs[wanted])
    truth = ideal_profile(graphs[wanted])
    assert scaled.step_seconds == pytest.approx(truth.step_seconds, rel=0.05)


def test_overhead_stays_and_the_rest_is_said(graphs):
    profile = ideal_profile(graphs[8], overhead_seconds=0.5)
    scaled = scale_profile(profile, graphs[8], graphs[32])
    assert scaled.overhead_seconds == 0.5
    assert scaled.origin is Origin.SCALED
    assert scaled.fingerprint == graphs[32].fingerprint
    assert (scaled.clock, scaled.threads, scaled.repeats) == (Clock.CPU, 1, 3)
    assert (scaled.device, scaled.versions) == ("cpu", {"torch": "2.13.0"})
    growth = sum(scaled.seconds) / sum(profile.seconds)
    assert scaled.step_spread_seconds == pytest.approx(profile.step_spread_seconds * growth)
    for index, seconds in enumerate(scaled.seconds):
        assert scaled.spread_seconds[index] == pytest.approx(seconds / 10)
    scaled.check_belongs_to(graphs[32])


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.sampled_from([4, 8, 32]))
def test_any_figures_scale_to_figures(graphs, figures, wanted):
    """Nothing measured, however odd, leads to a negative or infinite time."""
    measured = graphs[8]
    num_nodes = len(measured.nodes)
    seconds = tuple(figures[index % 3] for index in range(num_nodes))
    profile = msgspec.structs.replace(
        ideal_profile(measured), seconds=seconds, spread_seconds=(0.0,) * num_nodes
    )
    scaled = scale_profile(profile, measured, graphs[wanted])  # checked at construction
    assert all((new == 0) == (old == 0) for new, old in zip(scaled.seconds, seconds, strict=True))


def test_profile_of_another_step_is_refused(graphs):
    with pytest.raises(ForeignPlan, match="the profile is of"):
        scale_profile(ideal_profile(graphs[4]), graphs[8], graphs[32])


def test_other_operators_are_refused_with_their_place(graphs):
    first, *rest = graphs[32].nodes
    changed = msgspec.structs.replace(
        graphs[32], nodes=(msgspec.structs.replace(first, op="aten.fft.default"), *rest)
    )
    assert not same_operators(graphs[8], changed)
    with pytest.raises(CaptureError, match=r"aten.fft.default \(node 0 0.* aten.convolution"):
        scale_profile(ideal_profile(graphs[8]), graphs[8], changed)


def test_more_operators_are_refused(graphs):
    longer = msgspec.structs.replace(graphs[32], nodes=(*graphs[32].nodes, graphs[32].nodes[0]))
    assert not same_operators(graphs[8], longer)
    num_nodes = len(graphs[8].nodes)
    with pytest.raises(CaptureError, match=rf"has {num_nodes + 1} operators .* {num_nodes} at"):
        scale_profile(ideal_profile(graphs[8]), graphs[8], longer)


def test_batch_sizes_of_one_model_run_the_same_operators(graphs):
    assert same_operators(graphs[4], graphs[32])
    assert same_operators(graphs[4], graphs[4])
