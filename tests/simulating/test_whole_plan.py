"""Plans that were edited by hand into nonsense, each refused with what is wrong."""

import msgspec
import pytest

from bayplan.data.errors import FileFault, UsageError
from bayplan.data.plan import Bucket, DevicePlan, RankPlan, StepOrder
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.checking import check_rank_plan
from bayplan.simulating.pipeline import pipeline_of

ORDER = StepOrder(
    program_fingerprint="p",
    schedule=(0,),
    strategy="keep",
    peak_bytes=1,
    plain_peak_bytes=1,
    seconds=1.0,
    plain_seconds=1.0,
)


@pytest.fixture
def plan(make_stages):
    """Two replicas feed one, with two micro-batches."""
    given = RankPlan(
        model="m",
        cluster_fingerprint="cpu",
        torch_version="2",
        stages=make_stages([[0, 1], [2]]),
        step_fingerprint="f",
        num_micro_batches=2,
        links=((0, 1),),
        gradient_links=((0, 1),),
        buckets=(Bucket(parameters=("w",), size_bytes=4),),
        actions=((), (), ()),
        predicted_peak_bytes=(0, 0, 0),
        predicted_seconds=0.0,
    )
    lists = schedule(pipeline_of(given, num_samples=4), "1f1b", depth=1)
    return msgspec.structs.replace(given, actions=tuple(tuple(map(str, own)) for own in lists))


def edited(plan, rank, change):
    lists = [list(own) for own in plan.actions]
    change(lists[rank])
    return msgspec.structs.replace(plan, actions=tuple(map(tuple, lists)))


def swap(first, second):
    def change(own):
        one, other = own.index(first), own.index(second)
        own[one], own[other] = own[other], own[one]

    return change


def test_a_plan_as_it_was_made_passes(plan):
    check_rank_plan(plan)


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (2, lambda own: own.remove("1RECV_F1"), "rank 2: 1RECV_F1 is missing"),
        (0, lambda own: own.remove("0REDUCE0"), "rank 0: 0REDUCE0 is missing"),
        (0, lambda own: own.append("1F0"), "rank 0, position .*, 1F0: is not this rank's to do"),
        (2, lambda own: own.append("1F0"), "1F0: is there twice"),
        (2, swap("1F0", "1B0"), "1B0: comes before 1F0"),
        (2, swap("1RECV_F0", "1SEND_B1"), "comes before"),
    ],
)
def test_lists_that_make_no_step_are_refused(plan, rank, change, message):
    with pytest.raises(FileFault, match=f"{message}.*plan anew"):
        check_rank_plan(edited(plan, rank, change))


def test_lists_that_wait_in_a_circle_are_refused(make_stages, plan):
    def wait_first(own):  # for the gradient of a micro-batch that is not yet sent
        own.remove("0RECV_B0")
        own.insert(own.index("0SEND_F0"), "0RECV_B0")

    with pytest.raises(FileFault, match="plan anew"):
        check_rank_plan(edited(plan, 0, wait_first))


def test_more_micro_batches_than_actions_are_refused_before_they_are_listed(plan):
    many = msgspec.structs.replace(plan, num_micro_batches=10**12)
    with pytest.raises(FileFault, match=r"1000000000000 micro-batches .* only"):
        check_rank_plan(many)


def test_a_rank_without_a_stage_is_refused(plan, make_stages):
    gap = msgspec.structs.replace(plan, stages=make_stages([[0], [2]]))
    with pytest.raises(FileFault, match="rank 1 has no stage"):
        check_rank_plan(gap)


def test_a_plan_for_one_device_is_refused():
    given = DevicePlan(
        model="m",
        graph_fingerprint="",
        cluster_fingerprint="cpu",
        torch_version="2",
        order=ORDER,
        predicted_peak_bytes=(1,),
        predicted_seconds=0.0,
    )
    with pytest.raises(UsageError, match="for one device"):
        check_rank_plan(given)
