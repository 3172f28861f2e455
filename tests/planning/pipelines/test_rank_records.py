"""What a rank needs, moment by moment."""

from bayplan.data.actions import Action
from bayplan.data.plan import StepOrder
from bayplan.data.record import Event, Lane
from bayplan.planning.pipelines.rank_records import rank_curve
from bayplan.planning.pipelines.stage_orders import Fit
from bayplan.simulating.rank_memory import RankMemory, StageMemory, StageSeconds

_HELD, _PASSING = 100, 30


def _rank(*names: str) -> RankMemory:
    return RankMemory(
        actions=[Action.parse(name) for name in names],
        retire=[()] * len(names),
        keys={(0, 0): (0, 1), (0, 1): (0, 1)},
        staying_bytes=50,
        message_bytes={},
        packed_bytes={},
        num_ahead=0,
        gradient_bytes={0: 7},
        update_bytes=0,
        lags=(0,),
        in_flight={0: 2},
    )


def _event(name: str, start: float) -> Event:
    return Event(lane=Lane.COMPUTE, name=name, start_seconds=start, seconds=1.0)


def test_a_sum_that_is_started_behind_a_backward_does_not_hide_its_peak():
    """A reduce has no event of its own; it was drawn where the backward before it begins."""
    stage = StageMemory(
        forward_bytes=_HELD,
        held_bytes=_HELD,
        made_bytes=0,
        backward_bytes=_HELD + _PASSING,
        adding_bytes=_HELD + _PASSING,
        made_back_bytes=0,
    )
    seconds = StageSeconds(forward=1.0, backward=1.0, backward_input=0.0)
    order = StepOrder(
        **{"program_fingerprint": "", "schedule": (0,), "strategy": "keep", "peak_bytes": 0},
        **{"plain_peak_bytes": 0, "seconds": 2.0, "plain_seconds": 2.0},
    )
    fit = Fit(order=order, memory=stage, seconds=seconds)
    rank = _rank("0F0", "0F1", "0B0", "0B1", "0REDUCE0", "0U0")
    events = [_event(name, start) for start, name in enumerate(("0F0", "0F1", "0B0", "0B1", "0U0"))]
    curve = rank_curve(rank, {(0, 1): fit}, {"parameter": 50}, events)
    by_start = dict(zip(curve.seconds, curve.total_bytes, strict=True))
    assert by_start[1.0] == 50 + 2 * _HELD
    assert by_start[2.0] == 50 + 2 * _HELD + _PASSING
    assert by_start[3.0] == 50 + 7 + _HELD + _PASSING
    assert curve.seconds[-1] == 5.0
    assert [sum(row) for row in zip(*curve.by_kind.values(), strict=True)] == [*curve.total_bytes]
