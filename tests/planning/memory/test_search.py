"""The planner's promises: valid, within the limit, repeatable, interruptible, explained."""

import math
import signal
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Op, Program
from bayplan.planning.memory import moves, search
from bayplan.planning.memory.annealing import checkpoint_starts
from bayplan.planning.memory.bounds import least_peak
from bayplan.planning.memory.choices import Evaluator
from bayplan.planning.memory.moves import Budget, SearchOptions
from bayplan.simulating.schedule import alive_at, check_schedule, plain_schedule, replay_schedule

# Stopped by a number of evaluations and never by the clock, however busy the machine is.
plan_schedule = partial(search.plan_schedule, time_limit_seconds=600)
plan_rounds = partial(search.plan_rounds, time_limit_seconds=600)
smallest_peak = partial(search.smallest_peak, time_limit_seconds=600)


def plain_peak(program: Program) -> int:
    return replay_schedule(program, plain_schedule(program)).peak_bytes


@given(st.data())
def test_plans_are_valid_and_within_the_limit(programs, cache_dir, data):
    program = data.draw(programs)
    limit_bytes = data.draw(st.integers(0, plain_peak(program)))
    try:
        planned = plan_schedule(program, limit_bytes, num_evaluations=1000, cache_dir=cache_dir)
    except DoesNotFit:
        return
    check_schedule(program, planned.schedule)
    replay = replay_schedule(program, planned.schedule)
    assert (replay.peak_bytes, replay.seconds) == (planned.peak_bytes, planned.seconds)
    assert planned.peak_bytes <= limit_bytes
    assert planned.seconds >= planned.plain_seconds == program.plain_seconds
    assert 0 <= planned.gap < math.inf


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_never_slower_than_checkpointing(make_residual, cache_dir, share):
    """Even with no budget for anything else."""
    program = make_residual(6)
    limit_bytes = int(share * plain_peak(program))
    evaluator = Evaluator(program)
    recipes = checkpoint_starts(evaluator)
    outcomes = [evaluator.evaluate(recipe, limit_bytes=limit_bytes) for recipe in recipes]
    fitting = [outcome.seconds for outcome in outcomes if outcome.peak_bytes <= limit_bytes]
    for num_evaluations in (1, 20_000):
        planned = plan_schedule(
            program, limit_bytes, num_evaluations=num_evaluations, cache_dir=cache_dir
        )
        assert planned.seconds <= min(fitting) + 1e-9


def test_what_greedy_drops_make_fit_is_found_without_any_time(make_residual, cache_dir):
    """No recipe of checkpointing fits here; a busy machine may have no time for anything else."""
    program = make_residual(3)
    limit_bytes = int(0.6 * plain_peak(program))
    planned = plan_schedule(
        program, limit_bytes, num_evaluations=5000, time_limit_seconds=1e-9, cache_dir=cache_dir
    )
    assert planned.peak_bytes <= limit_bytes


def test_same_seed_and_evaluations_give_the_same_plan(make_residual, cache_dir):
    program = make_residual(5)
    limit_bytes = int(0.55 * plain_peak(program))
    first, second = (
        plan_schedule(
            program,
            limit_bytes,
            seed=7,
            num_evaluations=5000,
            cache_dir=cache_dir,
        )
        for _ in range(2)
    )
    assert first == second


def test_without_compiler_the_plan_is_the_same(
    make_residual, cache_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = make_residual(2)
    limit_bytes = int(0.7 * plain_peak(program))
    compiled = plan_schedule(program, limit_bytes, num_evaluations=2000, cache_dir=cache_dir)
    monkeypatch.setenv("PATH", str(tmp_path))
    slow = plan_schedule(
        program,
        limit_bytes,
        num_evaluations=2000,
        cache_dir=tmp_path / "empty",
    )
    assert slow == compiled


def test_progress_is_told(make_residual, cache_dir):
    program = make_residual(4)
    shares: list[float] = []
    plan_schedule(
        program,
        int(0.6 * plain_peak(program)),
        num_evaluations=5000,
        on_progress=shares.append,
        cache_dir=cache_dir,
    )
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] == 1.0


def test_a_search_that_no_longer_improves_stops_early(make_residual, cache_dir):
    program = make_residual(4)
    shares: list[float] = []
    begun = time.process_time()
    planned = plan_schedule(
        program,
        int(0.6 * plain_peak(program)),
        num_evaluations=10**9,
        on_progress=shares.append,
        cache_dir=cache_dir,
    )
    assert time.process_time() - begun < 60
    assert shares[-2] < 0.01 < shares[-1] == 1.0
    short = plan_schedule(
        program, int(0.6 * plain_peak(program)), num_evaluations=20_000, cache_dir=cache_dir
    )
    assert planned.seconds <= short.seconds


def test_each_round_is_as_fast_as_the_one_before(make_residual, cache_dir):
    program = make_residual(6)
    question = {"limit_bytes": int(0.5 * plain_peak(program)), "num_evaluations": 200_000}
    seconds = [plan.seconds for plan in plan_rounds(program, **question, cache_dir=cache_dir)]
    assert len(seconds) > 1
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == plan_schedule(program, **question, cache_dir=cache_dir).seconds


def test_time_between_rounds_is_the_callers(make_residual, monkeypatch):
    now = 0.0
    monkeypatch.setattr(moves.time, "monotonic", lambda: now)
    budget = Budget(make_residual(4), SearchOptions(time_limit_seconds=10))
    now = 4.0
    with budget.paused():
        now = 1000.0
    assert budget.share_used == pytest.approx(0.4)
    now += 6.0
    assert budget.is_out


def test_interrupt_ends_a_long_search(make_residual, cache_dir):
    program = make_residual(60)  # its first two rounds alone take seconds
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    # Again and again: one that comes inside a callback of the garbage collector is swallowed.
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            plan_schedule(
                program,
                int(0.4 * plain_peak(program)),
                time_limit_seconds=1e6,
                num_evaluations=10**12,
                cache_dir=cache_dir,
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_plain_is_returned_where_it_fits(make_residual, cache_dir):
    program = make_residual(2)
    planned = plan_schedule(program, plain_peak(program), cache_dir=cache_dir)
    assert planned.schedule == plain_schedule(program)
    assert (planned.peak_bytes, planned.gap) == (plain_peak(program), 0.0)


def test_start_that_fits_is_never_lost(make_chain, cache_dir):
    """One evaluation: nothing can be searched, so the start itself is what comes back."""
    chain = make_chain(6)
    start = (0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 0, 1, 2, 8, 0, 1, 9, 0, 10, 11)
    planned = plan_schedule(chain, 31, starts=[start], num_evaluations=1, cache_dir=cache_dir)
    assert (planned.peak_bytes, planned.seconds) == (31, 28.0)


def test_start_that_does_not_fit_is_welcome(make_chain, cache_dir):
    chain = make_chain(6)
    starts = [plain_schedule(chain), (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 8, 9, 10, 11)]
    planned = plan_schedule(chain, 47, starts=starts, num_evaluations=5000, cache_dir=cache_dir)
    assert planned.seconds == 21.0


def test_start_that_is_no_schedule_is_refused(make_chain, cache_dir):
    with pytest.raises(ValueError, match="missing"):
        plan_schedule(make_chain(2), 31, starts=[(0, 1)], cache_dir=cache_dir)


def test_refusal_with_proof(make_residual, cache_dir):
    program = make_residual(2)
    with pytest.raises(DoesNotFit) as caught:
        plan_schedule(program, 3000, num_evaluations=2000, cache_dir=cache_dir)
    text = str(caught.value)
    bound = least_peak(program)
    assert text.startswith(f"{program.ops[bound.op_index].name} needs 4.")
    assert "in every schedule, limit 2.9 KiB. Alive there: " in text
    fits = int(text.split("Fits with ")[1].split(" bytes")[0])
    assert bound.peak_bytes <= fits < plain_peak(program)
    planned = plan_schedule(program, fits, num_evaluations=20_000, cache_dir=cache_dir)
    assert planned.peak_bytes <= fits


def test_refusal_names_the_module_of_an_operator(make_residual, cache_dir):
    program = make_residual(2)
    op_index = least_peak(program).op_index
    ops = list(program.ops)
    ops[op_index] = msgspec.structs.replace(ops[op_index], place="layer4.2.conv3")
    placed = msgspec.structs.replace(program, ops=tuple(ops))
    with pytest.raises(DoesNotFit, match=rf"{ops[op_index].name} of layer4\.2\.conv3 needs 4\."):
        plan_schedule(placed, 3000, num_evaluations=2000, cache_dir=cache_dir)


def test_refusal_without_proof_names_what_is_alive(make_residual, optimal_seconds, cache_dir):
    """No op alone needs more than this, yet no schedule exists."""
    program = make_residual(1)
    limit_bytes = least_peak(program).peak_bytes
    assert optimal_seconds(program, limit_bytes) == math.inf
    with pytest.raises(
        DoesNotFit, match=r"in the smallest schedule found, limit 4\.0 KiB"
    ) as caught:
        plan_schedule(program, limit_bytes, num_evaluations=5000, cache_dir=cache_dir)
    smallest = smallest_peak(program, num_evaluations=5000, cache_dir=cache_dir)
    step = replay_schedule(program, smallest.schedule).peak_step
    largest = max(
        set(alive_at(program, smallest.schedule, step)) - program.outputs,
        key=lambda buffer: program.buffers[buffer],
    )
    assert program.ops[program.producers[largest]].name in str(caught.value)
    assert f"Fits with {smallest.peak_bytes} bytes" in str(caught.value)


def test_smallest_peak_of_a_chain(make_chain, cache_dir):
    planned = smallest_peak(make_chain(6), num_evaluations=20_000, cache_dir=cache_dir)
    assert planned.peak_bytes == 31


def single(**changes) -> Program:
    ops = (Op(name="f", reads=(0,), writes=(1,), seconds=1.0),)
    fields = {"buffers": (4, 8), "ops": ops, "first_backward": 1, "inputs": frozenset({0})}
    return Program(**{**fields, **changes})


@pytest.mark.parametrize(
    "program",
    [
        single(),
        single(first_backward=0),
        single(buffers=(0, 0)),
        single(
            buffers=(), ops=(Op(name="f", reads=(), writes=(), seconds=0.0),), inputs=frozenset()
        ),
    ],
)
def test_single_op(program, cache_dir):
    peak_bytes = plain_peak(program)
    planned = plan_schedule(program, peak_bytes, cache_dir=cache_dir)
    assert planned.schedule == (0,)
    assert smallest_peak(program, cache_dir=cache_dir).peak_bytes == peak_bytes
    with pytest.raises(DoesNotFit, match="f needs"):
        plan_schedule(program, peak_bytes - 1, cache_dir=cache_dir)


def test_forward_alone_cannot_be_changed(make_chain, cache_dir):
    chain = make_chain(3)
    forward = Program(
        buffers=chain.buffers[:4],
        ops=chain.ops[:3],
        first_backward=3,
        inputs=chain.inputs,
        outputs=frozenset({1}),
    )
    assert smallest_peak(forward, cache_dir=cache_dir).schedule == (0, 1, 2)
    with pytest.raises(DoesNotFit):
        plan_schedule(forward, plain_peak(forward) - 1, cache_dir=cache_dir)


def test_steps_that_cost_nothing(make_chain, cache_dir):
    """Prices may be unknown (zero): any schedule that fits is right."""
    chain = make_chain(6)
    free = Program(
        buffers=chain.buffers,
        ops=tuple(
            Op(name=op.name, reads=op.reads, writes=op.writes, seconds=0.0) for op in chain.ops
        ),
        first_backward=chain.first_backward,
        inputs=chain.inputs,
        outputs=chain.outputs,
    )
    planned = plan_schedule(free, 31, num_evaluations=20_000, cache_dir=cache_dir)
    assert (planned.peak_bytes, planned.seconds, planned.gap) == (31, 0.0, 0.0)


def test_alive_at_adds_up_to_the_curve(make_residual, cache_dir):
    program = make_residual(2)
    schedule = smallest_peak(program, num_evaluations=3000, cache_dir=cache_dir).schedule
    replay = replay_schedule(program, schedule)
    for step in range(len(schedule)):
        alive = alive_at(program, schedule, step)
        total = program.always_bytes + sum(program.buffers[buffer] for buffer in alive)
        saved = program.buffers[replay.taken_over[step]] if replay.taken_over[step] else 0
        # A repeat may hold a second, temporary copy of an output (here 40 bytes at most).
        assert 0 <= replay.total_bytes[step] - (total - saved) <= 40
