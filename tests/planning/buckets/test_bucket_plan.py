"""What Horovod, DDP and the two simplest ways would do; drawn by hand, and never before ours."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.planning.buckets.bucket_plan import (
    Gradient,
    ddp_timeline,
    filled_timeline,
    horovod_timeline,
    least_end_seconds,
)
from bayplan.planning.buckets.bucketing import plan_buckets

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


def test_horovod_may_fuse_what_was_queued_and_is_not_there_yet(make_row, make_link, words_of):
    """All is queued by the second look, at 2, and the message waits for the last gradient, at 4."""
    settings = {"threshold_bytes": 100 * UNIT, "cycle_seconds": 2.0}
    plan = horovod_timeline(
        make_row([1, 1, 1, 1]), make_link(0.0), seen_seconds=lambda one: 0.5, **settings
    )
    assert words_of(plan) == ["abcd"]
    assert plan.buckets[0].begin_seconds == 4.0


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
    assert words_of(ddp_timeline(row, link, cap_bytes=24 * MIB)) == ["abcd", "ef", "g"]


def test_ddp_has_buckets_of_its_own_for_each_kind(make_link, words_of):
    row = megabytes(1, 1, 20, 20, 5, 5, kinds="xyxyxy")
    assert words_of(ddp_timeline(row, make_link(0.0, 1e-9))) == ["a", "b", "ce", "df"]


def test_one_message_per_gradient_and_one_for_all(make_row, make_link, words_of):
    row = make_row([1, 1, 1], kinds="yxx")
    alone = filled_timeline(row, make_link(0.5), threshold_bytes=0)
    assert words_of(alone) == ["a", "b", "c"]
    assert alone.end_seconds == 1 + 3 * 1.5
    together = filled_timeline(row, make_link(0.5), threshold_bytes=inf)
    assert words_of(together) == ["a", "bc"]
    assert together.end_seconds == 3 + 2.5


@given(
    row=ROWS,
    latency=LATENCIES,
    threshold=st.integers(0, 12),
    cycle=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_none_of_them_ends_before_planned_buckets_or_the_bound(
    row, latency, threshold, cycle, make_row, make_link
):
    row, link = make_row(*zip(*row, strict=True)), make_link(latency)
    bound = least_end_seconds(row, latency_seconds=latency, bytes_per_second=UNIT)
    planned = plan_buckets(row, link).end_seconds
    others = [
        horovod_timeline(row, link, threshold_bytes=threshold * UNIT, cycle_seconds=cycle),
        ddp_timeline(row, link),
        ddp_timeline(row, link, cap_bytes=threshold * UNIT),
        filled_timeline(row, link, threshold_bytes=0),
        filled_timeline(row, link, threshold_bytes=inf),
    ]
    for plan in others:
        assert bound - 1e-9 <= planned <= plan.end_seconds + 1e-9
        names = [part.name for bucket in plan.buckets for part in bucket.parts]
        assert sorted(names) == [one.name for one in row]
        for bucket in plan.buckets:
            assert bucket.begin_seconds >= bucket.ready_seconds - 1e-9
