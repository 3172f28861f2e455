"""Programs at any batch size, against programs built at that very size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bayplan.data.errors import CaptureError
from bayplan.data.program import Op, Program
from bayplan.planning.memory.largest_batch import AffineProgram


def program_at(batch: int) -> Program:
    """Weights of 40 bytes, activations of 12 a sample, and what kernels need on top."""
    sizes = (40, 12 * batch, 12 * batch, 12 * batch, 40)
    ops = (
        Op(name="f", reads=(0,), writes=(1,), seconds=0.5 * batch, workspace_bytes=7 + batch),
        Op(name="relu", reads=(1,), writes=(2,), seconds=0.25 * batch, takes_over=(1,)),
        Op(name="b", reads=(2,), writes=(3, 4), seconds=1.0 + batch, workspace_bytes=64),
    )
    return Program(
        buffers=sizes,
        ops=ops,
        first_backward=2,
        inputs=frozenset({0}),
        outputs=frozenset({4}),
        resident_bytes=100 + 3 * batch,
    )


@given(
    ends=st.lists(st.integers(1, 64), min_size=2, max_size=2, unique=True),
    batch=st.integers(1, 5000),
)
def test_two_sizes_in_any_order_tell_every_other(ends, batch):
    first, second = ends
    line = AffineProgram(program_at(first), first, program_at(second), second)
    expected, got = program_at(batch), line.at(batch)
    assert got.fingerprint == expected.fingerprint
    assert got.resident_bytes == expected.resident_bytes
    for mine, true in zip(got.ops, expected.ops, strict=True):
        assert mine.workspace_bytes == true.workspace_bytes
        assert mine.seconds == pytest.approx(true.seconds)


def test_costs_never_fall_below_nothing():
    dear = structs.replace(program_at(4), resident_bytes=500)
    cheap = structs.replace(program_at(8), resident_bytes=100)
    assert AffineProgram(dear, 4, cheap, 8).at(64).resident_bytes == 0


def test_memory_is_taken_over_only_where_it_is_at_both_sizes():
    ops = program_at(8).ops
    other = structs.replace(
        program_at(8), ops=(ops[0], structs.replace(ops[1], takes_over=()), ops[2])
    )
    assert AffineProgram(program_at(4), 4, other, 8).at(6).ops[1].takes_over == ()


def test_other_operators_at_another_size_are_refused():
    ops = program_at(8).ops
    other = structs.replace(program_at(8), ops=(structs.replace(ops[0], name="g"), *ops[1:]))
    with pytest.raises(CaptureError, match="other operators at batch 4 than at batch 8"):
        AffineProgram(program_at(4), 4, other, 8)
