"""A decided order in a reader's words: what happens to each activation, and what sets the peak."""

from collections import Counter
from collections.abc import Iterator, Sequence

from bayplan.data.plan import Choice, Decision, LiveValue, PeakMoment, StepOrder
from bayplan.data.program import Op, Program
from bayplan.simulating.schedule import alive_at, plain_schedule, replay_schedule
from bayplan.simulating.swaps import Swapped

__all__ = ["decisions_of", "peak_moment"]


def decisions_of(program: Program, order: StepOrder) -> tuple[Decision, ...]:
    """Every activation that is not simply kept, in the order forward makes them."""
    by_value = {(decision.value, decision.choice): decision for decision in _all(program, order)}
    place = {op.name: index for index, op in enumerate(program.ops)}
    return tuple(
        sorted(by_value.values(), key=lambda decision: place.get(decision.value, len(place)))
    )


def _all(program: Program, order: StepOrder) -> Iterator[Decision]:
    def decision(op: Op, choice: Choice, buffers: Sequence[int], seconds: float = 0.0) -> Decision:
        size_bytes = sum(program.buffers[buffer] for buffer in buffers)
        return Decision(
            value=op.name, choice=choice, place=op.place, size_bytes=size_bytes, seconds=seconds
        )

    for index, count in Counter(order.schedule).items():
        op = program.repeats[index]
        if count > 1:
            yield decision(op, Choice.RECOMPUTE, op.writes, (count - 1) * op.seconds)
    for swap in order.swaps:
        op = program.ops[program.producers[swap.buffer]]
        yield decision(op, Choice.SWAP, [swap.buffer])
    made_by = {op.name: op for op in program.ops}
    for name in order.packs:
        value = name.partition(":")[2]
        if value in made_by:
            yield decision(made_by[value], Choice.PACK, made_by[value].writes)
        else:
            yield Decision(value=value, choice=Choice.PACK)


_MOST_NAMED = 20


def peak_moment(swapped: Swapped, steps: Sequence[int] = ()) -> PeakMoment:
    """What is alive at the peak of an arrangement, given as the program that it leads to.

    With `steps`, at the highest moment of these.
    """
    program = swapped.program
    schedule = plain_schedule(program)
    totals = replay_schedule(program, schedule).total_bytes
    highest = max(steps or range(len(totals)), key=totals.__getitem__)
    op = program.ops[highest]
    alive = set(alive_at(program, schedule, highest)) - program.inputs
    passing = sorted(alive - program.outputs, key=lambda buffer: -program.buffers[buffer])
    makers = {buffer: program.ops[program.producers[buffer]] for buffer in passing}
    return PeakMoment(
        op=op.name,
        place=op.place,
        always_bytes=program.always_bytes,
        outputs_bytes=sum(program.buffers[buffer] for buffer in alive & program.outputs),
        workspace_bytes=op.workspace_bytes,
        values=tuple(
            LiveValue(
                value=makers[buffer].name,
                place=makers[buffer].place,
                size_bytes=program.buffers[buffer],
            )
            for buffer in passing[:_MOST_NAMED]
            if program.buffers[buffer]
        ),
    )
