"""The largest batch by strategy, against plans made at that size and the next."""

import pytest
import torch
from torch import nn

from bayplan.costing.catalogue import load_device
from bayplan.data.errors import UsageError
from bayplan.data.units import Limit
from bayplan.models.targets import Target
from bayplan.planning.memory.largest_batch import largest_batches
from bayplan.planning.memory.planner import Planner
from bayplan.preparing.step import PreparedStep

LIMIT_BYTES = 2**18


def build_deep(batch_size):
    layers = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(batch_size or 8, 16), lambda y: y.square().mean()


@pytest.fixture
def planner(own_planner_cache) -> Planner:
    """For a device elsewhere: what fits there does not depend on how busy this machine is."""
    target = Target(name="deep", build=build_deep, takes_batch_size=True, default_batch=8)
    question = PreparedStep(target=target, device=load_device("titan-v"), optimizer="sgd")
    return Planner(question, time_limit_seconds=0.2, cache=own_planner_cache)


def test_kept_batch_is_the_largest_and_ours_is_larger(planner):
    rows = {
        row.strategy: row
        for row in largest_batches(planner, LIMIT_BYTES, strategies=("auto", "keep", "swap"))
    }
    kept = rows["keep"].batch
    for batch, fits in ((kept, True), (kept + 1, False)):
        at = Planner(planner.step.at(batch), cache=planner.cache)
        order = at.order(Limit(share=1.0), strategy="keep")
        assert (order.peak_bytes <= LIMIT_BYTES) == fits
    assert rows["keep"].time_ratio == 1
    assert rows["auto"].batch >= rows["swap"].batch >= kept
    assert rows["auto"].batch > kept
    assert all(0 < row.peak_bytes <= LIMIT_BYTES for row in rows.values())
    assert all(row.samples_per_second > 0 for row in rows.values())


def test_rows_come_one_by_one(planner):
    heard = []
    planner.on_progress = lambda what, *_: heard.append(what)
    rows = largest_batches(planner, LIMIT_BYTES, strategies=("keep", "checkpoint-speed"))
    assert next(rows).strategy == "keep"
    assert "largest batch by checkpoint-speed" not in heard
    assert next(rows).strategy == "checkpoint-speed"


def test_nothing_fits_a_limit_below_the_parameters(planner):
    (row,) = largest_batches(planner, 1000, strategies=("auto",))
    assert (row.batch, row.peak_bytes, row.note) == (0, 0, "")


def test_swapping_here_needs_a_directory(own_planner_cache):
    target = Target(name="deep", build=build_deep, takes_batch_size=True, default_batch=8)
    here = Planner(PreparedStep(target=target, optimizer="sgd"), cache=own_planner_cache)
    (row,) = largest_batches(here, LIMIT_BYTES, strategies=("swap",))
    assert (row.batch, row.note) == (0, "needs --swap-dir")


def test_target_with_a_batch_of_its_own_is_refused(own_planner_cache):
    target = Target(name="fixed", build=build_deep, takes_batch_size=False, default_batch=None)
    fixed = Planner(PreparedStep(target=target), cache=own_planner_cache)
    with pytest.raises(UsageError, match="'fixed' takes no batch size"):
        next(largest_batches(fixed, LIMIT_BYTES))
