"""`bayplan explain`: what sets a plan's peak, what its choices cost, and what would help."""

from bayplan.data import files
from bayplan.data.plan import Plan


def test_explanation_names_peak_choices_and_hints(bayplan, plan_file):
    outcome = bayplan("explain", plan_file)
    assert outcome.code == 0
    assert outcome.err == ""
    plan = files.read(plan_file, Plan)
    assert plan.peak_moment is not None
    first, second, *_ = outcome.out.splitlines()
    assert first.startswith("train:deep: planned peak ")
    assert second.startswith("strategy auto, limit ")
    assert f"the peak is at {plan.peak_moment.op}" in outcome.out
    assert "always there (parameters, batch, optimizer state)" in outcome.out
    assert all(value.value in outcome.out for value in plan.peak_moment.values[:5])
    assert plan.decisions[0].value in outcome.out
    assert "what would help:" in outcome.out


def test_plan_that_keeps_everything_says_so(bayplan, deep_project):
    assert bayplan("plan", "train:deep", "--strategy", "keep", "-o", "keep.json").code == 0
    text = bayplan("explain", "keep.json").out
    assert "everything kept" in text
    assert "strategy keep, no limit" in text
    assert "every activation is kept" in text


def test_plan_that_cannot_be_explained_is_refused(bayplan, plan_file, edit_plan, check_refusal):
    check_refusal(bayplan("explain", "no.json"), 2, "cannot read no.json")
    check_refusal(bayplan("explain", edit_plan(order=None)), 2, "`null`", "$.order")
    plan_file.write_text("{")
    check_refusal(bayplan("explain", plan_file), 2, "deep.plan.json", "truncated")
