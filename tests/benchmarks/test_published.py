"""The published tables: the fit, what is captured, and the simulation of a row."""

import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bayplan.costing.catalogue import read_cluster
from bayplan.data.actions import ActionKind
from bayplan.data.cluster import LinkKind

MODULES = (
    "captured",
    "constants",
    "exchanges",
    "fitting",
    "memory",
    "networks",
    "rows",
    "simulating",
    "tables",
)


@pytest.fixture(scope="module")
def parts():
    """The modules of the benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield SimpleNamespace(**{name: import_module(f"published.{name}") for name in MODULES})


@pytest.fixture(scope="module")
def runs(parts):
    return {row.run.name: row.run for row in parts.rows.TIMED}


@pytest.fixture(scope="module")
def tables(parts):
    return parts.tables.Tables()


# The fit.
def powers(point):
    a, b = (math.exp(one) for one in point)
    return [a * b, a / b, a**2]


def test_a_fit_finds_the_constants_that_made_the_figures(parts):
    wanted = [math.log(3.0), math.log(0.5)]
    found = parts.fitting.fit(powers, powers(wanted), start=[0.0, 0.0], widths=[100.0, 100.0])
    assert found.point == pytest.approx(wanted, abs=1e-4)


def test_a_constant_that_no_figure_tells_of_stays_where_it_was(parts):
    found = parts.fitting.fit(
        lambda point: [math.exp(point[0])], [2.0], start=[0.0, 0.7], widths=[10.0, 0.1]
    )
    assert found.point[1] == pytest.approx(0.7)


def test_a_narrow_prior_wins_over_a_row(parts):
    found = parts.fitting.fit(lambda point: [math.exp(point[0])], [2.0], start=[0.0], widths=[1e-4])
    assert abs(found.point[0]) < 1e-3


def test_a_row_says_nothing_about_its_own_prediction_once_its_group_is_left_out(parts):
    def predict(point, kept):
        return [math.exp(point[0]) for _ in kept]

    settings = {"start": [0.0], "widths": [100.0], "fitted": [0.0]}
    first, second = (
        parts.fitting.leave_out(predict, [2.0, 2.0, told], ["a", "a", "b"], **settings)
        for told in (2.0, 50.0)
    )
    assert first[2] == pytest.approx(second[2]) == pytest.approx(2.0, rel=1e-3)
    assert second[0] == pytest.approx(50.0, rel=1e-3)  # and twins are left out together


def test_constants_are_logarithms_and_back(parts):
    start = parts.constants.prior_constants()
    assert start.at(start.logarithms) == pytest.approx(start) or all(
        getattr(start.at(start.logarithms), name) == pytest.approx(getattr(start, name))
        for name in start.names()
    )
    assert set(parts.constants.PRIORS) == set(start.names())


# The rows.
@pytest.mark.parametrize(
    ("name", "is_real", "number"),
    [
        ("OneFlow AlexNet, data parallel", False, 636),
        ("OneFlow VGG16, 11:7", True, 5720),
        ("OneFlow ResNet-50, data parallel", True, 1252),
        ("PipeDream AlexNet, data parallel", False, 488),
        ("PipeDream VGG16, 7:1", True, 5719),
    ],
)
def test_iterations_of_an_epoch_are_those_of_the_reports(parts, runs, name, is_real, number):
    assert parts.rows.iterations_of(runs[name], is_real=is_real) == number
    for one in runs[name].reported:
        assert one.epoch_seconds * one.images_per_second / runs[name].batch == pytest.approx(
            number, rel=1e-3
        )


def test_replicas_compute_the_samples_that_the_reports_name(parts, runs):
    def samples(name, firsts):
        run = runs[name]
        return parts.simulating.samples_of(run, parts.simulating.stages_of(run, firsts))

    assert samples("OneFlow AlexNet, data parallel", (0,)) == (252,)
    assert samples("OneFlow AlexNet, 15:1", (0, 1)) == (288, 2016)
    assert samples("PipeDream VGG16, 7:1", (0, 1)) == (32, 32)
    assert samples("OneFlow ResNet-50, 1:5", (0, 1)) == (64, 64)


# What is captured.
def test_a_captured_model_has_its_parameters_and_its_arithmetic(tables, runs):
    (whole,) = tables.captured(runs["OneFlow AlexNet, data parallel"])
    assert whole.parameter_bytes == 4 * 50_302_912
    assert whole.num_samples == 252
    assert whole.input_bytes == pytest.approx(252 * 3 * 224 * 224 * 4, rel=1e-3)
    assert whole.has_convolutions
    # Backward makes the gradients of the last layers first.
    assert [one.num_before for one in whole.gradients] == sorted(
        one.num_before for one in whole.gradients
    )
    assert whole.gradients[0].name == "fc3.weight"


def test_cuts_are_where_oneflow_made_them(tables, runs):
    first, last = tables.captured(runs["OneFlow AlexNet, 3:1"])
    assert {one.name for one in last.gradients} == {"fc3.weight"}
    assert first.parameter_bytes + last.parameter_bytes == 4 * 50_302_912
    assert last.returned_bytes / 2016 == first.sent_bytes / 288 == 4 * 4096
    assert not last.has_convolutions
    first, last = tables.captured(runs["OneFlow AlexNet, 15:1"])
    assert not last.gradients  # seven devices do all the work


def test_the_slower_part_of_each_operator_counts(parts):
    assert parts.captured.seconds_of([(1.0, 3.0), (2.0, 1.0)], 1.0, 1.0) == 5.0
    assert parts.captured.seconds_of([(1.0, 3.0), (2.0, 1.0)], 2.0, 1.0) == 7.0
    assert parts.captured.seconds_of([], 2.0, 1.0) == 0.0


def test_the_device_knows_nothing_of_the_reports(parts):
    device = parts.captured.profiled_device()
    assert device.convolution_scale is None
    assert device.convolutions["3x3"].at(512) == pytest.approx(3.19 * 512 / 715)


# The simulation.
@pytest.fixture(scope="module")
def constants(parts):
    return parts.constants.prior_constants()


def test_without_a_network_data_parallel_takes_what_it_computes(parts, tables, runs, constants):
    run = runs["OneFlow AlexNet, data parallel"]
    (whole,) = tables.captured(run)
    simulation = tables.simulation(run, is_real=False)
    seconds = simulation.step_times(replace(constants, ring_bytes_per_s=1e15)).seconds
    computed = parts.captured.seconds_of(whole.forward, 1, 1) + parts.captured.seconds_of(
        whole.backward, 1, 1
    )
    assert computed < seconds < 1.15 * computed  # an update, and the latency of the last sums


def test_a_slow_ring_decides_and_stale_weights_hide_what_they_can(tables, runs, constants):
    parallel = tables.simulation(runs["OneFlow AlexNet, data parallel"], is_real=False)
    hidden = tables.simulation(runs["OneFlow AlexNet, 15:1"], is_real=False)
    fast, slow = (
        parallel.step_times(replace(constants, ring_bytes_per_s=rate)).seconds
        for rate in (6e9, 3e9)
    )
    assert slow - fast == pytest.approx(2 * 7 / 8 * 4 * 50_302_912 * (1 / 3e9 - 1 / 6e9), rel=0.05)
    assert hidden.step_times(replace(constants, ring_bytes_per_s=3e9)).seconds < slow


def test_where_batches_overlap_backward_comes_first(tables, runs):
    own = tables.simulation(runs["OneFlow AlexNet, 15:1"], is_real=False)
    kinds = [action.kind for action in own.actions[0]]
    assert kinds.index(ActionKind.BACKWARD) < kinds.index(ActionKind.FORWARD)
    assert kinds[-1] is ActionKind.UPDATE
    assert own.lags == (1, 0)
    other = tables.simulation(runs["OneFlow AlexNet, 3:1"], is_real=False)
    assert other.lags == ()


def test_real_images_take_as_long_as_they_are_decoded(tables, runs, constants):
    run = runs["OneFlow AlexNet, data parallel"]
    slow = replace(constants, decoded_per_s=500.0)
    seconds = tables.simulation(run, is_real=True).step_times(slow).seconds
    assert seconds == pytest.approx(252 / 500, rel=0.01)


def test_only_the_link_between_processors_is_fitted(parts, constants):
    cluster = read_cluster("titanv-8")
    fitted = parts.simulating.with_rates(cluster, replace(constants, ring_bytes_per_s=7e9))
    for before, after in zip(cluster.joints, fitted.joints, strict=True):
        if before.kind is LinkKind.SYS:
            assert after.reduce_bandwidth_bytes_per_s.value == 7e9
        else:
            assert before == after


# Memory.
def test_memory_grows_with_every_constant(parts, tables, runs):
    asked = next(
        one
        for one in parts.memory.memory_rows()
        if one.row.run.name == "OneFlow AlexNet, 3:1" and one.row.is_real and one.device == 1
    )
    captured = tables.captured(runs["OneFlow AlexNet, 3:1"])

    def mib(known):
        return parts.memory.predicted_mib(asked, captured, known, context_bytes=721 * 2**20)

    known = parts.memory.MemoryConstants.at([0.0] * 5)
    before = mib(known)
    for name in parts.memory.MEMORY_PRIORS:
        assert mib(replace(known, **{name: 2.0})) > before


def test_a_device_with_next_to_nothing_holds_little_more_than_its_context(parts, tables, runs):
    asked = next(
        one
        for one in parts.memory.memory_rows()
        if one.row.run.name == "OneFlow AlexNet, 15:1" and one.device == 7
    )
    captured = tables.captured(runs["OneFlow AlexNet, 15:1"])
    known = parts.memory.MemoryConstants.at([1.0] * 5)
    found = parts.memory.predicted_mib(asked, captured, known, context_bytes=721 * 2**20)
    assert found == pytest.approx(asked.reported_mib, rel=0.10)


# Orders, and the other reports.
def row(run, reported, predicted, data="synthetic"):
    return {
        "row": f"001:1 {run} ({data})",
        "run": run,
        "quantity": "epoch seconds",
        "reported": reported,
        "predicted": predicted,
        "explained": True,
    }


@pytest.mark.parametrize(
    ("reported", "predicted", "is_tie", "is_right"),
    [(50.0, 60.0, False, True), (50.0, 160.0, False, False), (99.5, 160.0, True, True)],
)
def test_an_order_is_right_or_a_tie(parts, reported, predicted, is_tie, is_right):
    parallel, pipeline = parts.rows.PAIRS[0]
    rows = [row(parallel, 100.0, 100.0), row(pipeline, reported, predicted)]
    (found,) = parts.tables.orders(rows)
    assert (found["is_tie"], found["is_right"]) == (is_tie, is_right)
    assert found["reported_speedup"] == pytest.approx(100 / reported)


def test_totals_of_report_004_follow_from_latency_and_bandwidth(parts):
    rows = parts.exchanges.rows_of_report_004()
    assert len(rows) >= 8
    for one in rows:
        assert one["predicted"] == pytest.approx(one["reported"], rel=0.01)


def test_the_networks_of_report_003_have_their_sizes(parts):
    model, _, _ = parts.networks.build_resnet_v2(1, depth=50)
    # TensorFlow's ResNet-50 version 2 has 25.55 million parameters.
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(25.55e6, rel=0.002)
