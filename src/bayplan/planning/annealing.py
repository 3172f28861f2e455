"""Wandering among choices: changes for the worse are accepted ever more rarely.

Being above the limit is allowed at a price for each byte. The price rises while the wanderer is
above and falls while it is below, so that it crosses the limit again and again and sees both
sides of it.
"""

import math

import numpy

from bayplan.planning.choices import Choices, Moves
from bayplan.planning.space import SearchSpace

__all__ = ["HOT", "anneal"]

# Temperatures, as shares of the plain step's seconds.
HOT, _COLD = 2e-4, 1e-6
# Schedules judged in one call of the evaluator: short enough to be interrupted, long enough for
# the work between calls not to matter.
_CHUNK = 200
# How fast the price of a byte rises from chunk to chunk, and how far it must get within a walk,
# however short, that stays above the limit.
_RISE, _FARTHEST_RISE = 1.1, 1e4


def anneal(
    space: SearchSpace,
    choices: Choices,
    best: Choices,
    *,
    price: float,
    limit_bytes: int,
    share: float,
    hot: float = HOT,
    only_fit: bool = False,
) -> Choices:
    """Wander from `choices`; returns the fastest met within the limit, `best` if none is faster.

    Args:
        space: where.
        choices: where to begin.
        best: the fastest so far, or anything that does not fit.
        price: seconds for a byte less during one op, to begin with; 0 if unknown.
        limit_bytes: for the peak.
        share: how much of the remaining budget to use.
        hot: the first temperature, as a share of the plain step's seconds.
        only_fit: whether to stop at the first choices that fit.
    """
    choices, best = choices.copy(), best.copy()
    outcome = space.judge(best, limit_bytes)
    best_seconds = outcome.seconds if outcome.peak_bytes <= limit_bytes else math.inf
    weight = 3 * price or space.plain_seconds / max(1, limit_bytes)
    begin = space.budget.share_used
    length = max(share * (1 - begin), 1e-9)
    while (done := (space.budget.share_used - begin) / length) < 1 and not space.budget.is_out:
        heat = space.plain_seconds * hot * (_COLD / hot) ** done
        trace = space.evaluator.trace(choices)
        space.around.focus(trace, space.rng, limit_bytes=limit_bytes)
        moves = [space.around.draw(space.rng, choices) for _ in range(_CHUNK)]
        slack = [-heat * math.log(1 - space.rng.random()) for _ in moves]
        best_seconds, current = space.evaluator.walk(
            choices,
            Moves.pack(moves),
            numpy.array(slack),
            limit_bytes=limit_bytes,
            weight=weight,
            best=best,
            best_seconds=best_seconds,
        )
        space.budget.spend(_CHUNK, best_seconds=best_seconds)
        moved = min(1.0, (space.budget.share_used - begin) / length - done)
        rise = max(_RISE, _FARTHEST_RISE**moved)
        weight *= rise if current.excess > 0 else rise**-0.5
        if only_fit and best_seconds < math.inf:
            break
    return best
