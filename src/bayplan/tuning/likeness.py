"""How alike two settings are, so that what one teaches about a prediction holds for the other.

A prediction that is 10 % too low for buckets of 8 MiB will be so for 12 MiB, and less surely for
buckets of 256 KiB: it is the latency that it has wrong. For another algorithm it says nothing.
"""

import math
from typing import NamedTuple

from bayplan.data.exchange_settings import ExchangeSettings

__all__ = ["Likeness"]

_OWN = 0.1  # share of an error that is each setting's own, however near the other is
_REACH = 3.0  # in doublings: buckets twice as large are nearly the same, 64 times are not
_UNIT_BYTES = 1 << 14  # smaller buckets all cost their latency
_UNIT_MS = 0.5


class Likeness(NamedTuple):
    """Both from 0, nothing in common, to 1, the same.

    Attributes:
        of_kind: whether they differ in numbers alone.
        of_numbers: how near these are; 0 for those of two kinds.

    Example:
        >>> small = ExchangeSettings(fusion_threshold_bytes=1 << 20)
        >>> twice = ExchangeSettings(fusion_threshold_bytes=2 << 20)
        >>> large = ExchangeSettings(fusion_threshold_bytes=64 << 20)
        >>> [round(Likeness.of(small, each).of_numbers, 2) for each in (small, twice, large)]
        [1.0, 0.85, 0.12]
        >>> Likeness.of(small, ExchangeSettings())
        Likeness(of_kind=0.0, of_numbers=0.0)
    """

    of_kind: float
    of_numbers: float

    @classmethod
    def of(cls, one: ExchangeSettings, other: ExchangeSettings) -> "Likeness":
        """Compare two settings."""
        if one == other:
            return cls(1.0, 1.0)
        if _kind(one) != _kind(other):
            return cls(0.0, 0.0)
        squares = sum((a - b) ** 2 for a, b in zip(_numbers(one), _numbers(other), strict=True))
        return cls(1.0, (1 - _OWN) * math.exp(-squares / (2 * _REACH**2)))


def _kind(settings: ExchangeSettings) -> tuple[object, ...]:
    return (
        settings.fusion_threshold_bytes is None,
        settings.algorithm,
        settings.hierarchical_allreduce,
        settings.compression,
    )


def _numbers(settings: ExchangeSettings) -> tuple[float, ...]:
    """Places on lines on which equal distances mean equally much."""
    return (
        math.log2(1 + (settings.fusion_threshold_bytes or 0) / _UNIT_BYTES),
        math.log2(1 + settings.cycle_time_ms / _UNIT_MS),
        math.log2(settings.strip_bytes),
        float(settings.cache_enabled),
        float(settings.hierarchical_allgather),
    )
