"""Pipelines on the strict group: the plans of the tests with gloo, with the numbers of one process.

Every message is late, so that a stream that does not wait for one has other numbers.
"""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from strict import late_messages, ranks
from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "running" / "ranks" / "whole_runs"))

import training
from test_ranks_same_numbers import FOUR, TOLERANCE, TWO

from bayplan import torch_compat
from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.running.collectives.groups import Queue
from bayplan.running.collectives.transports import DONE

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well

# Without static order messages need tags, which this group has not.
STATIC = {name: case for name, case in {**TWO, **FOUR}.items() if not name.startswith("loose")}
SYNC = {"model": "resnet18", "sync_batch_norm": True}
REAL = {
    "recomputed": (
        "0:0.0:1",
        {"model": "gpt", "batch": 8, "num_micro_batches": 2, "limit_share": 0.8},
    ),
    "synchronised": (
        "0:0-1.0:0-1",
        {**SYNC, "batch": 8, "num_micro_batches": 2, "schedule": "zero-bubble"},
    ),
    "three-to-one-synchronised": ("0:0-2.0:3", {**SYNC, "batch": 10, "shares": (3, 1)}),
    "seven-to-one": ("0:0-6.0:7", {"model": "mixed", "batch": 17, "num_micro_batches": 2}),
}
QUICK = ("one-to-one", "interleaved", "back-again", "zero-bubble", "stale-micro-batches")
QUICK_OF_FOUR = ("three-to-one",)


def names_of(table, quick):
    chosen = [name for name in table if name in STATIC]
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in chosen]


def trained(name, placement, *, model="plain", batch=8, limit_share=None, **wishes):
    case = {"name": name, "model": model, "batch": batch, "dtype": "float64", "steps": 4}
    case["device"] = "bay"
    step = training.build(model, batch, device="bay")
    options = RankPlanOptions(
        placement=Placement.parse(placement),
        time_limit_seconds=1.0,
        **{"shares_by": SharesBy.OPS, **wishes},
    )
    if limit_share is not None:
        plain = place(PreparedStages(step=step), replace(options, limit_bytes=1 << 40))
        limit_bytes = int(limit_share * max(plain.predicted_peak_bytes))
        options = replace(options, limit_bytes=limit_bytes)
    return training.compare(case, of_first(place(PreparedStages(step=step), options)))


def of_first(plan):
    """The plan of rank 0: what a search finds in its time may differ from rank to rank."""
    store, rank = torch_compat.default_store(), distributed.get_rank()
    key = f"plan{store.add(f'plans{rank}', 1)}"  # the same on all ranks of this group
    if rank == 0:
        store.set(key, msgspec.json.encode(plan).decode())
    return msgspec.json.decode(store.get(key), type=RankPlan)


def check(result, tolerance=TOLERANCE):
    assert result["loss"] <= tolerance
    assert result["state"] <= tolerance
    assert result["names"]
    assert result["random_state"]  # as plain training left it: dropout drew the whole batch's
    assert result["moved"]  # or the comparison would be of nothing


def run(name):
    placement, options = {**STATIC, **REAL}[name]
    with ranks(), late_messages(0.002):
        result = trained(name, placement, **options)
        check(result, 0.0 if name == "one-to-one" else TOLERANCE)
        assert result["repeats"] == ("limit_share" in options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", names_of(TWO, QUICK))
def test_two_ranks_have_the_numbers_of_one(name):
    run(name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", names_of(FOUR, QUICK_OF_FOUR))
def test_four_ranks_have_the_numbers_of_one(name):
    run(name)


@pytest.mark.ranks(2)
def test_a_stream_that_does_not_wait_has_other_numbers():
    """Or the tests above would show nothing."""
    receive = Queue.receive

    def receive_only(self, room, rank, tag):
        receive(self, room, rank, tag)
        return DONE

    Queue.receive = receive_only
    try:
        with ranks(), late_messages(0.02):
            result = trained("one-to-one", "0:0.0:1")
    finally:
        Queue.receive = receive
    assert not result["state"] <= TOLERANCE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["recomputed", "synchronised"])
def test_two_ranks_train_real_models(name):
    run(name)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_three_that_synchronise_and_feed_one():
    run("three-to-one-synchronised")


@pytest.mark.slow
@pytest.mark.ranks(8)
def test_seven_that_feed_one():
    run("seven-to-one")
