"""What micro-batches in flight hold, told to a planner that knows peaks alone."""

from functools import partial

import pytest
from msgspec import structs

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Op, Program
from bayplan.planning.memory.search import plan_schedule
from bayplan.planning.memory.swaps import choose_swaps
from bayplan.planning.pipelines.stage_orders import (
    cap_held,
    handing_on,
    with_op_between,
    without_op_between,
)
from bayplan.simulating.rank_memory import StageMemory, stage_memory
from bayplan.simulating.schedule import check_schedule, plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Swap, Tier

# Repeatable: stopped by a number of evaluations, never by the clock.
STEADY_PLAN = partial(plan_schedule, num_evaluations=3000)
FAST = Tier(out_bytes_per_second=1e12, in_bytes_per_second=1e12)


@pytest.fixture
def chain() -> Program:
    """A stage of six layers: a value arrives, each makes one of 10 bytes, a gradient comes in."""
    arrival = Op(
        name="arrival", reads=(), writes=(0,), seconds=0.0, can_repeat=False, is_callers=True
    )
    layers = [Op(name=f"f{at}", reads=(at,), writes=(at + 1,), seconds=1.0) for at in range(6)]
    loss = Op(name="loss", reads=(6,), writes=(7,), seconds=0.0, can_repeat=False, is_callers=True)
    back = [
        Op(name=f"b{at}", reads=(at, 12 - at), writes=(13 - at,), seconds=2.0)
        for at in range(5, -1, -1)
    ]
    return Program(
        buffers=(10,) * 14,
        ops=(arrival, *layers, loss, *back),
        first_backward=8,
        outputs=frozenset({6, 13}),
    )


def needed_bytes(program: Program, arrangement: Arrangement, in_flight: int) -> int:
    swapped = arrangement.apply(program).program
    return stage_memory(swapped, plain_schedule(swapped)).needed_bytes(in_flight)


def test_what_is_held_is_what_backward_reads_of_forward(chain):
    # What arrived and the results of five layers; at f5 also its result, which is sent, and at b5
    # two gradients.
    memory = stage_memory(chain, plain_schedule(chain))
    assert memory == StageMemory(
        forward_bytes=70,
        held_bytes=60,
        made_bytes=10,
        backward_bytes=80,
        adding_bytes=80,
        made_back_bytes=0,
    )
    assert memory.needed_bytes(3) == 3 * 60 + 20


def test_what_is_sent_is_no_longer_the_stages_in_backward(chain):
    assert handing_on(chain).outputs == {13}
    read_again = structs.replace(chain.ops[8], reads=(*chain.ops[8].reads, 6))
    reads_it = structs.replace(chain, ops=(*chain.ops[:8], read_again, *chain.ops[9:]))
    assert handing_on(reads_it).outputs == {6, 13}


def test_waits_for_swaps_behind_the_loss_do_not_make_its_gradient_held(chain):
    arrangement = Arrangement(plain_schedule(chain), (Swap(3, 8, (9,)),))
    swapped = arrangement.apply(chain).program
    assert swapped.ops[swapped.first_backward - 1].name == "away:f2"
    memory = stage_memory(swapped, plain_schedule(swapped))
    assert (memory.held_bytes, memory.forward_bytes) == (50, 70)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("cap_bytes", [20, 30, 40, 50])
def test_a_plan_within_the_cap_needs_no_more_than_the_budget(chain, in_flight, cap_bytes):
    budget_bytes = in_flight * cap_bytes + 50
    capped, limit_bytes = cap_held(
        chain, cap_bytes=cap_bytes, in_flight=in_flight, budget_bytes=budget_bytes
    )
    planned = STEADY_PLAN(capped, limit_bytes, time_limit_seconds=60)
    found = without_op_between(capped, Arrangement(planned.schedule))
    check_schedule(chain, found.schedule)
    memory = stage_memory(chain, found.schedule)
    assert memory.needed_bytes(in_flight) <= budget_bytes
    assert in_flight == 1 or memory.held_bytes <= cap_bytes
    assert replay_schedule(chain, found.schedule).seconds == planned.seconds


def test_a_cap_that_nothing_keeps_to_is_refused(chain):
    capped, limit_bytes = cap_held(
        chain, cap_bytes=5, in_flight=4, budget_bytes=60
    )  # what arrived has 10
    with pytest.raises(DoesNotFit):
        STEADY_PLAN(capped, limit_bytes, time_limit_seconds=60)


def test_swaps_keep_to_the_cap_as_well(chain):
    costly = structs.replace(
        chain, ops=tuple(structs.replace(op, seconds=9 * op.seconds) for op in chain.ops)
    )
    capped, limit_bytes = cap_held(costly, cap_bytes=20, in_flight=3, budget_bytes=100)
    chosen = choose_swaps(capped, limit_bytes, FAST, num_evaluations=3000, time_limit_seconds=60)
    found = without_op_between(capped, chosen.arrangement)
    assert found.swaps
    assert needed_bytes(costly, found, 3) <= 100


def test_steps_after_the_op_between_are_counted_without_it(chain):
    program = with_op_between(chain, workspace_bytes=7)
    assert program.ops[8].workspace_bytes == 7
    capped, _ = cap_held(chain, cap_bytes=60, in_flight=2, budget_bytes=500)
    given = Arrangement((*range(10), 2, *range(10, 15)), (Swap(4, 8, (8,)), Swap(3, 7, (10, 13))))
    found = without_op_between(capped, given)
    assert found.schedule == (*range(9), 2, *range(9, 14))
    assert found.swaps == (Swap(4, 8, (8,)), Swap(3, 7, (9, 12)))
