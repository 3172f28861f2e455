"""Repeats at other batch sizes: what they cost is on a line of its own."""

import pytest
from msgspec import structs

from bayplan.data.errors import CaptureError
from bayplan.data.program import Op, Program
from bayplan.planning.memory.largest_batch import AffineProgram


def program(batch: int, **changes) -> Program:
    norm = Op(
        name="norm",
        reads=(0,),
        writes=(1, 2),
        seconds=1.0 + 2.0 * batch,
        repeat_reads=(0, 2),
        repeat_writes=(1,),
        repeat_seconds=0.5 + 1.0 * batch,
        repeat_workspace_bytes=10 * batch,
    )
    return Program(
        buffers=(8 * batch, 8 * batch, 4),
        ops=(structs.replace(norm, **changes),),
        first_backward=1,
        inputs=frozenset({0}),
    )


def test_costs_of_repeats_are_on_their_own_line():
    found = AffineProgram(program(2), 2, program(4), 4).at(10)
    assert found == program(10)


def test_repeats_that_differ_are_refused():
    other = program(4, repeat_reads=None, repeat_writes=None)
    with pytest.raises(CaptureError, match="other operators"):
        AffineProgram(program(2), 2, other, 4)
