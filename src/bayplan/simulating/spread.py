"""How far figures may be off, by where they come from.

A figure says its source in words, and the first of them tells how much to trust it. The shares are
what predictions of published runs were found to be off by: a few percent where the device itself
was measured, up to about 30 % where a data sheet and a guessed efficiency are all there is.
"""

from collections.abc import Iterable

from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind, Figure, OpClass

__all__ = ["compute_spread", "link_spread", "source_spread", "worst_spread"]

_MEASURED, _FITTED, _DATA_SHEET, _GUESS = 0.05, 0.10, 0.20, 0.30
_BY_WORD = {
    "measured": _MEASURED,
    "probe": _MEASURED,
    "fit": _FITTED,
    "report": _FITTED,
    "reports": _FITTED,
    "data": _DATA_SHEET,
    "by": 0.0,
}


def source_spread(source: str) -> float:
    """How far a figure may be off, as a share of it.

    Example:
        >>> source_spread("measured with 20 messages"), source_spread("guess: as V100")
        (0.05, 0.3)
    """
    word = source.split(maxsplit=1)[0].strip(":;,").lower()
    return _BY_WORD.get(word, _GUESS)


def compute_spread(kinds: Iterable[DeviceKind]) -> float:
    """How far the time of operators may be off: as far as the worst efficiency and peak rate.

    Classes of little work, gathers and views, are left out: a step hardly depends on them.
    """
    least = (OpClass.GATHER, OpClass.VIEW)
    figures = [
        figure
        for kind in kinds
        for figure in (
            *(one for name, one in kind.efficiency.items() if name not in least),
            kind.bandwidth_bytes_per_s,
        )
    ]
    return worst_spread(figures)


def link_spread(cluster: Cluster) -> float:
    """How far the time of messages and sums may be off: as far as the worst bandwidth."""
    joined = (*cluster.links, *cluster.joints)
    return worst_spread(one.bandwidth_bytes_per_s for one in joined)


def worst_spread(figures: Iterable[Figure]) -> float:
    """How far the least trusted of some figures may be off."""
    return max((source_spread(figure.source) for figure in figures), default=0.0)
