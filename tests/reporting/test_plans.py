"""What people read of plans: one line, an explanation, a curve; all of made-up plans."""

import pytest
from msgspec import structs

from bayplan.data.plan import Choice, Decision, DevicePlan, LiveValue, PeakMoment, StepOrder
from bayplan.reporting.plans import (
    busy_text,
    curve_text,
    explanation_text,
    plan_line,
    short_text,
    table_text,
)

MIB = 2**20


def make_order(**changes) -> StepOrder:
    fields = {
        "program_fingerprint": "0" * 24,
        "schedule": (0, 1, 0, 2),
        "strategy": "auto",
        "peak_bytes": 400 * MIB,
        "plain_peak_bytes": 1000 * MIB,
        "seconds": 0.112,
        "plain_seconds": 0.1,
        "gap": 0.021,
    }
    return StepOrder(**{**fields, **changes})


@pytest.fixture
def plan() -> DevicePlan:
    relu = Decision(
        value="relu_3",
        choice=Choice.RECOMPUTE,
        place="layer1.0.relu",
        size_bytes=50 * MIB,
        seconds=0.002,
    )
    conv = structs.replace(relu, value="conv_3", place="layer1.0.conv", seconds=0.01)
    mask = Decision(value="relu_1", choice=Choice.PACK, place="relu")
    return DevicePlan(
        model="resnet50",
        graph_fingerprint="f" * 16,
        cluster_fingerprint="cpu",
        torch_version="2.13.0",
        limit_bytes=410 * MIB,
        order=make_order(),
        decisions=(mask, relu, conv),
        peak_moment=PeakMoment(
            op="conv_backward_2",
            place="layer1.0.conv",
            always_bytes=100 * MIB,
            outputs_bytes=20 * MIB,
            workspace_bytes=0,
            values=(LiveValue(value="conv_1", place="conv1", size_bytes=98 * MIB),),
        ),
        predicted_peak_bytes=(400 * MIB,),
        predicted_seconds=0.112,
    )


def test_price_of_a_plan_is_one_line(plan):
    line = "planned peak 400.0 MiB (40% of plain), planned step 112 ms (1.120 x plain)"
    assert plan_line(plan) == f"{line}; 1 packed, 2 recomputed"
    assert plan_line(structs.replace(plan, decisions=())).endswith("; everything kept")


def test_explanation_is_a_snapshot(plan, snapshot):
    assert explanation_text(plan) == snapshot


def test_long_lists_are_cut_with_a_count(plan):
    many = tuple(structs.replace(plan.decisions[2], value=f"conv_{n}") for n in range(14))
    text = explanation_text(structs.replace(plan, decisions=many))
    assert "what is not simply kept (14 in all)" in text
    assert "... and 4 more" in text
    assert text.count("  recomputed  ") == 10


def test_hints_follow_what_binds(plan):
    assert plan.peak_moment is not None
    assert "a smaller --batch: conv_1 conv1 alone takes 98.0 MiB" in explanation_text(plan)
    heavy = structs.replace(plan.peak_moment, always_bytes=350 * MIB)
    text = explanation_text(structs.replace(plan, peak_moment=heavy))
    assert "--update-in-backward" in text
    assert "a smaller --batch" not in text
    free = structs.replace(plan, decisions=(), peak_moment=None)
    assert "nothing: the step runs as fast as it would without a plan" in explanation_text(free)


def test_cheapest_memory_is_the_hint(plan):
    """Of what is recomputed, the one that costs most time for its bytes should come back first."""
    assert "50.0 MiB more memory: conv_3 layer1.0.conv need not be recomputed" in explanation_text(
        plan
    )


def test_curve_lists_the_most_memory_first():
    points = [(500 * MIB, make_order()), (900 * MIB, make_order(seconds=0.1, gap=None))]
    header, first, second = curve_text(points).splitlines()
    assert header.split() == ["limit", "peak", "of", "plain", "time", "/", "plain", "gap"]
    assert first.split() == ["900.0", "MiB", "400.0", "MiB", "40%", "1.000"]
    assert second.split()[-1] == "2.1%"


def test_table_is_aligned_to_the_right():
    assert table_text(("a", "long"), [("wide", "1"), ("b", "")]) == "   a  long\nwide     1\n   b"


def test_ratio_says_how_far_it_may_be_off(plan):
    order = structs.replace(plan.order, time_ratio_spread=0.031)
    assert "(1.12 ± 0.03 x plain)" in plan_line(structs.replace(plan, order=order))


def test_busy_machine_is_told_with_the_way_out():
    assert busy_text(0.1) == ""
    assert busy_text(0.237) == (
        "prices were measured while the machine was busy: runs of the same operator differ by 24%,"
        " so times may be off; measure again with --again"
    )
    assert busy_text(0.237, "again=True").endswith("again=True")


def test_short_step_is_told_because_its_prediction_leaves_out_guards_and_calls():
    assert short_text(0.8e-3).startswith(
        "the operators of a plain step take 800 us: in a step that"
    )
    assert short_text(2e-3) == short_text(0.0) == ""  # long enough; nothing was priced
