"""Reduces a step to a chain of layers, which is what planners of whole clusters see.

A layer ends where the fewest bytes would be sent between two operators with parameters of their
own. A stage needs something to train, so no plan would cut twice in between.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from bayplan.data.chain import Chain, Layer
from bayplan.data.program import Program, module_of
from bayplan.tracing.joint import JointStep
from bayplan.tracing.stages.assigning import parameter_bytes, seconds_with_backward, sent_bytes
from bayplan.tracing.stages.whole import WholeStep

__all__ = ["chained", "with_fixed_parts"]

MOST_LAYERS = 240  # a planner's time grows with the square of them


def chained(
    whole: WholeStep,
    step: JointStep,
    *,
    name: str,
    device: str,
    spread: float,
    also: Sequence[int] = (),
) -> tuple[Chain, tuple[int, ...]]:
    """Reduce a step to a chain; the operators that its layers begin with come along.

    Args:
        device: the kind of which the figures gave the step's prices.
        spread: by what part these may be off.
        also: operators that layers begin with in any case.
    """
    program = step.program
    num_forward = program.first_backward - 1  # the loss is the caller's
    weights, sent = parameter_bytes(whole, step), sent_bytes(program)
    cheapest = _fewer(_firsts(weights, sent), sent, MOST_LAYERS)
    firsts = tuple(sorted({*cheapest, *also}))
    both_seconds = seconds_with_backward(step)
    held, passing = _held_and_passing_bytes(program, num_forward)
    layers: list[Layer] = []
    for first, end in pairwise((*firsts, num_forward)):
        ops = range(first, end)
        forward_seconds = sum(program.ops[op].seconds for op in ops)
        layers.append(
            Layer(
                name=module_of(program.ops[first].place) or program.ops[first].name,
                forward_seconds=forward_seconds,
                backward_seconds=sum(both_seconds[op] for op in ops) - forward_seconds,
                parameter_bytes=int(sum(weights[op] for op in ops)),
                held_bytes=sum(held[op] for op in ops),
                passing_bytes=max(passing[op] for op in ops),
                sent_bytes=sent[end] if end < num_forward else 0,
            )
        )
    chain = Chain(
        name=name,
        num_samples=whole.num_samples,
        layers=tuple(layers),
        device=device,
        source="derived from the device's figures",
        spread=spread,
    )
    return chain, firsts


def with_fixed_parts(large: Chain, small: Chain) -> Chain:
    """The larger of two sizes, with what does not grow with samples told apart.

    A layer that reads many weights for few samples takes as long for one sample as for some, so
    that micro-batches cost it more than their share; the line through two sizes knows.
    """
    share = small.num_samples / large.num_samples
    layers = tuple(
        msgspec.structs.replace(
            more,
            fixed_forward_seconds=_fixed(more.forward_seconds, less.forward_seconds, share),
            fixed_backward_seconds=_fixed(more.backward_seconds, less.backward_seconds, share),
        )
        for more, less in zip(large.layers, small.layers, strict=True)
    )
    return msgspec.structs.replace(large, layers=layers)


def _fixed(large: float, small: float, share: float) -> float:
    """Where the line through two sizes begins; the smaller has so large a share of the samples.

    Example:
        >>> _fixed(10.0, 6.0, 0.5), _fixed(10.0, 4.0, 0.5), _fixed(10.0, 11.0, 0.5)
        (2.0, 0.0, 10.0)
    """
    return min(max(0.0, (small - share * large) / (1 - share)), large)


def _firsts(weights: Sequence[float], sent: Sequence[int]) -> tuple[int, ...]:
    """Where layers begin: between two operators with parameters, where least is sent.

    Of equal places the last: what needs no parameters mostly belongs to what came before.

    Example:
        >>> _firsts([5, 0, 0, 7, 0, 3], [0, 8, 4, 4, 9, 2])
        (0, 3, 5)
    """
    owners = [op for op, weight in enumerate(weights) if weight]
    places = (range(before + 1, after + 1) for before, after in pairwise(owners))
    return (0, *(min(reversed(places_between), key=sent.__getitem__) for places_between in places))


def _fewer(firsts: tuple[int, ...], sent: Sequence[int], most: int) -> tuple[int, ...]:
    """Without the places where most would be sent, if there are too many.

    Example:
        >>> _fewer((0, 1, 2, 3), [0, 5, 9, 5], 3)
        (0, 1, 3)
    """
    cheapest = sorted(firsts[1:], key=lambda first: (sent[first], first))[: most - 1]
    return (0, *sorted(cheapest))


def _held_and_passing_bytes(program: Program, num_forward: int) -> tuple[list[int], list[int]]:
    """By forward operator, what it makes that backward reads, and what nobody keeps behind it."""
    held = [0] * num_forward
    passing = [op.workspace_bytes for op in program.ops[:num_forward]]
    for index, op in enumerate(program.ops[:num_forward]):
        for buffer in op.writes:
            is_read_later = any(reader >= num_forward for reader in program.readers[buffer])
            (held if is_read_later else passing)[index] += program.buffers[buffer]
    return held, passing
