"""`Rounds`: repeated comparisons of the same two settings, of which some may be spoilt.

A neighbour that takes the machine for a second slows a whole block, and a comparison with it is
wrong by more than any scatter tells. So rounds that lie far from the others are left out; and while
there are only two that contradict each other, neither is believed much.
"""

from collections.abc import Sequence
from statistics import fmean, median

from bayplan.tuning.beliefs import Comparison

__all__ = ["Rounds"]

_FAR = 3.0  # spreads of one round


class Rounds:
    """All comparisons of a search, gathered by who was compared with whom."""

    def __init__(self) -> None:
        self._of_pair: dict[tuple[int, int], list[Comparison]] = {}

    def add(self, one: Comparison) -> None:
        """Take in a round."""
        self._of_pair.setdefault((one.first, one.second), []).append(one)

    def count(self, first: int, second: int) -> int:
        """How often two were compared."""
        return len(self._of_pair.get((first, second), ()))

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(map(len, self._of_pair.values()))

    @property
    def merged(self) -> list[Comparison]:
        """One comparison for each two."""
        return [_merged(rounds) for rounds in self._of_pair.values()]


def _merged(rounds: Sequence[Comparison]) -> Comparison:
    """What several rounds say together.

    Example:
        >>> [one, far] = [Comparison(1, 0, ratio, 0.0001) for ratio in (0.1, 0.7)]
        >>> _merged([one, far, one]).log_ratio
        0.1
        >>> [round(_merged(rounds).variance, 5) for rounds in ([one], [one, one], [one, far])]
        [0.0001, 5e-05, 0.09]
    """
    middle = median(one.log_ratio for one in rounds)
    variance = fmean(one.variance for one in rounds)
    near = [one.log_ratio for one in rounds if (one.log_ratio - middle) ** 2 <= _FAR**2 * variance]
    first, second = rounds[0].first, rounds[0].second
    if near:
        return Comparison(first, second, fmean(near), variance / len(near))
    widest = max((one.log_ratio - middle) ** 2 for one in rounds)
    return Comparison(first, second, middle, widest)
