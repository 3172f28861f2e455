"""Planned buckets: by hand, against every way to cut, and what parts and order by need promise."""

import time
from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.data.links import LinkCost
from bayplan.planning.buckets.bucket_plan import BucketPlan, Gradient, least_end_seconds
from bayplan.planning.buckets.bucketing import Order, plan_buckets

UNIT = 64
ROWS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 8).map(lambda eighths: eighths / 4)),
    min_size=1,
    max_size=8,
)
LATENCIES = st.integers(0, 12).map(lambda quarters: quarters / 4)


def all_cuts(number):
    """Every way to cut a row."""
    for count in range(number):
        for inner in combinations(range(1, number), count):
            yield (0, *inner, number)


def end_of(messages, link):
    """When the last of some messages, each a size and when that is ready, has ended."""
    free = 0.0
    for size, ready in messages:
        overlapped = link.overlapped_seconds(size)
        free = max(free, ready + overlapped) + link.seconds(size) - overlapped
    return free


def messages_of(row):
    """A message for each kind that is there, in order of readiness."""
    kinds = {}
    for one in row:
        size = kinds.pop(one.kind, (0, 0.0))[0]
        kinds[one.kind] = (size + one.size_bytes, one.ready_seconds)
    return list(kinds.values())


def brute_force(row, link):
    """The earliest end of all cuts, and the fewest messages that have it."""
    found = []
    for cuts in all_cuts(len(row)):
        messages = [one for begin, end in pairwise(cuts) for one in messages_of(row[begin:end])]
        found.append((end_of(messages, link), len(messages)))
    earliest = min(end for end, _ in found)
    return earliest, min(count for end, count in found if end <= earliest * (1 + 1e-9))


def partitions(names):
    """Every way to put names into groups."""
    if not names:
        yield []
        return
    first, *others = names
    for groups in partitions(others):
        yield [[first], *groups]
        for at in range(len(groups)):
            yield [*groups[:at], [first, *groups[at]], *groups[at + 1 :]]


def test_messages_grow_as_long_as_the_link_is_behind(make_row, make_link, words_of):
    """Six gradients of 1 s each, a second apart; a message costs half a second more."""
    plan = plan_buckets(make_row([1] * 6), make_link(0.5))
    assert words_of(plan) == ["a", "b", "cd", "ef"]
    assert [bucket.begin_seconds for bucket in plan.buckets] == [1.0, 2.5, 4.0, 6.5]
    assert plan.end_seconds == 9.0  # the link is never idle: 1 + 4 * 0.5 + 6


def test_a_link_without_latency_still_sends_few_messages(make_row, make_link, words_of):
    """The last gradient is small and goes alone; before it, one message ends just in time."""
    plan = plan_buckets(make_row([1, 1, 1, 1], gaps=[1, 1, 1, 4]), make_link(0.0))
    assert words_of(plan) == ["abc", "d"]
    assert plan.end_seconds == 8.0
    assert plan.unhidden_seconds == 1.0
    assert plan.hidden_share == 0.75


def test_without_backward_all_goes_in_one_message(make_row, make_link, words_of):
    plan = plan_buckets(make_row([3, 1, 2], gaps=[0, 0, 0]), make_link(0.1))
    assert words_of(plan) == ["abc"]
    assert plan.unhidden_seconds == plan.end_seconds == pytest.approx(6.1)
    assert plan.hidden_share == 0.0


@given(row=ROWS, latency=LATENCIES)
def test_no_cuts_end_earlier_and_none_as_early_have_fewer_messages(
    row, latency, make_row, make_link
):
    row = make_row(*zip(*row, strict=True))
    plan = plan_buckets(row, make_link(latency))
    earliest, fewest = brute_force(row, make_link(latency))
    assert plan.buckets[-1].end_seconds == pytest.approx(earliest)
    assert len(plan.buckets) == fewest


@given(
    row=ROWS,
    steps=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 9)), min_size=2, max_size=5),
)
def test_the_same_for_a_table_of_measured_costs(row, steps, make_row):
    row = make_row(*zip(*row, strict=True))
    sizes = {sum(size for size, _ in steps[: at + 1]) * 8: at for at in range(len(steps))}
    link = LinkCost.table(
        [(size, sum(s for _, s in steps[: at + 1])) for size, at in sizes.items()]
    )
    plan = plan_buckets(row, link)
    earliest, fewest = brute_force(row, link)
    assert plan.buckets[-1].end_seconds == pytest.approx(earliest)
    assert len(plan.buckets) == fewest


@given(row=ROWS, latency=LATENCIES, kinds=st.lists(st.sampled_from("xyz"), min_size=8, max_size=8))
def test_with_several_kinds_no_common_cuts_end_earlier(row, latency, kinds, make_row, make_link):
    row = make_row(*zip(*row, strict=True), kinds=kinds[: len(row)])
    plan = plan_buckets(row, make_link(latency))
    earliest, fewest = brute_force(row, make_link(latency))
    assert plan.buckets[-1].end_seconds == pytest.approx(earliest)
    assert len(plan.buckets) == fewest
    kind_of = {one.name: one.kind for one in row}
    for bucket in plan.buckets:
        assert {kind_of[part.name] for part in bucket.parts} == {bucket.kind}


@given(row=ROWS.map(lambda row: row[:6]), latency=LATENCIES)
def test_no_grouping_at_all_ends_earlier(row, latency, make_row, make_link):
    """Not even one of gradients that are no neighbours, sent in the order of readiness."""
    row, link = make_row(*zip(*row, strict=True)), make_link(latency)
    ends = []
    for groups in partitions(row):
        messages = [messages_of(group)[0] for group in map(_by_readiness, groups)]
        ends.append(end_of(sorted(messages, key=lambda one: one[1]), link))
    found = plan_buckets(row, link).buckets[-1].end_seconds
    assert found == pytest.approx(min(ends))


def _by_readiness(group):
    return sorted(group, key=lambda one: one.ready_seconds)


@given(row=ROWS, latency=LATENCIES)
def test_a_plan_says_when_each_message_begins_and_ends(row, latency, make_row, make_link):
    row, link = make_row(*zip(*row, strict=True)), make_link(latency)
    plan = plan_buckets(row, link)
    ready = {one.name: one.ready_seconds for one in row}
    free = 0.0
    for bucket in plan.buckets:
        assert bucket.ready_seconds == max(ready[part.name] for part in bucket.parts)
        assert bucket.begin_seconds == pytest.approx(max(bucket.ready_seconds, free))
        free = bucket.begin_seconds + link.seconds(bucket.size_bytes)
        assert bucket.end_seconds == pytest.approx(free)
    assert plan.backward_seconds == row[-1].ready_seconds
    assert plan.end_seconds == pytest.approx(max(free, plan.backward_seconds))
    sent = [part for bucket in plan.buckets for part in bucket.parts]
    assert [(part.name, part.begin_bytes, part.end_bytes) for part in sent] == [
        (one.name, 0, one.size_bytes) for one in row
    ]


@given(row=ROWS, latency=LATENCIES)
def test_no_plan_beats_the_bound(row, latency, make_row, make_link):
    row = make_row(*zip(*row, strict=True))
    bound = least_end_seconds(row, latency_seconds=latency, bytes_per_second=UNIT)
    for part_bytes in (None, UNIT):
        plan = plan_buckets(row, make_link(latency), part_bytes=part_bytes)
        assert plan.end_seconds >= bound - 1e-9


# Giants.


@given(row=ROWS, latency=LATENCIES, overlap=st.sampled_from([0.0, 0.5]), bend=st.booleans())
def test_parts_never_make_the_end_later(row, latency, overlap, bend, make_row):
    """On a link with a start that overlaps, or one that is slower for large messages, or both."""
    row = make_row(*zip(*row, strict=True))
    link = LinkCost(
        seconds=lambda size: latency + size / UNIT + (max(0, size / UNIT - 4) if bend else 0),
        overlapped_seconds=lambda size: overlap * size / UNIT,
    )
    whole = plan_buckets(row, link)
    cut = plan_buckets(row, link, part_bytes=2 * UNIT)
    assert cut.end_seconds <= whole.end_seconds + 1e-9


@given(row=ROWS, latency=LATENCIES)
def test_with_latency_and_bandwidth_alone_parts_gain_nothing(row, latency, make_row, make_link):
    row = make_row(*zip(*row, strict=True))
    whole = plan_buckets(row, make_link(latency))
    free = plan_buckets(row, make_link(latency), part_bytes=UNIT)
    assert free.end_seconds == pytest.approx(whole.end_seconds)
    names = [part.name for bucket in free.buckets for part in bucket.parts]
    assert names == [one.name for one in row]  # and none is cut in vain


def test_parts_help_where_a_start_overlaps_the_message_before(make_row):
    """A host gathers a message in as many seconds as the network then takes for it."""
    row = make_row([8], gaps=[0.0])
    link = LinkCost(
        seconds=lambda size: 2 * size / UNIT, overlapped_seconds=lambda size: size / UNIT
    )
    assert plan_buckets(row, link).end_seconds == 16.0
    cut = plan_buckets(row, link, part_bytes=UNIT)
    assert cut.end_seconds == 8 + 1  # the first part is gathered, then the network is always busy
    assert {bucket.size_bytes for bucket in cut.buckets[:1]} == {UNIT}
    assert cut.exchange_seconds == 9.0


def test_parts_of_a_giant_may_lie_with_its_neighbours(make_row, make_link, words_of):
    """Messages of four units at most: a giant of five fills what its neighbours leave."""
    row = make_row([2, 5, 1], gaps=[0.0, 0.0, 0.0])
    plan = plan_buckets(row, make_link(1.0), part_bytes=UNIT, most_bytes=4 * UNIT)
    assert words_of(plan) == ["ab", "bc"]
    assert [bucket.size_bytes for bucket in plan.buckets] == [4 * UNIT, 4 * UNIT]
    parts = [part for bucket in plan.buckets for part in bucket.parts if part.name == "b"]
    assert [(part.begin_bytes, part.end_bytes) for part in parts] == [
        (0, 2 * UNIT),
        (2 * UNIT, 5 * UNIT),
    ]
    assert plan.end_of("b") == plan.end_seconds == 10.0


@given(row=ROWS, latency=LATENCIES, most=st.integers(1, 4))
def test_no_message_is_larger_than_allowed_and_every_byte_is_sent_once(
    row, latency, most, make_row, make_link
):
    row = make_row(*zip(*row, strict=True))
    plan = plan_buckets(row, make_link(latency), most_bytes=most * UNIT)
    assert all(bucket.size_bytes <= most * UNIT for bucket in plan.buckets)
    for one in row:
        parts = [part for b in plan.buckets for part in b.parts if part.name == one.name]
        assert [part.begin_bytes for part in parts] == [0, *(p.end_bytes for p in parts[:-1])]
        assert parts[-1].end_bytes == one.size_bytes


# Order by need.


@given(row=ROWS, latency=LATENCIES, part=st.sampled_from([None, UNIT]))
def test_by_need_the_end_and_the_number_of_messages_are_the_same(
    row, latency, part, make_row, make_link
):
    row = make_row(*zip(*row, strict=True))
    by_ready, by_need = (
        plan_buckets(row, make_link(latency), part_bytes=part, order=order) for order in Order
    )
    assert by_need.end_seconds == pytest.approx(by_ready.end_seconds)
    assert len(by_need.buckets) == len(by_ready.buckets)


@given(row=ROWS, latency=LATENCIES, overlap=st.sampled_from([0.25, 0.5, 1.0]))
def test_by_need_the_end_is_no_later_where_starts_overlap(row, latency, overlap, make_row):
    row = make_row(*zip(*row, strict=True))
    link = LinkCost(
        seconds=lambda size: latency + size / UNIT,
        overlapped_seconds=lambda size: overlap * size / UNIT,
    )
    by_ready, by_need = (plan_buckets(row, link, part_bytes=UNIT, order=order) for order in Order)
    assert by_need.end_seconds <= by_ready.end_seconds + 1e-9


@given(row=ROWS, latency=LATENCIES)
def test_by_need_the_last_made_gradient_is_in_the_smallest_message_that_allows_that(
    row, latency, make_row, make_link
):
    row, link = make_row(*zip(*row, strict=True)), make_link(latency)
    plan = plan_buckets(row, link, order=Order.NEED)
    best = brute_force(row, link)
    allowed = []
    for cuts in all_cuts(len(row)):
        messages = [one for begin, end in pairwise(cuts) for one in messages_of(row[begin:end])]
        if len(messages) == best[1] and end_of(messages, link) <= best[0] * (1 + 1e-9):
            allowed.append(messages[-1][0])
    (last,) = (b for b in plan.buckets if row[-1].name in {part.name for part in b.parts})
    assert last.size_bytes == min(allowed)


@given(row=ROWS, latency=LATENCIES)
def test_by_need_a_message_waits_for_one_that_is_needed_later_at_most(
    row, latency, make_row, make_link
):
    row = make_row(*zip(*row, strict=True))
    plan = plan_buckets(row, make_link(latency), most_bytes=3 * UNIT, order=Order.NEED)
    for at, bucket in enumerate(plan.buckets):
        needed_later = [
            other
            for other in plan.buckets[:at]
            if other.parts[-1].name < bucket.parts[-1].name
            and other.end_seconds > bucket.ready_seconds + 1e-9
        ]
        assert len(needed_later) <= 1


def test_first_layers_pass_a_giant_that_is_cut(make_row, make_link, words_of):
    """A giant of 12 is ready first, in messages of 3; b and c come while it is on its way."""
    row = make_row([12, 1, 1], gaps=[0.0, 1.0, 3.0])
    given = {"part_bytes": UNIT, "most_bytes": 3 * UNIT}
    by_ready, by_need = (plan_buckets(row, make_link(0.0), order=order, **given) for order in Order)
    assert by_ready.end_seconds == by_need.end_seconds == 14.0
    assert words_of(by_need) == ["a", "a", "bc", "a", "a"]
    assert by_ready.end_of("c") == 14.0
    assert by_need.end_of("c") == 8.0


# Input and output.


def test_a_plan_is_json_and_comes_back(make_row, make_link):
    row = make_row([2, 5, 1], kinds="xyx")
    plan = plan_buckets(row, make_link(0.5), part_bytes=UNIT, most_bytes=4 * UNIT)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=BucketPlan) == plan


def test_nothing_to_exchange_is_a_plan_without_buckets(make_link):
    plan = plan_buckets([], make_link(1.0))
    assert (plan.buckets, plan.end_seconds, plan.unhidden_seconds) == ((), 0.0, 0.0)
    assert plan.hidden_share == 1.0


def test_gradients_out_of_order_are_refused_by_name():
    row = [
        Gradient(name="late", size_bytes=1, ready_seconds=2.0),
        Gradient(name="early", size_bytes=1, ready_seconds=1.0),
    ]
    with pytest.raises(ValueError, match=r"early is ready after 1.0 s, but stands behind late"):
        plan_buckets(row, LinkCost.affine(latency_seconds=0, bytes_per_second=1))


@pytest.mark.parametrize("given", [{"part_bytes": 100}, {"most_bytes": 0}, {"part_bytes": -64}])
def test_parts_that_would_cut_a_number_are_refused(given, make_row, make_link):
    with pytest.raises(UsageError, match=r"_bytes is -?\d+, must be a multiple of 64"):
        plan_buckets(make_row([1]), make_link(1.0), **given)


@pytest.mark.parametrize("latency", [0.0, 2e-5, 1e-3])
def test_six_hundred_gradients_take_less_than_a_second(latency):
    """Of the processor, whether the link or backward takes longer, with one kind or two."""
    for gap in (0.0, 1e-4, 1e-3):
        row = [
            Gradient(
                name=str(at),
                size_bytes=64 * (1 + at * 7919 % 4096),
                ready_seconds=at * gap,
                kind="xy"[at % 7 == 0],
            )
            for at in range(600)
        ]
        link = LinkCost.affine(latency_seconds=latency, bytes_per_second=1e9)
        before = time.process_time()
        plan_buckets(row, link)
        assert time.process_time() - before < 1.0
