"""Swaps: drawings of memory and of the lane, and that every op still sees the same values."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Op, Program
from bayplan.planning.memory.choices import NUM_CHOICES, Evaluator
from bayplan.planning.memory.search import plan_schedule
from bayplan.planning.memory.swaps import SwapPlan, choose_swaps, ease, offer, when_away
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import (
    Arrangement,
    LaneTime,
    Swap,
    Swapped,
    Tier,
    insert_swaps,
    lane_seconds,
    unroll,
)

# Repeatable: stopped by a number of evaluations, never by the clock.
STEADY = {"num_evaluations": 3000}


def replay_plain(program: Program):
    return replay_schedule(program, plain_schedule(program))


def peak_of(plan: SwapPlan, program: Program) -> int:
    return replay_plain(plan.arrangement.apply(program).program).peak_bytes


def names_in(swapped: Swapped) -> str:
    return " ".join(op.name for op in swapped.program.ops)


def time_of(swapped: Swapped, tier: Tier) -> LaneTime:
    return lane_seconds(swapped, plain_schedule(swapped.program), tier)


def test_a_swap_lowers_memory_as_drawn(make_chain):
    """Buffer 1 (10 bytes) is away from the end of f1 on and comes back for b1.

    step    f0  out  f1  away  f2  b2  back  here  b1  b0
    live    20   20  30    30  30  31    21    21  22  12     (41 at b2 without the swap)
    """
    chain = make_chain(3)
    swapped = insert_swaps(chain, [Swap(1, 2, (4,))])
    assert names_in(swapped) == "f0 out:f0 f1 away:f0 f2 b2 back:f0 here:f0 b1 b0"
    assert replay_plain(swapped.program).total_bytes == (20, 20, 30, 30, 30, 31, 21, 21, 22, 12)
    assert replay_plain(chain).peak_bytes == 41
    assert swapped.new_index == (0, 2, 4, 5, 8, 9)
    assert swapped.op_of == (0, -1, 1, -1, 2, 3, -1, -1, 4, 5)
    assert swapped.program.first_backward == 5
    (swap,) = swapped.swap_ops
    assert (swap.size_bytes, swap.out, swap.away, swap.returns) == (10, 1, 3, ((6, 7),))


def test_a_late_wait_holds_memory_as_drawn(make_chain):
    swapped = insert_swaps(make_chain(3), [Swap(1, 3, (3,))])
    assert names_in(swapped) == "f0 out:f0 f1 f2 away:f0 back:f0 b2 here:f0 b1 b0"
    assert swapped.program.first_backward == 5
    assert replay_plain(swapped.program).peak_bytes == 41


def many_readers() -> Program:
    """Buffer 1 is read by backward ops 2, 3 and 5."""
    ops = [
        Op(name="f", reads=(0,), writes=(1,), seconds=1.0),
        Op(name="g", reads=(1,), writes=(2,), seconds=1.0),
        Op(name="b0", reads=(1, 2), writes=(3,), seconds=1.0),
        Op(name="b1", reads=(1, 3), writes=(4,), seconds=1.0),
        Op(name="b2", reads=(4,), writes=(5,), seconds=1.0),
        Op(name="b3", reads=(1, 5), writes=(6,), seconds=1.0, takes_over=(1,)),
    ]
    return Program(
        buffers=(1, 8, 2, 2, 2, 2, 8),
        ops=tuple(ops),
        first_backward=2,
        inputs=frozenset({0}),
        outputs=frozenset({6}),
    )


def test_each_return_serves_the_readers_up_to_the_next():
    swapped = insert_swaps(many_readers(), [Swap(1, 2, (2, 4))])
    ops = {op.name: op for op in swapped.program.ops}
    assert names_in(swapped) == "f out:f g away:f back:f here:f b0 b1 back:f b2 here:f b3"
    assert ops["b0"].reads[0] == ops["b1"].reads[0] != ops["b3"].reads[0]
    assert ops["b3"].takes_over == ops["b3"].reads[:1]
    assert {swapped.buffer_of[ops[name].reads[0]] for name in ("b0", "b1", "b3")} == {1}


def test_readers_before_the_first_return_read_the_buffer_itself():
    swapped = insert_swaps(many_readers(), [Swap(1, 2, (4,))])
    ops = {op.name: op for op in swapped.program.ops}
    assert ops["b0"].reads[0] == ops["b1"].reads[0] == 1
    assert ops["b3"].reads[0] not in (1, 0)


@pytest.mark.parametrize(
    ("swaps", "message"),
    [
        ([Swap(9, 2, (2,))], "no buffer 9"),
        ([Swap(0, 2, (2,))], "an input"),
        ([Swap(3, 2, (3,))], "not made in forward"),
        ([Swap(1, 0, (2,))], r"must be in 1\.\.2"),
        ([Swap(1, 3, (2,))], r"must be in 1\.\.2"),
        ([Swap(1, 2, (4, 2))], "not ascending"),
        ([Swap(1, 2, (1,))], "needs a reader"),
        ([Swap(1, 2, (4, 5))], "needs a reader"),
        ([Swap(1, 2, (2,)), Swap(1, 2, (4,))], "swapped twice"),
    ],
)
def test_impossible_swaps_are_refused(swaps, message):
    with pytest.raises(ValueError, match=message):
        insert_swaps(many_readers(), swaps)


def values_seen(swapped: Swapped, original: Program) -> list[tuple]:
    """What each op of the original program reads: whose value lies there, after all copies."""
    values = {buffer: buffer for buffer in swapped.program.inputs}
    executions = original.executions(origin for origin in swapped.op_of if origin >= 0)
    seen = []
    for op, origin in zip(swapped.program.ops, swapped.op_of, strict=True):
        read = tuple(values[buffer] for buffer in op.reads)
        seen += [(origin, read)] if origin >= 0 else []
        made = next(executions).writes if origin >= 0 else read[:1]
        values.update(zip(op.writes, made, strict=True))
    return seen


def draw_schedule(data: st.DataObject, program: Program) -> tuple[int, ...]:
    evaluator = Evaluator(program)
    num_gaps = len(evaluator.gaps)
    choices = st.lists(st.integers(0, NUM_CHOICES - 1), min_size=num_gaps, max_size=num_gaps)
    schedule = evaluator.schedule(data.draw(choices))
    assume(schedule)
    return schedule


def swappable(program: Program) -> list[int]:
    forward = range(program.first_backward)
    return [
        buffer
        for buffer, readers in enumerate(program.readers)
        if program.producers[buffer] in forward
        and buffer not in program.outputs
        and max(readers, default=-1) >= program.first_backward
    ]


def draw_swap(data: st.DataObject, program: Program, buffer: int) -> Swap:
    first = program.first_backward
    readers = [reader for reader in program.readers[buffer] if reader >= first]
    chosen = data.draw(st.lists(st.sampled_from(readers), unique=True, min_size=1).map(sorted))
    backs, earliest = [], first
    for reader in chosen:
        backs.append(data.draw(st.integers(earliest, reader)))
        earliest = reader + 1
    away_before = data.draw(st.integers(program.producers[buffer] + 1, first))
    return Swap(buffer, away_before, tuple(backs))


@given(st.data())
def test_every_op_sees_the_same_values(programs, data):
    program = data.draw(programs)
    schedule = draw_schedule(data, program)
    unrolled = unroll(program, schedule).program
    swaps = tuple(
        draw_swap(data, unrolled, buffer)
        for buffer in swappable(unrolled)
        if data.draw(st.booleans())
    )
    arranged = Arrangement(schedule, swaps).apply(program)
    wanted = [op.reads for op in program.executions(schedule)]
    assert values_seen(arranged, program) == list(zip(schedule, wanted, strict=True))
    # Tokens are no copies, and a copy is as large as what it is a copy of.
    for size, old in zip(arranged.program.buffers, arranged.buffer_of, strict=True):
        assert size == (program.buffers[old] if old >= 0 else 0)


@given(st.data())
def test_unrolled_memory_is_that_of_the_schedule(programs, data):
    program = data.draw(programs)
    schedule = draw_schedule(data, program)
    unrolled, reference = unroll(program, schedule), replay_schedule(program, schedule)
    replay = replay_plain(unrolled.program)
    assert replay.total_bytes == reference.total_bytes
    assert replay.seconds == pytest.approx(reference.seconds)


@pytest.mark.parametrize(
    ("back_before", "seconds", "stall_seconds"),
    [
        (4, 11.0, 1.0),  # back at 6, waits until 7
        (3, 10.5, 0.0),  # back at 4, and b2 takes 0.5 longer until 5
    ],
)
def test_lane_as_drawn(make_chain, back_before, seconds, stall_seconds):
    """Copies out take 2 s, in 1 s; compute runs at half speed meanwhile.

    compute  f0 [  f1   ] f2 [   b2  ] wait [   b1  ][   b0  ]
    lane        [  out  ]            [  in ]
             0  1       3    4       6      7
    """
    swapped = insert_swaps(make_chain(3), [Swap(1, 2, (back_before,))])
    time = time_of(swapped, Tier(5.0, 10.0, slowdown=2.0))
    assert time == LaneTime(seconds, 4.0, stall_seconds, 3.0)


def test_copies_queue(make_chain):
    """f0 until 1, its copy until 3.5; f1 until 2, its copy until 6; both waits after f2, at 3."""
    swapped = insert_swaps(make_chain(3), [Swap(1, 3, (4,)), Swap(2, 3, (3,))])
    time = time_of(swapped, Tier(5.0, 1e9, latency_seconds=0.5))
    assert time.stall_seconds == pytest.approx(3.0 + 0.5 + 0.5)
    assert time.copy_seconds == pytest.approx(2 * 2.5 + 2 * 0.5)


def test_without_swaps_the_lane_adds_nothing(make_residual):
    residual = make_residual(2)
    time = time_of(insert_swaps(residual, []), Tier(1.0, 1.0, 1.0, 2.0))
    assert time.seconds == pytest.approx(residual.plain_seconds)
    assert (time.stall_seconds, time.copy_seconds) == (0, 0)


def test_calls_take_time_of_compute(make_chain):
    """Four calls of 0.25 s; the copy out is done when it is waited for, and so is that in."""
    chain = make_chain(3)
    swapped = insert_swaps(chain, [Swap(1, 2, (3,))])
    time = time_of(swapped, Tier(1e9, 1e9, call_seconds=0.25))
    assert time.seconds == pytest.approx(chain.plain_seconds + 1.0)
    assert time.stall_seconds == 0


@pytest.mark.parametrize(
    "settings",
    [(0.0, 1.0), (1.0, -1.0), (1.0, 1.0, -1.0), (1, 1, 0, 0.5), (1.0, 1.0, 0.0, 1.0, -1.0)],
)
def test_impossible_tiers_are_refused(settings):
    with pytest.raises(ValueError, match="a tier's"):
        Tier(*settings)


def test_waits_come_where_the_queue_is_done(make_chain):
    chain, tier = make_chain(4), Tier(10 / 1.5, 10.0)  # 1.5 s out; ops begin at 0, 1, 2, 3
    assert when_away(chain, [1], tier, only_hidden=True) == {1: 3}
    assert when_away(chain, [1, 2], tier, only_hidden=True) == {1: 3, 2: 4}
    assert when_away(chain, [1, 2, 3], tier, only_hidden=True) == {1: 3, 2: 4}
    assert when_away(chain, [1, 2, 3], tier, only_hidden=False) == {1: 3, 2: 4, 3: 4}


def test_returns_move_ahead_as_far_as_the_limit_allows(make_chain):
    chain, tier = make_chain(4), Tier(10.0, 10 / 4)  # 4 s in, ops of backward take 2 s
    late = [Swap(1, 2, (6,))]
    peak_bytes = replay_plain(insert_swaps(chain, late).program).peak_bytes
    (free,) = ease(chain, late, tier, limit_bytes=1000)
    (bound,) = ease(chain, late, tier, limit_bytes=peak_bytes)
    assert free.backs_before == (4,)
    assert bound.backs_before == (5,)  # b3, at 4, already is the peak
    assert replay_plain(insert_swaps(chain, [bound]).program).peak_bytes == peak_bytes
    assert time_of(insert_swaps(chain, [free]), tier).stall_seconds == 0
    assert time_of(insert_swaps(chain, [bound]), tier).stall_seconds == 2.0


@given(st.data())
def test_eased_swaps_stay_within_the_limit(programs, data):
    program = data.draw(programs)
    swaps = [draw_swap(data, program, buffer) for buffer in swappable(program)]
    peak_bytes = replay_plain(insert_swaps(program, swaps).program).peak_bytes
    limit_bytes = peak_bytes + data.draw(st.integers(0, 10))
    tier = Tier(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    eased = insert_swaps(program, ease(program, swaps, tier, limit_bytes=limit_bytes))
    assert replay_plain(eased.program).peak_bytes <= limit_bytes


@given(st.data())
def test_what_is_planned_with_an_offer_can_be_done(programs, data):
    program = data.draw(programs)
    aways = {
        buffer: data.draw(st.integers(program.producers[buffer] + 1, program.first_backward))
        for buffer in swappable(program)
        if data.draw(st.booleans())
    }
    offered = offer(program, aways, fetch_seconds=lambda size_bytes: 0.25)
    assert replay_plain(offered.program).peak_bytes == replay_plain(program).peak_bytes
    schedule = draw_schedule(data, offered.program)
    arranged = offered.settle(schedule).apply(program)
    planned_bytes = replay_schedule(offered.program, schedule).peak_bytes
    assert replay_plain(arranged.program).peak_bytes <= planned_bytes


def test_nothing_is_swapped_where_everything_fits(make_chain):
    chain = make_chain(5)
    plan = choose_swaps(chain, 1000, Tier(1.0, 1.0), **STEADY)
    assert plan.arrangement == Arrangement(plain_schedule(chain))


def test_a_fast_tier_makes_repeats_needless(make_chain):
    chain = make_chain(12)
    limit_bytes = replay_plain(chain).peak_bytes // 2
    plan = choose_swaps(chain, limit_bytes, Tier(100.0, 100.0), **STEADY)
    assert plan.arrangement.schedule == plain_schedule(chain)
    assert peak_of(plan, chain) <= limit_bytes
    assert plan.time.stall_seconds == 0
    assert plan.time.seconds == pytest.approx(chain.plain_seconds)


def test_a_slow_tier_is_left_alone(make_chain):
    chain = make_chain(12)
    limit_bytes = replay_plain(chain).peak_bytes // 2
    plan = choose_swaps(chain, limit_bytes, Tier(0.1, 0.1), **STEADY)
    assert plan.arrangement.swaps == ()
    repeats_only = plan_schedule(chain, limit_bytes, **STEADY)
    assert plan.time.seconds == pytest.approx(repeats_only.seconds)


def test_repeats_and_swaps_together_beat_either(make_residual):
    residual = make_residual(6)
    limit_bytes = int(0.4 * replay_plain(residual).peak_bytes)
    tier = Tier(50.0, 50.0, 0.1, 1.05)  # too slow for all: 20 s for what a convolution makes in 10
    plan = choose_swaps(residual, limit_bytes, tier, **STEADY)
    repeats_only = plan_schedule(residual, limit_bytes, **STEADY)
    assert plan.arrangement.swaps
    assert len(plan.arrangement.schedule) > len(residual.ops)
    assert peak_of(plan, residual) <= limit_bytes
    assert plan.time.seconds < 0.97 * repeats_only.seconds


@given(st.data())
def test_chosen_swaps_keep_their_promises(programs, data):
    program = data.draw(programs)
    limit_bytes = int(replay_plain(program).peak_bytes * data.draw(st.floats(0.6, 1.0)))
    tier = Tier(data.draw(st.integers(1, 50)), data.draw(st.integers(1, 50)), 0.1, 1.1)
    try:
        chosen = choose_swaps(program, limit_bytes, tier, num_evaluations=50)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):
            plan_schedule(program, limit_bytes, num_evaluations=50)
        return
    assert peak_of(chosen, program) <= limit_bytes
    assert chosen.time == time_of(chosen.arrangement.apply(program), tier)
    assert chosen.time.seconds >= program.plain_seconds - 1e-9


def unrepeatable_chain(make_chain) -> Program:
    chain = make_chain(6)
    ops = tuple(structs.replace(op, can_repeat=False) for op in chain.ops)
    return structs.replace(chain, ops=ops)


def test_waiting_for_copies_is_the_last_resort(make_chain):
    program = unrepeatable_chain(make_chain)
    tier = Tier(1.0, 1.0)  # 10 s for what is made in one
    with pytest.raises(DoesNotFit):
        plan_schedule(program, 50, **STEADY)
    plan = choose_swaps(program, 50, tier, **STEADY)
    assert plan.arrangement.swaps
    assert peak_of(plan, program) <= 50
    assert plan.time.stall_seconds > 0


def test_what_no_swap_can_make_fit_is_refused(make_chain):
    with pytest.raises(DoesNotFit, match="needs"):
        choose_swaps(make_chain(6), 25, Tier(10.0, 10.0), **STEADY)
