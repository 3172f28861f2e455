"""Stages that recompute, pack and swap, on real ranks with three micro-batches in flight.

Nothing is searched for: the orders repeat, pack or swap all they can, so that every way is taken.
The numbers are those of one device, and bit for bit those of the same plan that keeps all.
"""

from functools import partial

import msgspec
import pytest

from bayplan.costing.pricing import free_prices
from bayplan.data.plan import StageOrder
from bayplan.devices.device import HOST
from bayplan.planning.memory.orders import order_of
from bayplan.running.swaps.lanes import lies_in_memory
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Swap
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole_trace import trace_whole
from bayplan.tracing.traced_step import MemoryContext

TOLERANCE = 1e-12
NUM_MICRO_BATCHES = 3
PIECE = 512  # samples, so that even masks are worth packing
BATCH = NUM_MICRO_BATCHES * PIECE


def swap_all(program):
    """Everything that backward reads leaves at once and comes back for each of its readers."""
    first = program.first_backward
    swaps = []
    for buffer in program.movable:
        readers = tuple(reader for reader in program.readers[buffer] if reader >= first)
        if readers and program.buffers[buffer]:
            swaps.append(Swap(buffer, first, readers))
    return Arrangement(plain_schedule(program), tuple(swaps))


def with_orders(plan, step, *, ways):
    """The plan with an order for each stage: `ways` make an arrangement of a packed program."""
    whole = trace_whole(step, num_samples=PIECE)
    staged = StagedStep(whole, tuple(stage.first for stage in plan.stages))
    context = MemoryContext(prices=free_prices, granularity_bytes=HOST.granularity_bytes)
    orders = []
    for stage, way in enumerate(ways):
        traced = staged.traced(staged.graph(stage), context)
        packs = tuple(pack.name for pack in traced.packs)
        program = traced.with_packs(packs).program
        plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
        order = order_of(
            program,
            way(program),
            strategy="all",
            packs=packs,
            plain_peak_bytes=plain_bytes,
            plain_seconds=0.0,
        )
        orders.append(StageOrder(stage=stage, num_samples=PIECE, order=order))
    return msgspec.structs.replace(plan, stage_orders=tuple(orders))


@pytest.fixture(scope="module")
def results(make_case, start, repeat_everything, tmp_path_factory):
    disk = tmp_path_factory.mktemp("swap")
    if lies_in_memory(disk):
        pytest.skip("the tests' folder lies in memory")
    make = partial(make_case, placement="0:0.0:1", batch=BATCH, swap=str(disk))
    gpipe = {"num_micro_batches": NUM_MICRO_BATCHES, "schedule": "gpipe"}
    one = partial(with_orders, ways=(swap_all, repeat_everything))
    other = partial(with_orders, ways=(repeat_everything, swap_all))
    cases = [
        make("keep", wishes=gpipe),
        make("swap-then-repeat", wishes=gpipe, edit=one),
        make("repeat-then-swap", wishes=gpipe, edit=other),
        make("stale", wishes={**gpipe, "staleness": 1}),
        make("stale-swap", wishes={**gpipe, "staleness": 1}, edit=one),
    ]
    ranks = start()
    ranks.run_all(cases, num_ranks=2)
    assert list(disk.iterdir()) == []  # files without names
    logs = [path.read_text() for path in (ranks.folder / "logs").iterdir()]
    assert not any("could not be swapped" in log for log in logs)  # there was room for all
    return {case.name: ranks.results(case, num_ranks=2) for case in cases}


def test_the_orders_do_pack_swap_and_repeat(make_case, repeat_everything):
    edit = partial(with_orders, ways=(swap_all, repeat_everything))
    case = make_case("any", "0:0.0:1", batch=BATCH, wishes={"num_micro_batches": 3}, edit=edit)
    first, second = (one.order for one in case.plan().stage_orders)
    assert first.swaps
    assert {name.partition(":")[0] for name in first.packs} == {"mask", "sign"}
    assert len(second.schedule) > len(set(second.schedule))


@pytest.mark.parametrize("name", ["swap-then-repeat", "repeat-then-swap"])
def test_numbers_are_those_of_one_device_and_the_bits_those_of_keeping_all(results, name):
    for result, kept in zip(results[name], results["keep"], strict=True):
        assert result["loss"] <= TOLERANCE
        assert result["state"] <= TOLERANCE
        assert result["random_state"]
        assert result["moved"]
        assert result["digest"] == kept["digest"]


def test_batches_that_overlap_have_files_with_room_for_both(results):
    for result, kept in zip(results["stale-swap"], results["stale"], strict=True):
        assert result["loss"] <= TOLERANCE
        assert result["digest"] == kept["digest"]
