"""A device's constants: chosen from candidates on the models of one half, tried on the others.

Which half a model is in follows from its name alone. Every model counts once, however many of its
rows there are.
"""

import zlib
from collections.abc import Mapping, Sequence

__all__ = ["best", "is_fitted", "leave_one_out"]

Losses = Mapping[str, Sequence[float]]
"""Of each model, the loss with each candidate, mean over its rows."""


def is_fitted(model: str) -> bool:
    """Whether constants are chosen on a model: the CRC-32 of its name is even."""
    return zlib.crc32(model.encode()) % 2 == 0


def best(losses: Losses) -> int:
    """The candidate with the least mean loss; of equal ones the middle one."""
    return _least(_totals(losses))


def leave_one_out(losses: Losses) -> dict[str, int]:
    """For each model the candidate that all others choose."""
    totals = _totals(losses)
    return {
        model: _least([total - part for total, part in zip(totals, parts, strict=True)])
        for model, parts in losses.items()
    }


def _totals(losses: Losses) -> list[float]:
    return [sum(parts) for parts in zip(*losses.values(), strict=True)]


def _least(totals: Sequence[float]) -> int:
    least = min(totals) + 1e-9
    equal = [index for index, total in enumerate(totals) if total <= least]
    return equal[len(equal) // 2]
