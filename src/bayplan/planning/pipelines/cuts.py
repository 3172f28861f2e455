"""Where to cut a step into stages whose weights are as the shares say.

A weight is whatever shares are of: seconds, operators, or bytes of parameters. The place that a
share asks for is often inside a block, where much would have to be sent, and close to one where
little is. So cuts by a measured weight may move by a small part of the whole to where least is
sent. Cuts by operator count and by load are those of OneFlow's staged pipeline, which first counted
operators and later their depths.
"""

from collections.abc import Sequence
from itertools import accumulate

from bayplan.data.errors import UsageError

__all__ = ["cuts_by_count", "cuts_by_load", "cuts_by_share"]


def cuts_by_share(
    weights: Sequence[float],
    shares: Sequence[int],
    *,
    sent_bytes: Sequence[int] | None = None,
    slack: float = 0.0,
) -> tuple[int, ...]:
    """The first operator of each stage.

    Args:
        weights: of each forward operator, its backward included.
        sent_bytes: what a cut before each operator would send; None if that is not to matter.
        slack: how far a cut may move, as a part of all weights.

    Example:
        >>> cuts_by_share([1, 1, 1, 1, 4], (1, 1))
        (0, 4)
    """
    _check(shares, len(weights))
    before = list(accumulate(weights, initial=0.0))
    total = before[-1] or 1.0
    firsts = [0]
    for stage, share_before in enumerate(accumulate(shares[:-1]), start=1):
        wanted = total * share_before / sum(shares)
        possible = _possible(firsts[-1], stage, len(weights), len(shares))
        nearest = min(possible, key=lambda cut: abs(before[cut] - wanted))
        if sent_bytes is not None:
            near = [cut for cut in possible if abs(before[cut] - wanted) <= slack * total]
            nearest = min(near or [nearest], key=sent_bytes.__getitem__)
        firsts.append(nearest)
    return tuple(firsts)


def cuts_by_count(counts: Sequence[float], shares: Sequence[int]) -> tuple[int, ...]:
    """The first operator of each stage, found as OneFlow does.

    It deals the whole count out to as many buckets as all shares together, the first ones getting
    one more where it does not come out even. A stage's buckets are as many as its share, and it
    ends before the first operator that has more before it than all buckets up to there hold.

    Args:
        counts: what each forward operator counts; see `operator_counts`.
    """
    _check(shares, len(counts))
    before = list(accumulate(counts, initial=0.0))
    size, num_larger = divmod(before[-1], sum(shares))
    firsts = [0]
    for stage, num_buckets in enumerate(accumulate(shares[:-1]), start=1):
        held = size * num_buckets + min(num_buckets, num_larger)
        possible = _possible(firsts[-1], stage, len(counts), len(shares))
        firsts.append(next((cut for cut in possible if before[cut] > held), possible[-1]))
    return tuple(firsts)


def cuts_by_load(num_depths: int, loads: Sequence[int]) -> tuple[int, ...]:
    """The first depth of each stage, as OneFlow finds it by `stage_load`.

    A stage begins at the whole depths that all loads before it are a share of.

    Args:
        num_depths: of the operators that make up the model; its layers, where they are in a row.
    """
    _check(loads, num_depths)
    firsts = tuple(
        num_depths * before // sum(loads) for before in accumulate(loads[:-1], initial=0)
    )
    for stage, (first, end) in enumerate(zip(firsts, (*firsts[1:], num_depths), strict=True)):
        if first == end:
            raise UsageError(
                f"stage {stage} has a load of {loads[stage]} of {sum(loads)}, less than one of"
                f" {num_depths} layers; works with a load of {-(-sum(loads) // num_depths)}"
            )
    return firsts


def _check(shares: Sequence[int], num_ops: int) -> None:
    if min(shares, default=0) < 1:
        raise UsageError(f"shares are {':'.join(map(str, shares))}; each must be at least 1")
    if len(shares) > num_ops:
        raise UsageError(
            f"{len(shares)} stages, but the model can be cut into {num_ops} at most; name fewer"
            " stages"
        )


def _possible(last: int, stage: int, num_ops: int, num_stages: int) -> range:
    """Where a stage may begin so that it and those that follow have an operator each."""
    return range(last + 1, num_ops - (num_stages - stage) + 1)
