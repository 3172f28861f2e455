"""The fastest choices within a limit: by recipes, then by wandering from several places.

Recipes find something that fits, and what the result is never worse than. Where the limit is
tight, the best region is rarely near them: what lies just above the limit after greedy drops is
the better place to wander from, fit or not.
"""

from collections.abc import Sequence

from bayplan.planning.annealing import anneal
from bayplan.planning.checkpoints import checkpoint_starts
from bayplan.planning.choices import Choices
from bayplan.planning.greedy import drop, refill
from bayplan.planning.space import SearchSpace
from bayplan.planning.squeezing import squeeze

__all__ = ["fastest"]

_MOST_REFILLED = 3  # of the recipes that fit; all are judged
# First temperatures, as shares of the plain step's seconds.
_FROM_DROPPED, _FROM_PLAIN, _FROM_BEST = 8e-4, 2e-3, (4e-4, 2e-4)


def fastest(space: SearchSpace, limit_bytes: int, starts: Sequence[Choices] = ()) -> Choices:
    """The fastest choices found within the limit; if none fit, those of the smallest peak found.

    Args:
        space: where.
        limit_bytes: for the peak.
        starts: choices to begin with, whether they fit or not.
    """
    if space.fits(space.plain, limit_bytes) or not space.around.by_place:
        return space.plain
    dropped, price = drop(space, space.plain, limit_bytes)
    best = _best_recipe(space, limit_bytes, [dropped, *starts])
    walks = [(dropped, _FROM_DROPPED), (space.plain, _FROM_PLAIN)]
    walks += [(start, _FROM_DROPPED) for start in starts]
    num_walks = len(walks) + len(_FROM_BEST)
    for number, (start, hot) in enumerate(walks):
        best = anneal(
            space,
            start,
            best,
            price=price,
            limit_bytes=limit_bytes,
            share=1 / (num_walks - number),
            hot=hot,
        )
    if not space.fits(best, limit_bytes):
        best = squeeze(space, goal_bytes=limit_bytes, start=best)
        if not space.fits(best, limit_bytes):
            return best
    for number, hot in enumerate(_FROM_BEST):
        best = refill(space, best, limit_bytes)
        share = 1 / (len(_FROM_BEST) - number)
        best = anneal(space, best, best, price=price, limit_bytes=limit_bytes, share=share, hot=hot)
    return refill(space, best, limit_bytes)


def _best_recipe(space: SearchSpace, limit_bytes: int, starts: Sequence[Choices]) -> Choices:
    """The fastest of starts and classic checkpointing that fits, else the one nearest to it."""
    recipes = checkpoint_starts(space.program, space.evaluator.gaps)
    judged = [(space.judge(recipe, limit_bytes), recipe) for recipe in (*starts, *recipes)]
    fitting = [item for item in judged if item[0].peak_bytes <= limit_bytes]
    if not fitting:
        return min(judged, key=lambda item: item[0].excess)[1]
    fitting.sort(key=lambda item: item[0].seconds)
    candidates = [fitting[0][1]]
    candidates += [refill(space, recipe, limit_bytes) for _, recipe in fitting[:_MOST_REFILLED]]
    return min(candidates, key=lambda choices: space.judge(choices, limit_bytes).seconds)
