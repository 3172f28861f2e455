"""A schedule told by activation, on a chain that a reader can follow."""

from bayplan.data.plan import Choice, StepOrder, Swap
from bayplan.planning.memory.decisions import decisions_of


def order_with(schedule, *, packs=(), swaps=()) -> StepOrder:
    return StepOrder(
        program_fingerprint="",
        schedule=tuple(schedule),
        packs=packs,
        swaps=swaps,
        strategy="auto",
        peak_bytes=0,
        plain_peak_bytes=0,
        seconds=0.0,
        plain_seconds=0.0,
    )


def test_plain_order_decides_nothing(make_chain):
    program = make_chain(3)
    assert decisions_of(program, order_with(range(len(program.ops)))) == ()


def test_each_repeat_is_paid_for(make_chain):
    program = make_chain(3)  # f0 f1 f2 b2 b1 b0
    (one,) = decisions_of(program, order_with([0, 1, 2, 3, 0, 4, 0, 5]))
    assert (one.value, one.choice) == ("f0", Choice.RECOMPUTE)
    assert one.size_bytes == 10
    assert one.seconds == 2.0


def test_decisions_come_in_the_order_of_forward(make_chain):
    program = make_chain(3)
    swaps = (Swap(buffer=1, away_before=2, backs_before=(4,)),)
    found = decisions_of(
        program, order_with([0, 1, 2, 3, 1, 4, 5], packs=("bits:f2",), swaps=swaps)
    )
    assert [(one.value, one.choice) for one in found] == [
        ("f0", Choice.SWAP),
        ("f1", Choice.RECOMPUTE),
        ("f2", Choice.PACK),
    ]
    assert found[0].size_bytes == 10
