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


def chain_of_two() -> Program:
    """Two forward ops and their backward: the last op makes the output."""
    reads = [(0,), (1,), (1, 2), (0, 3)]
    ops = [
        Op(name=f"f{index}", reads=buffers, writes=(index + 1,), seconds=1.5)
        for index, buffers in enumerate(reads)
    ]
    return Program(
        buffers=(10, 4, 4, 4, 4),
        ops=tuple(ops),
        first_backward=2,
        inputs=frozenset({0}),
        outputs=frozenset({4}),
    )


def test_relations_are_found():
    chain = chain_of_two()
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
        ({"repeat_writes": (0,)}, "not some of"),
        ({"repeat_writes": (1, 1)}, "not some of"),
        ({"repeat_reads": (1,)}, "may not be there"),
        ({"repeat_seconds": -1.0}, "negative cost"),
        ({"repeat_workspace_bytes": -1}, "negative cost"),
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


def norm_then_backward() -> Program:
    norm = op(
        name="norm",
        writes=(1, 2),
        seconds=3.0,
        repeat_reads=(0, 2),
        repeat_writes=(1,),
        repeat_seconds=1.0,
    )
    backward = op(name="backward", reads=(1, 2), writes=(3,))
    return program(norm, backward, buffers=(4, 8, 1, 4), first_backward=1)


def test_executions_after_the_first_are_repeats():
    found = norm_then_backward()
    first, again, last = found.executions((0, 0, 1))
    assert (first, last) == found.ops
    assert (again.reads, again.writes, again.seconds) == ((0, 2), (1,), 1.0)
    assert again == again.again()


def test_what_only_the_first_execution_makes_cannot_be_renewed():
    assert norm_then_backward().renewable == {1, 3}


def test_repeat_that_reads_other_buffers_takes_nothing_over():
    plain = op(takes_over=(0,))
    assert op(takes_over=(0,), repeat_seconds=0.5).again().takes_over == plain.takes_over
    assert op(takes_over=(0,), repeat_reads=(0,)).again().takes_over == ()


def test_fingerprint_tells_repeats_apart_but_not_their_costs():
    found = norm_then_backward()
    norm, backward = found.ops
    dearer = structs.replace(norm, repeat_seconds=2.0)
    whole = structs.replace(norm, repeat_reads=None, repeat_writes=None)
    assert structs.replace(found, ops=(dearer, backward)).fingerprint == found.fingerprint
    assert structs.replace(found, ops=(whole, backward)).fingerprint != found.fingerprint


def test_fingerprint_knows_neither_objects_nor_what_the_caller_keeps():
    chain = chain_of_two()
    larger = structs.replace(chain, buffers=(10, 9, 9, 9, 9), object_bytes=5)
    assert larger.fingerprint == chain.fingerprint
    loss = Op(name="loss", reads=(2,), writes=(), seconds=0.0, is_callers=True)
    kept = structs.replace(loss, writes=(5,))
    with_loss = [
        structs.replace(
            chain,
            buffers=(*chain.buffers, *(8 for _ in op.writes)),
            ops=(*chain.ops, op),
            outputs=chain.outputs | {*op.writes},
        )
        for op in (loss, kept)
    ]
    assert with_loss[0].fingerprint == with_loss[1].fingerprint != chain.fingerprint


def test_survives_json():
    chain = chain_of_two()
    again = msgspec.json.decode(msgspec.json.encode(chain), type=Program)
    assert again == chain
    assert structs.replace(again, resident_bytes=7).always_bytes == chain.always_bytes + 7


def test_an_op_that_is_renamed_repeats_under_the_new_numbers():
    op = Op(
        name="f", reads=(0,), writes=(1, 2), seconds=1.0, repeat_reads=(0, 2), repeat_writes=(1,)
    )
    new = op.renamed({0: 7}, {2: 9})
    assert (new.reads, new.writes) == ((7,), (1, 9))
    assert (new.repeat_reads, new.repeat_writes) == ((7, 9), (1,))
