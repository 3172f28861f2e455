"""What Horovod, DDP and the two simplest ways would do; drawn by hand, and never before ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.planning.buckets.bucket_plan import Gradient, least_end_seconds
from bayplan.planning.buckets.bucketing import plan_buckets
from bayplan.planning.buckets.timelines import (
    ddp_timeline,
    horovod_timeline,
    one_by_one_timeline,
    one_message_timeline,
)

UNIT = 64
MIB = 2**20
ROWS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 8).map(lambda eighths: eighths / 4)),
    min_size=1,
    max_size=8,
)
LATENCIES = st.integers(0, 12).map(lambda quarters: quarters / 4)


def test_horovod_looks_once_in_a_cycle_and_takes_what_is_ready(make_row, make_link, words_of):
    """Ready at 1, 2, 3, 4; looks at 0, 2.5, 5."""
    plan = horovod_timeline(
        make_row([1, 1, 1, 1]), make_link(0.5), threshold_bytes=100 * UNIT, cycle_seconds=2.5
    )
    assert words_of(plan) == ["ab", "cd"]
    assert [bucket.begin_seconds for bucket in plan.buckets] == [2.5, 5.0]
    assert plan.end_seconds == 7.5
    assert plan.unhidden_seconds == 3.5
    assert plan.exchange_seconds == 5.0
    assert plan.hidden_share == pytest.approx(1.5 / 5)


def test_horovod_fuses_up_to_the_threshold_and_giants_go_alone(make_row, make_link, words_of):
    row = make_row([2, 2, 2, 9, 1, 1], gaps=[0.0] * 6)
    settings = {"threshold_bytes": 4 * UNIT, "cycle_seconds": 1.0}
    assert words_of(horovod_timeline(row, make_link(0.0), **settings)) == ["ab", "c", "d", "ef"]
    settings["threshold_bytes"] = 0
    assert words_of(horovod_timeline(row, make_link(0.0), **settings)) == list("abcdef")


def test_horovod_passes_over_other_kinds_as_long_as_these_would_fit(make_row, make_link, words_of):
    row = make_row([1, 1, 1, 3, 1], gaps=[0.0] * 5, kinds="xyxyx")
    plan = horovod_timeline(row, make_link(0.0), threshold_bytes=4 * UNIT, cycle_seconds=1.0)
    # a takes c past b; d is one too much to be passed over, so e waits for the next message.
    assert words_of(plan) == ["ac", "bd", "e"]


def test_horovod_that_blocks_looks_again_when_its_messages_have_ended(
    make_row, make_link, words_of
):
    """a is under way from 1 to 4; b, c and d are ready by then."""
    row = make_row([3, 1, 1, 1], gaps=[1.0, 0.5, 1.0, 1.0])
    settings = {"threshold_bytes": 100 * UNIT, "cycle_seconds": 1.0}
    queued = horovod_timeline(row, make_link(0.0), **settings)
    blocked = horovod_timeline(row, make_link(0.0), is_blocking=True, **settings)
    assert words_of(queued) == ["a", "b", "c", "d"]
    assert words_of(blocked) == ["a", "bcd"]


def test_horovod_may_fuse_what_was_queued_and_is_not_there_yet(make_row, make_link, words_of):
    """All is queued by the second look, at 2, and the message waits for the last gradient, at 4."""
    settings = {"threshold_bytes": 100 * UNIT, "cycle_seconds": 2.0}
    plan = horovod_timeline(
        make_row([1, 1, 1, 1]), make_link(0.0), seen_seconds=lambda one: 0.5, **settings
    )
    assert words_of(plan) == ["abcd"]
    assert plan.buckets[0].begin_seconds == 4.0


def test_horovods_first_look_moves_all_that_follow(make_row, make_link):
    row = make_row([1], gaps=[0.0])
    plan = horovod_timeline(
        row, make_link(0.0), threshold_bytes=0, cycle_seconds=5.0, first_cycle_seconds=2.0
    )
    assert plan.buckets[0].begin_seconds == 2.0


@pytest.mark.parametrize("given", [(-1, 1.0), (1, 0.0)])
def test_settings_horovod_cannot_have_are_refused(given, make_row, make_link):
    threshold, cycle = given
    with pytest.raises(UsageError, match=r"a threshold of -?\d bytes and cycles of \d.0 s"):
        horovod_timeline(
            make_row([1]), make_link(0.0), threshold_bytes=threshold, cycle_seconds=cycle
        )


def megabytes(*sizes, kinds=None):
    return [
        Gradient(
            name=chr(ord("a") + at),
            size_bytes=int(size * MIB),
            ready_seconds=float(at),
            kind=kinds[at] if kinds else "",
        )
        for at, size in enumerate(sizes)
    ]


def test_ddp_closes_a_bucket_once_it_has_reached_its_cap(make_link, words_of):
    row = megabytes(0.5, 0.6, 20, 4, 4, 392, 1)
    link = make_link(0.0, 1e-9)
    assert words_of(ddp_timeline(row, link)) == ["ab", "cde", "f", "g"]
    assert words_of(ddp_timeline(row, link, cap_bytes=5 * MIB)) == ["abc", "de", "f", "g"]
    assert words_of(ddp_timeline(row, link, first_bytes=25 * MIB)) == ["abcd", "ef", "g"]


def test_ddp_has_buckets_of_its_own_for_each_kind(make_link, words_of):
    row = megabytes(1, 1, 20, 20, 5, 5, kinds="xyxyxy")
    assert words_of(ddp_timeline(row, make_link(0.0, 1e-9))) == ["a", "b", "ce", "df"]


def test_ddp_in_reverse_order_of_registration_waits_for_what_comes_late(make_link, words_of):
    """The model has a, b, c in this order, but backward makes a first."""
    row = megabytes(1, 1, 1)
    plan = ddp_timeline(row, make_link(0.0, 1e-9), registered=["a", "b", "c"])
    assert words_of(plan) == ["c", "ba"]
    assert plan.buckets[0].begin_seconds == 2.0


def test_one_message_per_gradient_and_one_for_all(make_row, make_link, words_of):
    row = make_row([1, 1, 1], kinds="xyx")
    alone = one_by_one_timeline(row, make_link(0.5))
    assert words_of(alone) == ["a", "b", "c"]
    assert alone.end_seconds == 1 + 3 * 1.5
    together = one_message_timeline(row, make_link(0.5))
    assert words_of(together) == ["b", "ac"]
    assert together.end_seconds == 2 + 1.5 + 2.5


@given(
    row=ROWS,
    latency=LATENCIES,
    threshold=st.integers(0, 12),
    cycle=st.sampled_from([0.3, 1.0, 2.5]),
    is_blocking=st.booleans(),
)
def test_none_of_them_ends_before_planned_buckets_or_the_bound(
    row, latency, threshold, cycle, is_blocking, make_row, make_link
):
    row, link = make_row(*zip(*row, strict=True)), make_link(latency)
    bound = least_end_seconds(row, latency_seconds=latency, bytes_per_second=UNIT)
    planned = plan_buckets(row, link).end_seconds
    others = [
        horovod_timeline(
            row,
            link,
            threshold_bytes=threshold * UNIT,
            cycle_seconds=cycle,
            is_blocking=is_blocking,
        ),
        ddp_timeline(row, link, cap_bytes=threshold * UNIT, first_bytes=UNIT),
        ddp_timeline(row, link, registered=[one.name for one in row]),
        one_by_one_timeline(row, link),
        one_message_timeline(row, link),
    ]
    for plan in others:
        assert bound - 1e-9 <= planned <= plan.end_seconds + 1e-9
        names = [part.name for bucket in plan.buckets for part in bucket.parts]
        assert sorted(names) == [one.name for one in row]
        for bucket in plan.buckets:
            assert bucket.begin_seconds >= bucket.ready_seconds - 1e-9
