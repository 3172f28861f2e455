"""How far step times scatter, told from the times themselves, whatever a few of them do.

Step times have a floor and a tail: now and then a step waits for a page, a neighbour or a
collector. So the middle is the median and the spread is made of the median distance from it, and
one step of ten seconds changes neither. All of it is of logarithms, for what slows a machine down
slows long steps as much as short ones.
"""

import math
from collections.abc import Sequence
from statistics import median

__all__ = ["Noise", "log_middle"]

_OF_NORMAL = 1.4826  # a normal distribution's spread over its median distance from the middle
_OF_MEDIAN = math.pi / 2  # the variance of a median over that of a mean
_LEAST_SPREAD = 0.002  # no clock of a whole step is better than that
_FEWEST_BLOCKS = 5  # whose middles tell how far blocks scatter


def log_middle(seconds: Sequence[float]) -> float:
    """The logarithm of the middle of some step times."""
    return math.log(median(seconds))


class Noise:
    """What blocks of steps, each of one setting, have told so far.

    Attributes:
        step_spread: of single steps around their block's middle, as a share; 0.01 is 1 %.
    """

    def __init__(self) -> None:
        self._distances: list[float] = []  # of steps from the middle of their block
        self._middles: list[float] = []  # of blocks of the setting that is measured again and again
        self.step_spread = _LEAST_SPREAD

    def add(self, seconds: Sequence[float]) -> None:
        """Take in the steps of a block."""
        middle = log_middle(seconds)
        # In a block of n, the median is as near as if it had been chosen for it: it has been.
        shrunk = math.sqrt(len(seconds) / max(len(seconds) - 1, 1))
        self._distances += [abs(math.log(one) - middle) * shrunk for one in seconds]
        self.step_spread = max(_OF_NORMAL * median(self._distances), _LEAST_SPREAD)

    def add_again(self, middle: float) -> None:
        """Take in the middle of one more block of the same setting as the last such block."""
        self._middles.append(middle)

    def forget_blocks(self) -> None:
        """Another setting is measured again and again from now on."""
        self._middles.clear()

    def block_variance(self, num_steps: int) -> float:
        """How far the middle of so many steps may be off, squared.

        By the scatter of steps, or by that of whole blocks where that is more: on a machine that
        is slow for seconds at a time, steps next to each other agree and are wrong together.
        """
        of_steps = _OF_MEDIAN * self.step_spread**2 / num_steps
        if len(self._middles) < _FEWEST_BLOCKS:
            return of_steps
        jumps = [abs(b - a) for a, b in zip(self._middles, self._middles[1:], strict=False)]
        return max(of_steps, (_OF_NORMAL * median(jumps)) ** 2 / 2)
