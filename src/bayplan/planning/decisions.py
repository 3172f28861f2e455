"""A schedule told by activation: what is recomputed, packed or swapped, and what that costs."""

from collections import Counter
from collections.abc import Iterator

from bayplan.data.order import StepOrder
from bayplan.data.plan import Choice, Decision
from bayplan.data.program import Program

__all__ = ["decisions_of"]


def decisions_of(program: Program, order: StepOrder) -> tuple[Decision, ...]:
    """Every activation that is not simply kept, in the order forward makes them."""
    found = {(decision.value, decision.choice): decision for decision in _all(program, order)}
    place = {op.name: index for index, op in enumerate(program.ops)}
    return tuple(sorted(found.values(), key=lambda one: place.get(one.value, len(place))))


def _all(program: Program, order: StepOrder) -> Iterator[Decision]:
    for index, count in Counter(order.schedule).items():
        op = program.repeats[index]
        if count > 1:
            yield Decision(
                value=op.name,
                choice=Choice.RECOMPUTE,
                place=op.place,
                size_bytes=sum(program.buffers[buffer] for buffer in op.writes),
                seconds=(count - 1) * op.seconds,
            )
    for swap in order.swaps:
        op = program.ops[program.producers[swap.buffer]]
        yield Decision(
            value=op.name,
            choice=Choice.SWAP,
            place=op.place,
            size_bytes=program.buffers[swap.buffer],
        )
    made_by = {op.name: op for op in program.ops}
    for name in order.packs:
        value = name.partition(":")[2]
        op = made_by.get(value)
        yield Decision(
            value=value,
            choice=Choice.PACK,
            place="" if op is None else op.place,
            size_bytes=0 if op is None else sum(program.buffers[b] for b in op.writes),
        )
