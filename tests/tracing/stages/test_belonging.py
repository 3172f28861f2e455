"""A plan that belongs to another model, or was edited, is refused with what differs."""

import msgspec
import pytest

from bayplan.data.errors import ForeignPlan
from bayplan.data.plan import Bucket, RankPlan, Stage
from bayplan.running.ranks.rank_step import check_buckets, check_cuts, check_fingerprint

GRADIENTS = ({"a": 0, "tied": 0}, {"b": 0, "tied": 0})


@pytest.fixture
def plan():
    return RankPlan(
        model="m",
        cluster_fingerprint="cpu",
        torch_version="2",
        stages=(
            Stage(first=0, last=2, devices=(0,), shares=(1,)),
            Stage(first=3, last=4, devices=(1,), shares=(1,)),
        ),
        step_fingerprint="here",
        buckets=(
            Bucket(parameters=("a",), size_bytes=4, stages=(0,)),
            Bucket(parameters=("b",), size_bytes=4, stages=(1,)),
            Bucket(parameters=("tied",), size_bytes=4, stages=(0, 1)),
        ),
        actions=((), ()),
        predicted_peak_bytes=(0, 0),
        predicted_seconds=0.0,
    )


def test_a_plan_of_this_model_passes(plan):
    check_fingerprint(plan, "here")
    check_cuts(plan, 5)
    check_buckets(plan, GRADIENTS)


def test_another_fingerprint_is_refused_with_both(plan):
    with pytest.raises(ForeignPlan, match="fingerprint here, this model's is there; plan"):
        check_fingerprint(plan, "there")


def test_stages_that_do_not_cover_the_model_are_refused(plan):
    with pytest.raises(ForeignPlan, match="end with operator 4, this model's last is 8"):
        check_cuts(plan, 9)
    gap = msgspec.structs.replace(plan, stages=(plan.stages[1], plan.stages[0]))
    with pytest.raises(ForeignPlan, match="must follow each other from 0"):
        check_cuts(gap, 5)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        (lambda own: own[:2], "'tied' comes from stages .0, 1., in the plan it is in no bucket"),
        (lambda own: (*own, own[0]), "'a', which is in another one too"),
        (
            lambda own: (*own, Bucket(parameters=("c",), size_bytes=4)),
            "'c', which has no gradient",
        ),
        (
            lambda own: (*own[:2], Bucket(parameters=("tied",), size_bytes=4, stages=(1,))),
            "'tied' comes from stages .0, 1., in the plan it is of stages .1,.",
        ),
    ],
)
def test_a_gradient_that_would_not_be_summed_is_named(plan, buckets, message):
    wrong = msgspec.structs.replace(plan, buckets=tuple(buckets(plan.buckets)))
    with pytest.raises(ForeignPlan, match=message):
        check_buckets(wrong, GRADIENTS)
