"""Buckets of gradients: when their sums are made, and by whom."""

import pytest
import torch
from torch import distributed

from bayplan.devices.copy_thread import CopyThread
from bayplan.running.collectives.bucket_sums import BucketSums, GradientBucket
from bayplan.running.collectives.sums import SocketSums

PARAMETERS = {name: torch.empty(3) for name in "abc"}


@pytest.fixture
def sums():
    """Over one rank: all that a sum does there is to multiply by the factor."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield SocketSums(distributed.group.WORLD)
    distributed.destroy_process_group()


@pytest.fixture
def make_buckets(sums):
    def make(*, keeps_last):
        buckets = {0: GradientBucket(("a",), sums), 1: GradientBucket(("b", "c"), sums)}
        found = BucketSums(PARAMETERS, buckets, factor=0.5, keeps_last=keeps_last)
        found.begin_step(dict.fromkeys(PARAMETERS, 1), [0, 1])
        return found

    return make


def take(buckets, names):
    for name in names:
        buckets.views[name].fill_(8.0)
        buckets.took(name)


@pytest.mark.parametrize("keeps_last", [False, True])
def test_all_is_summed_in_the_end(make_buckets, keeps_last):
    buckets, heard = make_buckets(keeps_last=keeps_last), []
    buckets.hear = heard.append
    take(buckets, "abc")
    buckets.wait()
    assert [view.tolist() for view in buckets.views.values()] == [[4.0] * 3] * 3
    assert sorted(one.size_bytes for one in heard) == [12, 24]


def test_the_last_sum_is_left_to_whoever_waits(make_buckets):
    kept, begun = make_buckets(keeps_last=True), make_buckets(keeps_last=False)
    for buckets in (kept, begun):
        take(buckets, "abc")
    # A sum multiplies before it leaves the thread that begins it.
    assert [kept.views[name][0].item() for name in "ab"] == [4.0, 8.0]
    assert [begun.views[name][0].item() for name in "ab"] == [4.0, 4.0]
    for buckets in (kept, begun):
        buckets.wait()


@pytest.fixture
def copies():
    thread = CopyThread("copies")
    yield thread
    thread.close()


@pytest.mark.parametrize("keeps_last", [False, True])
@pytest.mark.parametrize(("count", "is_at_once"), [(3, False), (1 << 14, True)])
def test_a_gradient_is_in_its_bucket_when_that_is_summed(sums, keeps_last, count, is_at_once):
    buckets = BucketSums(
        {"a": torch.empty(count)},
        {0: GradientBucket(("a",), sums)},
        factor=0.5,
        keeps_last=keeps_last,
    )
    for step in range(2):
        buckets.begin_step({"a": 1}, [0])
        assert buckets.put("a", torch.full((count,), 8.0 + step)) is is_at_once
        buckets.took("a")
        buckets.wait()
        assert buckets.views["a"].unique().tolist() == [4.0 + step / 2]


@pytest.mark.parametrize("keeps_last", [False, True])
def test_a_thread_copies_before_it_lets_a_sum_begin(sums, copies, keeps_last):
    """Small ones are left until their bucket is full; sums begin in the order of buckets."""
    counts = {"small": 3, "middle": 1 << 14, "large": 1 << 18, "late": 5}
    buckets = BucketSums(
        {name: torch.empty(count) for name, count in counts.items()},
        {0: GradientBucket(("small", "middle", "large"), sums), 1: GradientBucket(("late",), sums)},
        factor=0.5,
        keeps_last=keeps_last,
        copies=copies,
    )
    for step in range(2):
        heard = []
        buckets.hear = heard.append
        buckets.begin_step(dict.fromkeys(counts, 1), [0, 1])
        at_once = []
        for name in reversed(counts):  # the second bucket is full before the first
            if buckets.put(name, torch.full((counts[name],), 8.0 + step)):
                at_once.append(name)
            buckets.took(name)
        buckets.wait()
        assert at_once == ["large"]
        assert {view.unique().item() for view in buckets.views.values()} == {4.0 + step / 2}
        # The group's threads may end them in another order.
        begun = sorted(heard, key=lambda one: one.begun_seconds)
        assert [one.size_bytes for one in begun] == [4 * (counts["large"] + (1 << 14) + 3), 20]


def test_a_copy_that_fails_is_told_to_whoever_waits(sums, copies):
    large = 1 << 18
    buckets = BucketSums(
        {"a": torch.empty(large)}, {0: GradientBucket(("a",), sums)}, copies=copies
    )
    buckets.begin_step({"a": 1}, [0])
    buckets.put("a", torch.ones(large + 1))
    buckets.took("a")
    with pytest.raises(RuntimeError, match="must match the size"):
        buckets.wait()


@pytest.mark.parametrize("keeps_last", [False, True])
def test_what_no_sample_reaches_is_zero(make_buckets, keeps_last):
    buckets = make_buckets(keeps_last=keeps_last)
    buckets.views["b"].fill_(7.0)  # of the step before
    take(buckets, "ac")
    for number in range(2):
        buckets.finish(number)
    buckets.wait()
    assert [buckets.views[name][0].item() for name in "abc"] == [4.0, 0.0, 4.0]


def test_to_wait_for_what_is_not_finished_is_a_mistake(make_buckets):
    buckets = make_buckets(keeps_last=True)
    take(buckets, "a")
    with pytest.raises(AssertionError, match="finished before it is waited for"):
        buckets.wait()
