"""A planned step moment by moment: what each byte is there for, and what runs when."""

import pytest

from bayplan.data.graph import StepGraph
from bayplan.data.plan import StepOrder, Swap
from bayplan.data.program import Op, Program
from bayplan.data.record import Lane
from bayplan.simulating.planned_step import planned_step
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Tier, apply_order

# Buffers: 0 is the input, 1 and 2 activations, 3 passes, 4 and 5 gradients of activations, 6 and 7
# those of parameters.
_SIZES = (8, 100, 60, 5, 100, 60, 1, 2)
_OPS = (
    Op(name="f1", reads=(0,), writes=(1,), seconds=1.0, place="layer1.0.conv"),
    Op(name="f2", reads=(1,), writes=(2,), seconds=1.0, place="layer1.1.conv"),
    Op(name="loss", reads=(2,), writes=(3,), seconds=1.0),
    Op(name="b2", reads=(2, 3), writes=(5, 7), seconds=2.0, place="layer1.1.conv"),
    Op(name="b1", reads=(1, 5), writes=(4, 6), seconds=2.0, place="layer1.0.conv"),
)
_PROGRAM = Program(
    buffers=_SIZES,
    ops=_OPS,
    first_backward=3,
    inputs=frozenset({0}),
    outputs=frozenset({6, 7}),
    resident_bytes=40,
)
_GRAPH = StepGraph(model="net", nodes=(), values=(), storages=())
_NAMES = {op.name for op in _OPS}


def _order(schedule=(0, 1, 2, 3, 4), **more) -> StepOrder:
    return StepOrder(
        **{"program_fingerprint": "", "schedule": schedule, "strategy": "auto"},
        **{"peak_bytes": 0, "plain_peak_bytes": 0, "seconds": 7.0, "plain_seconds": 7.0},
        **more,
    )


def _replayed(order: StepOrder, **more):
    return planned_step(_PROGRAM, order, _GRAPH, plain_ops=_NAMES, **more)


@pytest.mark.parametrize(
    ("order", "kind"),
    [
        (_order(), "kept"),
        (_order((0, 1, 2, 3, 0, 4)), "recomputed"),
        (_order(swaps=(Swap(buffer=1, away_before=2, backs_before=(4,)),)), "swapped"),
    ],
)
def test_bytes_by_kind_add_up_to_the_replay_that_planners_go_by(order, kind):
    curve = _replayed(order).curve
    swapped = apply_order(order, _PROGRAM)
    totals = replay_schedule(swapped.program, plain_schedule(swapped.program)).total_bytes
    assert curve.total_bytes[: len(totals)] == totals
    assert [sum(row) for row in zip(*curve.by_kind.values(), strict=True)] == [*curve.total_bytes]
    assert max(curve.by_kind[kind]) >= 100


def test_what_is_recomputed_is_not_there_in_between():
    column = _replayed(_order((0, 1, 2, 3, 0, 4))).curve.by_kind["recomputed"]
    assert column[:6] == (100, 100, 0, 0, 100, 100)


def test_packed_values_are_those_that_only_the_packed_program_makes():
    replayed = planned_step(_PROGRAM, _order(), _GRAPH, plain_ops=_NAMES - {"f1"})
    assert max(replayed.curve.by_kind["packed"]) == 100


def test_timeline_has_modules_in_their_phases_and_ends_with_the_update():
    events = _replayed(_order((0, 1, 2, 3, 0, 4)), outside_seconds=0.5).events
    assert [(event.name, event.start_seconds) for event in events] == [
        ("forward layer1.0", 0.0),
        ("forward layer1.1", 1.0),
        ("backward layer1.1", 3.0),
        ("recompute layer1.0", 5.0),
        ("backward layer1.0", 6.0),
        ("update", 8.0),
    ]


def test_copies_have_a_lane_of_their_own():
    tier = Tier(out_bytes_per_second=100.0, in_bytes_per_second=200.0)
    order = _order(swaps=(Swap(buffer=1, away_before=2, backs_before=(4,)),))
    copies = [e for e in _replayed(order, tier=tier).events if e.lane is Lane.COPY]
    assert [(event.name, event.seconds) for event in copies] == [("out:f1", 1.0), ("back:f1", 0.5)]


def test_place_of_the_peak_is_the_operator_and_its_module():
    assert _replayed(_order()).peak_place == "b1 layer1.0.conv"
