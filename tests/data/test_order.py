"""Orders: what they refuse, and whose step they are for."""

import msgspec
import pytest

from bayplan.data.errors import ForeignPlan
from bayplan.data.plan import StepOrder, Swap
from bayplan.data.program import Op, Program

PROGRAM = Program(
    buffers=(4, 8),
    ops=(Op(name="f", reads=(0,), writes=(1,), seconds=1.0),),
    first_backward=1,
    inputs=frozenset({0}),
)


def order(**changes) -> StepOrder:
    known = {
        "program_fingerprint": PROGRAM.fingerprint,
        "schedule": (0,),
        "strategy": "keep",
        "peak_bytes": 12,
        "plain_peak_bytes": 12,
        "seconds": 1.0,
        "plain_seconds": 1.0,
    }
    return StepOrder(**{**known, **changes})


def test_order_survives_a_file():
    swap = Swap(buffer=1, away_before=1, backs_before=(2, 4))
    before = order(swaps=(swap,), packs=("relu",), gap=0.1)
    assert msgspec.json.decode(msgspec.json.encode(before), type=StepOrder) == before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"schedule": ()}, "schedule is empty"),
        ({"schedule": (0, -1)}, r"schedule\[1\] is -1"),
        ({"peak_bytes": -1}, "peak_bytes is -1"),
        ({"plain_peak_bytes": -1}, "plain_peak_bytes is -1"),
        ({"seconds": -1.0}, "seconds is -1"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"plain_seconds": float("inf")}, "plain_seconds is inf"),
        ({"gap": -0.5}, "gap is -0.5"),
    ],
)
def test_nonsense_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        order(**changes)


@pytest.mark.parametrize(
    "numbers", [(-1, 1, (2,)), (1, -1, (2,)), (1, 1, (-2,)), (1, 1, ())], ids=str
)
def test_impossible_swap_is_refused(numbers):
    buffer, away_before, backs_before = numbers
    with pytest.raises(ValueError, match=r"must be 0 or more|a swapped activation must come back"):
        Swap(buffer=buffer, away_before=away_before, backs_before=backs_before)


def test_unknown_fields_are_refused():
    text = msgspec.json.encode({**msgspec.to_builtins(order()), "colour": "red"})
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode(text, type=StepOrder)


def test_time_ratio_is_of_the_plain_step():
    assert order(seconds=3.0, plain_seconds=2.0).time_ratio == 1.5
    assert order(seconds=0.0, plain_seconds=0.0).time_ratio == 1.0


def test_order_belongs_to_its_program_alone():
    order().check_belongs_to(PROGRAM)
    with pytest.raises(ForeignPlan, match=rf"abc, this step's is {PROGRAM.fingerprint}"):
        order(program_fingerprint="abc").check_belongs_to(PROGRAM)
