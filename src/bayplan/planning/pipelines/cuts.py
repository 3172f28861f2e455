"""Where to cut a step into stages whose weights are as the shares say.

A weight is whatever shares are of: seconds, operators, or bytes of parameters. The place that a
share asks for is often inside a block, where much would have to be sent; a little off it there is
mostly one where little is. So cuts by a measured weight may move by a small part of the whole to
where least is sent. Cuts by operator count are exact, as in OneFlow's staged pipeline.
"""

from collections.abc import Sequence
from itertools import accumulate

from bayplan.data.errors import UsageError

__all__ = ["cuts_by_share"]


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
        shares: of each stage.
        sent_bytes: what a cut before each operator would send; None if that is not to matter.
        slack: how far a cut may move, as a part of all weights.

    Example:
        >>> cuts_by_share([1, 1, 1, 1, 4], (1, 1))
        (0, 4)
    """
    if min(shares, default=0) < 1:
        raise UsageError(f"shares are {':'.join(map(str, shares))}; each must be at least 1")
    if len(shares) > len(weights):
        raise UsageError(
            f"{len(shares)} stages, but the model can be cut into {len(weights)} at most; name"
            " fewer stages"
        )
    before = list(accumulate(weights, initial=0.0))
    total = before[-1] or 1.0
    firsts = [0]
    for at, share_before in enumerate(accumulate(shares[:-1]), start=1):
        wanted = total * share_before / sum(shares)
        # Every stage has an operator, those that follow too.
        possible = range(firsts[-1] + 1, len(weights) - (len(shares) - at) + 1)
        nearest = min(possible, key=lambda cut: abs(before[cut] - wanted))
        if sent_bytes is not None:
            near = [cut for cut in possible if abs(before[cut] - wanted) <= slack * total]
            nearest = min(near or [nearest], key=sent_bytes.__getitem__)
        firsts.append(nearest)
    return tuple(firsts)
