"""How long a stage's forward and backward take, alone on a core."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bayplan.data.program import Program

__all__ = ["StageSeconds", "stage_seconds"]


@dataclass(frozen=True)
class StageSeconds:
    """Of one micro-batch.

    Attributes:
        backward: what is recomputed for it included.
        backward_input: the part of it that other stages wait for.
        gradients: of each parameter, the seconds of backward after which its gradient is there.
    """

    forward: float
    backward: float
    backward_input: float
    gradients: tuple[float, ...] = ()


def stage_seconds(
    program: Program,
    schedule: Sequence[int],
    *,
    made_back: frozenset[int] = frozenset(),
    gradients: Sequence[frozenset[int]] = (),
) -> StageSeconds:
    """What a stage's program takes when it runs in an order.

    Args:
        program: of forward and backward, priced.
        schedule: the order.
        made_back: buffers of gradients for other stages.
        gradients: the buffers of each parameter's gradient.
    """
    executions = list(program.executions(schedule))
    first = program.first_backward
    forward, backward = executions[:first], executions[first:]
    needed, for_others = set(made_back), 0.0
    for op in reversed(backward):
        if needed.intersection(op.writes):
            needed.update(op.reads)
            for_others += op.seconds
    made: dict[int, float] = {}
    for op, end in zip(backward, accumulate(op.seconds for op in backward), strict=True):
        made |= dict.fromkeys(op.writes, end)
    return StageSeconds(
        forward=sum(op.seconds for op in forward),
        backward=sum(op.seconds for op in backward),
        backward_input=for_others,
        gradients=tuple(max((made.get(b, 0.0) for b in own), default=0.0) for own in gradients),
    )
