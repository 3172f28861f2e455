"""Choices changed one at a time, the most worthwhile first: dropped to fit, kept to save time."""

from bayplan.planning.choices import Choices, Outcome
from bayplan.planning.space import SearchSpace, changed

__all__ = ["drop", "refill"]

# A drop is taken as long as it does this share of what it promised when all were ranked.
_STILL_WORTH = 0.5
# All drops are ranked again once this share of the excess is left. Not of the first excess: the
# last bytes deserve as much care as the first, or a whole role is dropped for them.
_RANK_AGAIN = 0.7


def drop(space: SearchSpace, choices: Choices, limit_bytes: int) -> tuple[Choices, float]:
    """Drop by excess removed per second until it fits or nothing helps.

    All single drops where it is over the limit are ranked at once and taken in that order as long
    as each still does about what it promised; then they are ranked again. Returned with the price
    paid last, in seconds for a byte less during one op.
    """
    current, price = space.judge(choices, limit_bytes), 0.0
    while current.excess > 0 and current.length > 0 and not space.budget.is_out:
        over = space.evaluator.trace(choices).ops_over(limit_bytes)
        ranked = space.rank(choices, space.around.single_drops(choices, over), limit_bytes)
        promises = [(_worth(space, current, after), move) for move, after in ranked]
        promises = sorted((item for item in promises if item[0] > 0), key=lambda item: -item[0])
        before, goal = current.excess, _RANK_AGAIN * current.excess
        for promise, move in promises:
            candidate = changed(choices, move)
            after = space.judge(candidate, limit_bytes)
            worth = _worth(space, current, after)
            if worth >= _STILL_WORTH * promise:
                choices, current, price = candidate, after, 1 / worth
            if current.excess <= goal:
                break
        if current.excess >= before * (1 - 1e-9):
            break
    return choices, price


def _worth(space: SearchSpace, before: Outcome, after: Outcome) -> float:
    """Excess removed per second; a saving of time counts as almost free."""
    if after.excess >= before.excess:
        return 0.0
    seconds = max(after.seconds - before.seconds, 1e-6 * space.plain_seconds)
    return (before.excess - after.excess) / seconds


def refill(space: SearchSpace, choices: Choices, limit_bytes: int) -> Choices:
    """Keep again whatever saves time and fits, the largest saving first."""
    choices = choices.copy()
    current = space.judge(choices, limit_bytes)
    while not space.budget.is_out:
        moves = space.around.single_keeps(choices)
        ranked = space.rank(choices, moves, limit_bytes) if moves else []
        savings = [
            (move, after)
            for move, after in ranked
            if after.excess == 0 and after.seconds < current.seconds
        ]
        if not savings:
            break
        savings.sort(key=lambda item: item[1].seconds)
        for move, _ in savings[: max(1, len(savings) // 3)]:
            candidate = changed(choices, move)
            after = space.judge(candidate, limit_bytes)
            if after.excess == 0 and after.seconds < current.seconds:
                choices, current = candidate, after
    return choices
