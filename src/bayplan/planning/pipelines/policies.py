"""The schedules by name: what a rank takes first, and how much it may have in flight."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from bayplan.data.actions import Action, ActionKind
from bayplan.planning.pipelines.pipeline import Pipeline

__all__ = ["SCHEDULES", "Policy", "bounds_of"]

_INPUT, _WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


@dataclass(frozen=True)
class Policy:
    """How one schedule differs from the others.

    Attributes:
        fills_first: all of a rank's forwards come before its first backward.
        splits_backward: the gradient of the weights is an action of its own, which fills gaps.
        takes_turns: a rank's stages take turns, each with as many micro-batches as there are
            ranks in a row, so that the first is back for its next stage when the last has left.
        waits_for_each: a micro-batch's backward comes before the next one's forward. Without stale
            weights nothing overlaps then; with them, batches do.
    """

    fills_first: bool = False
    splits_backward: bool = False
    takes_turns: bool = False
    waits_for_each: bool = False

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """What is done for each piece, in this order."""
        if self.splits_backward:
            return (ActionKind.FORWARD, _INPUT, _WEIGHT)
        return (ActionKind.FORWARD, ActionKind.BACKWARD)

    def wish(self, action: Action, turn_length: int) -> tuple[int, ...]:
        """The smallest is taken: backwards before forwards, gradients of weights last."""
        is_forward = action.kind is ActionKind.FORWARD
        urgency = 1 if is_forward else 2 if action.kind is _WEIGHT else 0
        # What is nearest to the end of its way goes first.
        nearness = action.stage if is_forward else -action.stage
        if self.takes_turns:
            return (urgency, action.index // turn_length, nearness, action.index)
        return (urgency, action.index, nearness)


# GPipe (Huang et al. 2019); 1F1B (PipeDream, Narayanan et al. 2019, with a flush); interleaved
# 1F1B (Megatron-LM, Narayanan et al. 2021); ZB-H1 (Qi et al. 2024).
SCHEDULES: dict[str, Policy] = {
    "gpipe": Policy(fills_first=True),
    "1f1b": Policy(),
    "interleaved": Policy(takes_turns=True),
    "zero-bubble": Policy(splits_backward=True),
    "one-by-one": Policy(waits_for_each=True),
}


def bounds_of(pipeline: Pipeline, policy: Policy, *, depth: int) -> tuple[int, ...]:
    """By stage, the most micro-batches that a rank may have in flight.

    A stage that gives micro-batches to its replicas in turn works on several at a time: its width.
    To keep all later stages busy, those from here on must have one micro-batch for each, which
    the stage's own replicas share. For a chain of single ranks, or if every micro-batch is cut
    over all replicas, that is the number of stages from here on; for round robin it is PipeDream's
    number, the ranks from here on over the ranks here.
    """
    if policy.waits_for_each:
        return (1,) * len(pipeline.stages)
    if policy.fills_first:
        return (pipeline.num_micro_batches,) * len(pipeline.stages)
    widths = [
        Fraction(len(stage.devices) * pipeline.num_micro_batches, sum(map(len, pieces)))
        for stage, pieces in zip(pipeline.stages, pipeline.routing.pieces, strict=True)
    ]
    usual = (ceil(sum(widths[at:]) / widths[at]) for at in range(len(widths)))
    return tuple(depth * (bound - 1) + 1 for bound in usual)
