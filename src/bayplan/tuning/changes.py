"""`ChangeDetector`: whether step times are still those of before.

A sum of how far each step lies above what it should be, less an allowance, never below 0 (CUSUM,
Page 1954); and one for below. Scatter takes back what it gave, a change adds up. A step counts for
three spreads at most, so that it takes several in a row and never one alone, however long it took.
"""

__all__ = ["ChangeDetector"]

_LEAST_SPREAD = 0.05  # changes below 5 % are not worth a search, however quiet the link is
_MOST = 3.0  # spreads that one step counts for
_ALLOWANCE = 1.0  # spreads that a step may lie off for nothing
_ALARM = 10.0  # with 5 % noise, years of steps apart by chance; six steps after a real change


class ChangeDetector:
    """Hears one step after the other.

    Example:
        >>> detector = ChangeDetector()
        >>> [detector.hear(0.69, spread=0.05) for _ in range(6)]  # every step takes twice as long
        [False, False, False, False, False, True]
    """

    def __init__(self) -> None:
        self._above = self._below = 0.0

    def hear(self, log_ratio: float, *, spread: float, doubt: float = 0.0) -> bool:
        """Whether by now something has changed.

        Args:
            log_ratio: of a step's seconds over what they were.
            spread: of single steps, as a share.
            doubt: how far what they were may itself be off, as a share.
        """
        unit = max(spread, _LEAST_SPREAD)
        off = max(-_MOST, min(log_ratio / unit, _MOST))
        allowance = _ALLOWANCE + doubt / unit
        self._above = max(self._above + off - allowance, 0.0)
        self._below = max(self._below - off - allowance, 0.0)
        return max(self._above, self._below) > _ALARM
