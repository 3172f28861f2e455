"""Fewer places to cut a long chain at, so that a search over all of them is short.

Of neighbouring cuts that a search could hardly tell apart by time, only the one that sends least is
kept: in a residual block that is its end, where no skip connection passes.
"""

from bisect import bisect_right
from itertools import accumulate, groupby, pairwise

from bayplan.data.chain import Chain, Layer

__all__ = ["coarsened"]


def coarsened(chain: Chain, *, most: int) -> tuple[Chain, tuple[int, ...]]:
    """A chain of so many layers at most, and the last layer of the given one in each of them.

    Example:
        >>> layers = tuple(Layer(name=str(sent), forward_seconds=1.0, backward_seconds=0.0,
        ...     sent_bytes=sent) for sent in (9, 5, 8, 2, 7, 0))
        >>> chain = Chain(name="six", num_samples=1, layers=layers, source="guess")
        >>> short, lasts = coarsened(chain, most=3)
        >>> lasts, [layer.forward_seconds for layer in short.layers]
        ((1, 3, 5), [2.0, 2.0, 2.0])
    """
    last = len(chain.layers) - 1
    if last < most:
        return chain, tuple(range(last + 1))
    ends = list(accumulate(one.forward_seconds + one.backward_seconds for one in chain.layers))
    total = ends[-1] or 1.0
    bounds = [total * (at + 1) / (most - 1) for at in range(most - 2)]
    lasts = [
        min(cuts, key=lambda cut: chain.layers[cut].sent_bytes)
        for _, cuts in groupby(range(last), key=lambda cut: bisect_right(bounds, ends[cut]))
    ]
    lasts.append(last)
    merged = tuple(
        _merged(chain.layers[before + 1 : end + 1]) for before, end in pairwise([-1, *lasts])
    )
    return _with_layers(chain, merged), tuple(lasts)


def _merged(layers: tuple[Layer, ...]) -> Layer:
    if len(layers) == 1:
        return layers[0]

    def total(name: str) -> float:
        return sum(getattr(one, name) for one in layers)

    return Layer(
        name=f"{layers[0].name} to {layers[-1].name}",
        forward_seconds=total("forward_seconds"),
        backward_seconds=total("backward_seconds"),
        fixed_forward_seconds=total("fixed_forward_seconds"),
        fixed_backward_seconds=total("fixed_backward_seconds"),
        parameter_bytes=int(total("parameter_bytes")),
        held_bytes=int(total("held_bytes")),
        passing_bytes=max(one.passing_bytes for one in layers),
        sent_bytes=layers[-1].sent_bytes,
    )


def _with_layers(chain: Chain, layers: tuple[Layer, ...]) -> Chain:
    return Chain(
        name=chain.name,
        num_samples=chain.num_samples,
        layers=layers,
        device=chain.device,
        source=chain.source,
        spread=chain.spread,
    )
