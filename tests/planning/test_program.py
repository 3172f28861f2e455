"""A program is checked once, when it is made."""

import msgspec
import pytest
from msgspec import structs

from bayplan.data.program import Op, Program


def op(**changes) -> Op:
    return Op(**{"name": "f", "reads": (0,), "writes": (1,), "seconds": 1.0, **changes})


def program(*ops: Op, **changes) -> Program:
    fields = {"buffers": (4, 4), "ops": ops, "first_backward": 0, "inputs": frozenset({0})}
    return Program(**{**fields, **changes})


def test_relations_are_found(make_chain):
    chain = make_chain(2)
    assert chain.producers == (-1, 0, 1, 2, 3)
    assert chain.readers == ((0, 3), (1, 2), (2,), (3,), ())
    assert chain.plain_seconds == 6.0
    assert chain.always_bytes == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reads": (1,)}, "before they are made"),
        ({"writes": (1, 1)}, "a second time"),
        ({"writes": (0,)}, "a second time"),
        ({"writes": (1, 7)}, "do not exist"),
        ({"seconds": -1.0}, "negative cost"),
        ({"seconds": float("nan")}, "negative cost"),
        ({"workspace_bytes": -1}, "negative cost"),
        ({"takes_over": (1,)}, "does not read"),
    ],
)
def test_nonsense_in_an_op_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        program(op(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_backward": 2}, "not in 0..1"),
        ({"buffers": (4, -4)}, "never negative"),
        ({"buffers": (4, 4, 4)}, "no op that makes them"),
        ({"outputs": frozenset({9})}, "no such buffers"),
        ({"ops": ()}, "at least one op"),
    ],
)
def test_nonsense_in_a_program_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        program(op(), **changes)


def test_take_over_needs_equal_size():
    with pytest.raises(ValueError, match="another size"):
        program(op(takes_over=(0,)), buffers=(4, 5))


def test_survives_json(make_residual):
    residual = make_residual(2)
    again = msgspec.json.decode(msgspec.json.encode(residual), type=Program)
    assert again == residual
    assert structs.replace(again, resident_bytes=7).always_bytes == residual.always_bytes + 7
