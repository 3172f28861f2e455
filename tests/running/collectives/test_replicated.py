"""When the gradients of `data_parallel` are taken to be ready."""

import torch

from bayplan.data.links import LinkCost
from bayplan.planning.buckets.bucketing import plan_buckets
from bayplan.running.collectives.averaging import BackwardTimes
from bayplan.running.collectives.data_parallel import _gradients

PARAMETERS = {name: torch.ones(64) for name in "abcd"}
READY = {"d": 5.0, "c": 6.0, "b": 7.0, "a": 8.0}


def buckets(*, hides_sums):
    link = LinkCost.affine(latency_seconds=0.5, bytes_per_second=512)
    plan = plan_buckets(_gradients(PARAMETERS, READY, hides_sums=hides_sums), link)
    return ["".join(part.name for part in bucket.parts) for bucket in plan.buckets]


def test_sums_begin_early_where_that_hides_them():
    assert buckets(hides_sums=True) == ["d", "c", "b", "a"]


def test_gradients_travel_together_where_backward_stands_still_during_sums():
    assert buckets(hides_sums=False) == ["dcba"]


def test_what_is_unused_is_ready_last():
    row = _gradients(PARAMETERS, {"a": 1.0, "b": 3.0}, hides_sums=True)
    assert [(one.name, one.ready_seconds) for one in row] == [
        ("a", 0.0),
        ("d", 2.0),
        ("c", 2.0),
        ("b", 2.0),
    ]


def test_busy_cores_are_those_of_backward():
    times = BackwardTimes(begun=10.0, ended=14.0, cpu_seconds=3.0)
    assert times.busy_cores == 0.75
    assert BackwardTimes(begun=1.0, ended=1.0).busy_cores == 0.0
