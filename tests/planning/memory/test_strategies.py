"""The reference strategies: their rules on drawings, and valid schedules on anything."""

import math

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from msgspec import structs

from bayplan.data.errors import UsageError
from bayplan.data.program import Op, Program
from bayplan.planning.memory.strategies import (
    Strategy,
    checkpoint,
    is_dear,
    keep,
    memory_checkpoints,
    ome,
    repeat_segments,
    swap,
)
from bayplan.simulating.schedule import check_schedule, plain_schedule, replay_schedule
from bayplan.simulating.swaps import Tier


def peak_of(strategy: Strategy, program: Program) -> int:
    arranged = strategy(program).apply(program).program
    return replay_schedule(arranged, plain_schedule(arranged)).peak_bytes


def repeats_of(strategy: Strategy, program: Program) -> list[str]:
    schedule = strategy(program).schedule
    return sorted(program.ops[i].name for i in set(schedule) if schedule.count(i) > 1)


def test_keep_is_plain(make_residual):
    residual = make_residual(2)
    arrangement = keep()(residual)
    assert arrangement.schedule == plain_schedule(residual)
    assert arrangement.swaps == ()
    assert arrangement.apply(residual).program == residual


def test_segments_are_made_again_as_drawn(make_chain):
    """Buffer 2, made by f1, is kept: f2 and f3 are repeated before b3, f0 before b1."""
    chain = make_chain(4)
    assert repeat_segments(chain, [2]) == (0, 1, 2, 3, 2, 3, 4, 5, 0, 6, 7)
    assert repeat_segments(chain, [1, 2, 3, 4]) == plain_schedule(chain)
    assert repeat_segments(chain, []) == (0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7)


def test_outputs_do_not_join_segments():
    """Statistics, as of a normalization, leave forward at its end: that is no way around."""
    ops = [
        Op(name="norm_0", reads=(0,), writes=(1, 2), seconds=1.0),
        Op(name="mid", reads=(1,), writes=(3,), seconds=1.0),
        Op(name="norm_1", reads=(3,), writes=(4, 5), seconds=1.0),
        Op(name="loss", reads=(4, 2, 5), writes=(6,), seconds=1.0),
        Op(name="b1", reads=(4, 6), writes=(7,), seconds=1.0),
        Op(name="b0", reads=(1, 7), writes=(8,), seconds=1.0),
    ]
    program = Program(
        buffers=(1,) * 9,
        ops=tuple(ops),
        first_backward=4,
        inputs=frozenset({0}),
        outputs=frozenset({2, 5, 8}),
    )
    assert repeat_segments(program, [3]) == (0, 1, 2, 3, 2, 3, 4, 0, 5)


def test_memory_mode_keeps_every_fourth_of_sixteen(make_chain):
    """16 bottlenecks, N = 16: every fourth, and the first four are skipped."""
    assert memory_checkpoints(make_chain(17), least_bytes=0) == (5, 9, 13)


@pytest.mark.parametrize("num_layers", [16, 49, 100, 225])
def test_memory_mode_needs_the_root_of_a_chain(make_chain, num_layers):
    chain = make_chain(num_layers, gradient=0)
    strategy = checkpoint("memory", least_bytes=0)
    root = math.sqrt(num_layers)
    assert peak_of(keep(), chain) == 10 * (num_layers + 1)
    assert peak_of(strategy, chain) <= 10 * (2 * root + 3)
    assert len(strategy(chain).schedule) <= 3 * num_layers


def test_only_block_ends_are_bottlenecks(make_residual):
    """Inside a block the skip runs beside; but the first block's skip is the image, an input."""
    residual = make_residual(6)
    kept = memory_checkpoints(residual, least_bytes=100)
    makers = {residual.ops[residual.producers[buffer]].name for buffer in kept}
    first_block = {f"{kind}_{i}" for kind in ("conv", "norm", "relu") for i in (0, 1)}
    ends = {f"add_{block}" for block in range(6)} | {f"relu_{2 * b + 1}" for b in range(6)}
    assert makers <= first_block | ends
    assert len(makers & ends) >= 2


def test_small_buffers_and_normalizations_are_no_checkpoints(make_chain):
    chain = make_chain(9)
    with pytest.raises(UsageError, match="bottleneck"):
        checkpoint("memory")(chain)
    ops = [structs.replace(op, name=f"native_batch_norm_{i}") for i, op in enumerate(chain.ops)]
    with pytest.raises(UsageError, match="bottleneck"):
        checkpoint("memory", least_bytes=0)(structs.replace(chain, ops=tuple(ops)))


def test_speed_mode_repeats_nothing_dear(make_residual):
    residual = make_residual(3)
    repeats = repeats_of(checkpoint("speed"), residual)
    assert any(name.startswith("norm") for name in repeats)
    assert not any(is_dear(name) for name in repeats)
    assert peak_of(checkpoint("speed"), residual) < peak_of(keep(), residual)


@pytest.mark.parametrize(
    "name",
    [
        *("convolution", "convolution_3", "mm_2", "addmm", "bmm_11", "baddbmm_1", "linear"),
        *("_scaled_dot_product_flash_attention_for_cpu_4", "scaled_dot_product_attention"),
    ],
)
def test_dear_names(name):
    assert is_dear(name)


@pytest.mark.parametrize("name", ["relu", "convert_element_type_1", "add_2", "mmm", "native_conv"])
def test_cheap_names(name):
    assert not is_dear(name)


def test_all_activations_are_swapped_as_drawn(make_chain):
    """Ops f0..f3 are 0..3, b3..b0 are 4..7; buffer 4 is read by b3 alone, buffer 1 by f1, b1."""
    chain = make_chain(4)
    swaps = {s.buffer: (s.away_before, s.backs_before) for s in swap()(chain).swaps}
    assert swaps == {1: (3, (5,)), 2: (4, (4,)), 3: (4, (4,)), 4: (4, (4,))}


def test_sums_stay(make_residual):
    residual = make_residual(2)
    made_by = {residual.ops[residual.producers[s.buffer]].name for s in swap()(residual).swaps}
    assert {"conv_0", "relu_0"} <= made_by
    assert not any(name.startswith("add") for name in made_by)


def test_a_tier_tells_when_copies_out_are_done(make_chain):
    """Each takes 1.5 s, ops of forward take one: 1 is done at 2.5, 2 at 4, forward ends at 4."""
    arrangement = swap(tier=Tier(10 / 1.5, 1.0))(make_chain(4))
    assert [s.away_before for s in arrangement.swaps] == [3, 4, 4, 4]


def test_each_backward_reader_has_its_own_copy():
    ops = [Op(name="f", reads=(0,), writes=(1,), seconds=1.0)]
    ops += [
        Op(name=f"b{i}", reads=(1,) if i in (3, 4, 7) else (0,), writes=(2 + i,), seconds=1.0)
        for i in range(8)
    ]
    program = Program(
        buffers=(1, 8, *[1] * 8), ops=tuple(ops), first_backward=1, inputs=frozenset({0})
    )
    # One op ahead of ops 4, 5 and 8, but not before the reader before has run.
    assert swap()(program).swaps[0].backs_before == (3, 5, 7)


def test_ome_swaps_checkpoints_that_one_backward_op_reads(make_chain):
    chain = make_chain(17)
    assert [s.buffer for s in ome(least_bytes=0)(chain).swaps] == [5, 9, 13]
    # The backward op that reads buffer 10, b10, now reads buffer 9 as well.
    twice = [
        structs.replace(op, reads=(*op.reads, 9)) if op.name == "b10" else op for op in chain.ops
    ]
    twice_read = structs.replace(chain, ops=tuple(twice))
    assert [s.buffer for s in ome(least_bytes=0)(twice_read).swaps] == [5, 13]


def test_ome_needs_less_than_its_checkpoints_alone(make_chain):
    chain = make_chain(65)
    alone, hybrid = checkpoint(least_bytes=0), ome(least_bytes=0)
    assert hybrid(chain).schedule == alone(chain).schedule
    # Nine of ten checkpoints are out while the last segment is made again, at the peak.
    assert peak_of(hybrid, chain) < peak_of(alone, chain) - 40


@given(st.data())
def test_every_strategy_is_valid_on_anything(programs, data):
    program = data.draw(programs)
    tier = data.draw(st.sampled_from([None, Tier(3.0, 3.0)]))
    strategies = [
        keep(),
        checkpoint("memory", least_bytes=0),
        checkpoint("speed"),
        swap(tier=tier),
        ome(least_bytes=0, tier=tier),
    ]
    strategy = data.draw(st.sampled_from(strategies))
    try:
        arrangement = strategy(program)
    except UsageError:  # no bottleneck
        reject()
    check_schedule(program, arrangement.schedule)
    assert all(arrangement.schedule.count(index) <= 2 for index in arrangement.schedule)
    arranged = arrangement.apply(program).program
    check_schedule(arranged, plain_schedule(arranged))
    assert replay_schedule(arranged, plain_schedule(arranged)).peak_bytes > 0
