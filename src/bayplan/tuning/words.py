"""Why a search ended, in words with numbers."""

import math

from bayplan.data.units import format_seconds
from bayplan.tuning.search import Search

__all__ = ["verdict_of"]

_ONE_SIDED = 1.645  # spreads that leave 5 % beyond


def verdict_of(search: Search, *, num_steps: int) -> str:
    """Tell what was found, what was left out and why, and how far from the best it may be."""
    best, left = search.settings[search.best], search.open
    log_seconds = search.log_seconds(search.best)
    took = "" if log_seconds is None else f": {format_seconds(math.exp(log_seconds))} a step"
    parts = [
        f"{best} is best{took}, steps scatter by {search.noise.step_spread:.1%};"
        f" {_counts(search)} in {num_steps} steps",
    ]
    if left:
        most = max(-math.expm1(one.mean - _ONE_SIDED * one.spread) for one in left.values())
        number = "1 setting" if len(left) == 1 else f"{len(left)} settings"
        parts.append(
            f"stopped at the most steps allowed: {number} could still be faster, by up to"
            f" {most:.1%}"
        )
    elif search.is_at_floor:
        parts.append(f"without any exchange a step is less than {search.margin:.1%} faster")
    else:
        reason = "the least gain worth a change"
        if search.margin > search.least_gain:
            reason = "and less is not worth a search in this noise"
        parts.append(f"no other is likely to be faster by more than {search.margin:.1%}, {reason}")
    return "; ".join(parts)


def _counts(search: Search) -> str:
    measured, known = len(search.compared), search.num_known
    others = len(search.settings) - measured
    told = f"{measured} of {len(search.settings)} settings measured"
    if known:
        told += f", {known} of them in earlier runs"
    if others:
        told += f", {others} ruled out by prediction (ratios taken to be off by {search.error:.0%})"
    return told
