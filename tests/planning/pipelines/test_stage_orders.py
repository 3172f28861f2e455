"""Orders of a stage with micro-batches in flight: within the budget, by whatever means help."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from bayplan.data.plan import Choice
from bayplan.planning.pipelines.stage_orders import StageSearch, described
from bayplan.planning.pipelines.step_source import TracedStage
from bayplan.simulating.swaps import Tier
from bayplan.step import TrainingStep
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole_trace import trace_whole
from bayplan.tracing.traced_step import MemoryContext

pytestmark = pytest.mark.usefixtures("own_planner_cache")
FAST = Tier(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
SLOW = Tier(out_bytes_per_second=5e6, in_bytes_per_second=5e6)


def layers(*kinds):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), *(kind() for kind in kinds)) for _ in range(6))
    )


def stage_of(model, prices, *, stage=0):
    step = TrainingStep(
        model=model, batch=torch.randn(512, 32), loss_fn=lambda y: y.square().mean()
    )
    whole = trace_whole(step, num_samples=512)
    ops = StagedStep(whole, (0,)).step.program.ops
    half = next(at for at, op in enumerate(ops) if op.name == "addmm_3")
    staged = StagedStep(whole, (0, half))
    graph = staged.graph(stage)
    traced = staged.traced(graph, MemoryContext(prices=prices))
    return TracedStage(traced, num_gradients=len(graph.parameters))


@pytest.fixture(scope="module")
def steady_prices():
    """Whoever else computes here, an operator takes 1 ms, and a matrix product 10."""

    @contextmanager
    def prices(_):
        yield lambda node: (1e-2 if "mm" in node.name else 1e-3, 0)

    return prices


@pytest.fixture
def search(own_planner_cache):
    # Many times what it takes alone, for the machine may be busy.
    return StageSearch(cache=own_planner_cache, time_limit_seconds=1.0)


def needs(fit, in_flight=3):
    return fit.memory.needed_bytes(in_flight)


def choices(traced, fit):
    order = described(traced, fit, stage=0, num_samples=512, in_flight=3)
    return {one.choice for one in order.decisions}


def test_with_enough_memory_everything_is_kept(search, steady_prices):
    traced = stage_of(layers(nn.GELU), steady_prices)
    plain = search.plain(traced)
    assert search.within(traced, in_flight=3, budget_bytes=needs(plain)) == [plain]


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_orders_are_within_a_budget_that_counts_all_in_flight(search, steady_prices, share):
    traced = stage_of(layers(nn.GELU), steady_prices)
    plain = search.plain(traced)
    budget_bytes = int(share * needs(plain))
    found = search.within(traced, in_flight=3, budget_bytes=budget_bytes)
    assert found
    assert all(needs(fit) <= budget_bytes for fit in found)
    assert found[0].order.seconds > plain.order.seconds
    assert [fit.order.seconds for fit in found] == sorted(fit.order.seconds for fit in found)


def test_masks_and_signs_are_packed_where_that_is_cheapest(search, steady_prices):
    traced = stage_of(layers(nn.ReLU, nn.Dropout), steady_prices)
    budget_bytes = int(0.6 * needs(search.plain(traced)))
    best = search.within(traced, in_flight=3, budget_bytes=budget_bytes)[0]
    assert Choice.PACK in choices(traced, best)
    no_packs = StageSearch(cache=search.cache, may_pack=False, time_limit_seconds=1.0)
    for fit in no_packs.within(traced, in_flight=3, budget_bytes=budget_bytes):
        assert Choice.PACK not in choices(traced, fit)
        assert fit.order.seconds >= best.order.seconds


def test_swaps_that_hide_are_faster_than_repeats(search, steady_prices):
    traced = stage_of(layers(nn.GELU), steady_prices)
    budget_bytes = int(0.5 * needs(search.plain(traced)))
    repeating = search.within(traced, in_flight=3, budget_bytes=budget_bytes)[0]
    assert repeating.swap_bytes == 0
    swapping = StageSearch(cache=search.cache, tier=FAST, time_limit_seconds=1.5)
    best = swapping.within(traced, in_flight=3, budget_bytes=budget_bytes)[0]
    assert needs(best) <= budget_bytes
    assert best.order.seconds < repeating.order.seconds
    assert best.swap_bytes
    assert Choice.SWAP in choices(traced, best)


def test_the_smallest_need_is_that_of_an_order_that_is_found_again(search, steady_prices):
    traced = stage_of(layers(nn.GELU), steady_prices)
    smallest = min(map(needs, search.smallest(traced, in_flight=3, budget_bytes=0)))
    assert smallest < needs(search.plain(traced))
    assert search.within(traced, in_flight=3, budget_bytes=int(1.1 * smallest))


@pytest.mark.parametrize("tier", [None, FAST])
def test_the_smallest_order_is_found_again_however_short_the_search(search, steady_prices, tier):
    """Here the search gets nothing done in its time, as on a machine that is busy elsewhere."""
    traced = stage_of(layers(nn.GELU), steady_prices)
    search, short = (replace(search, tier=tier, time_limit_seconds=limit) for limit in (1.0, 1e-9))
    smallest = min(map(needs, search.smallest(traced, in_flight=3, budget_bytes=0)))
    fits = short.within(traced, in_flight=3, budget_bytes=smallest)
    assert min(map(needs, fits)) == smallest
    assert min(map(needs, short.smallest(traced, in_flight=3, budget_bytes=0))) == smallest


def test_what_is_sent_is_held_as_well_only_if_backward_reads_it(search, steady_prices):
    sent_bytes = 512 * 32 * 4
    assert search.plain(stage_of(layers(nn.GELU), steady_prices)).memory.made_bytes == sent_bytes
    relu = stage_of(layers(nn.ReLU), steady_prices)
    assert search.plain(relu).memory.made_bytes == 0  # its gradient reads the last ReLU's result


def test_gradients_for_other_stages_are_told_from_those_of_parameters(search, steady_prices):
    first = search.plain(stage_of(layers(nn.GELU), steady_prices))
    second = search.plain(stage_of(layers(nn.GELU), steady_prices, stage=1))
    assert (first.memory.made_back_bytes, first.seconds.backward_input) == (0, 0.0)
    assert second.memory.made_back_bytes == 512 * 32 * 4
    assert 0 < second.seconds.backward_input < second.seconds.backward


def test_seconds_count_repeats_and_waits_for_swaps(search, steady_prices):
    traced = stage_of(layers(nn.GELU), steady_prices)
    plain = search.plain(traced)
    budget_bytes = int(0.5 * needs(plain))
    slow = StageSearch(cache=search.cache, tier=SLOW, time_limit_seconds=1.5)
    for searched in (search, slow):
        for fit in searched.within(traced, in_flight=3, budget_bytes=budget_bytes):
            total = fit.seconds.forward + fit.seconds.backward
            assert total == pytest.approx(fit.order.seconds)
            assert total > plain.seconds.forward + plain.seconds.backward


def test_a_stage_is_described_by_what_it_keeps_and_what_not(search, steady_prices):
    traced = stage_of(layers(nn.ReLU), steady_prices)
    budget_bytes = int(0.7 * needs(search.plain(traced)))
    best = search.within(traced, in_flight=3, budget_bytes=budget_bytes)[0]
    told = described(traced, best, stage=0, num_samples=512, in_flight=3)
    assert told.needed_bytes == needs(best)
    assert sum(value.size_bytes for value in told.kept) <= told.held_bytes
    assert told.decisions
