"""How alike settings are, so that what one teaches about a prediction holds for another.

A prediction that is 10 % too low for buckets of 8 MiB will be so for 12 MiB, and less surely for
buckets of 256 KiB: it is the latency that it has wrong. For another algorithm it says nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bayplan.data.exchange_settings import ExchangeSettings

__all__ = ["Likeness", "likeness"]

_OWN = 0.1  # share of an error that is each setting's own, however near the other is
_REACH = 3.0  # in doublings: buckets twice as large are nearly the same, 64 times are not
_UNIT_BYTES = 1 << 14  # smaller buckets all cost their latency
_UNIT_MS = 0.5


class Likeness(NamedTuple):
    """A row and a column for each setting; from 0, nothing in common, to 1, the same.

    Attributes:
        of_kind: whether they differ in numbers alone.
        of_numbers: how near these are; 0 for those of two kinds.
    """

    of_kind: NDArray[np.float64]
    of_numbers: NDArray[np.float64]


def likeness(settings: Sequence[ExchangeSettings]) -> Likeness:
    """Compare settings, of which no two are equal, each with each.

    Example:
        >>> sizes = [1 << 20, 2 << 20, 64 << 20]
        >>> fused = [ExchangeSettings(fusion_threshold_bytes=size) for size in sizes]
        >>> alike = likeness([*fused, ExchangeSettings()])
        >>> alike.of_numbers[0].round(2).tolist(), alike.of_kind[0].tolist()
        ([1.0, 0.85, 0.12, 0.0], [1.0, 1.0, 1.0, 0.0])
    """
    numbers = np.array([_numbers(one) for one in settings])
    kinds = [_kind(one) for one in settings]
    codes = np.array([kinds.index(one) for one in kinds])
    of_kind = (codes[:, None] == codes[None, :]).astype(np.float64)
    squares = ((numbers[:, None, :] - numbers[None, :, :]) ** 2).sum(axis=2)
    of_numbers = of_kind * (1 - _OWN) * np.exp(-squares / (2 * _REACH**2))
    np.fill_diagonal(of_numbers, 1.0)
    return Likeness(of_kind, of_numbers)


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
