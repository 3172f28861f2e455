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
# First temperatures of walks, as shares of the plain step's seconds.
_FROM_DROPPED, _FROM_PLAIN, _FROM_BEST = 8e-4, 2e-3, (2e-4, 5e-5, 1e-5)


def fastest(space: SearchSpace, limit_bytes: int, starts: Sequence[Choices] = ()) -> Choices:
    """The fastest choices found within the limit; if none fit, those of the smallest peak found.

    Args:
        space: where.
        limit_bytes: for the peak.
        starts: choices to begin with, whether they fit or not. If greedy drops make one fit, the
            search stays around it, which is much quicker than from nothing.
    """
    if space.fits(space.plain, limit_bytes) or not space.around.by_place:
        return space.plain
    dropped = [drop(space, start, limit_bytes) for start in starts]
    price = next((price for _, price in dropped if price), 0.0)
    places = [choices for choices, _ in dropped]
    walks: list[tuple[Choices, float]] = []
    if not any(space.fits(choices, limit_bytes) for choices in places):
        choices, price = drop(space, space.plain, limit_bytes)
        places.append(choices)
        walks.append((choices, _FROM_DROPPED))
        if not space.fits(choices, limit_bytes):
            walks.append((space.plain, _FROM_PLAIN))
    best = _best_recipe(space, limit_bytes, places)
    for number, (start, hot) in enumerate(walks):
        share = 1 / (len(walks) + len(_FROM_BEST) - number)
        best = anneal(
            space, start, best, price=price, limit_bytes=limit_bytes, share=share, hot=hot
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
