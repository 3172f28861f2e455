"""The smallest peak: the limit is lowered step by step, each time from the last success.

What fits a little more memory is a better start than any recipe.
"""

from bayplan.planning.annealing import anneal
from bayplan.planning.bounds import least_peak
from bayplan.planning.checkpoints import checkpoint_starts
from bayplan.planning.choices import Choices
from bayplan.planning.greedy import drop
from bayplan.planning.space import SearchSpace

__all__ = ["squeeze"]

_FIRST_STEP, _LAST_STEP = 0.08, 1e-3  # shares of the bytes that can be released at all


def squeeze(space: SearchSpace, *, goal_bytes: int = 0, start: Choices | None = None) -> Choices:
    """The choices of the smallest peak found, or the first within the goal.

    Args:
        space: where.
        goal_bytes: where to stop.
        start: choices to begin with, beside classic checkpointing.
    """
    starts = [space.plain, *checkpoint_starts(space.program, space.evaluator.gaps)]
    if start is not None:
        starts.append(start)
    best = min(starts, key=lambda choices: space.judge(choices, 0).peak_bytes)
    if not space.around.by_place:
        return best
    floor = max(goal_bytes, least_peak(space.program).peak_bytes)
    peak, step = space.judge(best, 0).peak_bytes, _FIRST_STEP
    while peak > floor and step > _LAST_STEP and not space.budget.is_out:
        target = max(floor, int(peak - step * (peak - space.program.always_bytes)))
        lower = _lower(space, best, target)
        if lower is None:
            step /= 2
        else:
            best, peak = lower, space.judge(lower, 0).peak_bytes
    return best


def _lower(space: SearchSpace, best: Choices, target_bytes: int) -> Choices | None:
    """Choices within the target, from the best so far or from plain, or None."""
    for start in (best, space.plain):
        dropped, price = drop(space, start, target_bytes)
        if space.fits(dropped, target_bytes):
            return dropped
        found = anneal(
            space,
            dropped,
            dropped,
            price=price,
            limit_bytes=target_bytes,
            share=0.1,
            only_fit=True,
        )
        if space.fits(found, target_bytes):
            return found
    return None
