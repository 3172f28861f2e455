"""Least squares with priors, by Gauss and Newton, and what it says of rows that it did not see.

Residuals are logarithms of predicted over reported, so a row of 70 s counts as much as one of
2600 s. A step of the kind that is taken here needs no damping: priors keep every constant near
where it starts, and a step is halved until it makes things better.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

__all__ = ["Fit", "fit", "leave_out"]

_DIFFERENCE = 1e-3  # in a logarithm, for slopes
_MOST_STEPS = 30
_HALVINGS = 12
_SMALL = 1e-4
NOISE = 0.03
"""What nominally equal runs of the reports differ by, and a little for what is left out."""

Predict = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class Fit:
    """Logarithms of constants; `cost` is half the sum of squares that they leave."""

    point: tuple[float, ...]
    cost: float


def fit(
    predict: Predict,
    reported: Sequence[float],
    *,
    start: Sequence[float],
    widths: Sequence[float],
    at: Sequence[float] | None = None,
) -> Fit:
    """The constants that explain some figures best.

    Args:
        predict: figures at some logarithms of constants.
        reported: figures, positive.
        start: the constants' priors, as logarithms.
        widths: how wide each prior is.
        at: where to begin; at the priors if None.

    Example:
        >>> found = fit(lambda x: [2.71828 ** x[0]], [2.0], start=[0.0], widths=[10.0])
        >>> round(2.71828 ** found.point[0], 3)
        2.0
    """
    center, scale = numpy.array(start), numpy.array(widths)
    target = numpy.log(numpy.array(reported))

    def residuals(point: numpy.ndarray) -> numpy.ndarray:
        off = (numpy.log(numpy.array(predict(point.tolist()))) - target) / NOISE
        return numpy.concatenate([off, (point - center) / scale])

    point = numpy.array(start if at is None else at, dtype=float)
    here = residuals(point)
    for _ in range(_MOST_STEPS):
        slopes = numpy.stack(
            [
                (residuals(point + _DIFFERENCE * unit) - here) / _DIFFERENCE
                for unit in numpy.eye(len(point))
            ],
            axis=1,
        )
        step = numpy.linalg.lstsq(slopes, -here, rcond=None)[0]
        for halving in range(_HALVINGS):
            there = residuals(point + step / 2**halving)
            if there @ there < here @ here:
                break
        else:
            break
        gained = here @ here - there @ there
        point, here = point + step / 2**halving, there
        if gained < _SMALL * (here @ here):
            break
    return Fit(tuple(point.tolist()), float(here @ here) / 2)


def leave_out(
    predict: Callable[[Sequence[float], Sequence[int]], Sequence[float]],
    reported: Sequence[float],
    groups: Sequence[str],
    *,
    start: Sequence[float],
    widths: Sequence[float],
    fitted: Sequence[float],
) -> Mapping[int, float]:
    """For each figure, what is predicted by constants that were fitted without its whole group.

    Twins of a row would tell about it, so they are left out with it.

    Args:
        predict: the figures with some numbers at some constants.
        reported: all figures.
        groups: of each figure.
        start: the constants' priors, as logarithms.
        widths: how wide each prior is.
        fitted: to all figures, where each fit begins.
    """
    found: dict[int, float] = {}
    for group in dict.fromkeys(groups):
        left = [at for at, own in enumerate(groups) if own == group]
        kept = [at for at, own in enumerate(groups) if own != group]
        point = fit(
            lambda point, kept=kept: predict(point, kept),
            [reported[at] for at in kept],
            start=start,
            widths=widths,
            at=fitted,
        ).point
        found |= dict(zip(left, predict(point, left), strict=True))
    return found
