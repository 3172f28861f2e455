"""The splits that every plan is compared with: pure data parallel, and an even pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from bayplan.data.chain import Chain
from bayplan.data.plan import Stage
from bayplan.planning.clusters.split import Split

__all__ = [
    "DATA_PARALLEL",
    "EVEN_PIPELINE",
    "data_parallel",
    "even_lasts",
    "even_pipeline",
    "smallest_that_fits",
]

DATA_PARALLEL = "pure data parallel"
EVEN_PIPELINE = "even pipeline"


def data_parallel(
    chain: Chain, devices: Sequence[int], num_samples: int, *, shares: Sequence[int] = ()
) -> Split:
    """All layers on all devices, or on as many as there are samples."""
    row = tuple(devices)[:num_samples]
    stage = Stage(
        first=0,
        last=len(chain.layers) - 1,
        devices=row,
        shares=tuple(shares)[: len(row)] or (1,) * len(row),
    )
    return Split(stages=(stage,), num_samples=num_samples, partitioner=DATA_PARALLEL)


def even_pipeline(chain: Chain, devices: Sequence[int], num_samples: int) -> Split | None:
    """A stage of about equal seconds for each device; None if that is one stage."""
    number = min(len(devices), len(chain.layers))
    if number < 2:
        return None
    lasts = even_lasts(chain, number)
    firsts = [0, *(last + 1 for last in lasts[:-1])]
    return Split(
        stages=tuple(
            Stage(first=first, last=last, devices=(device,), shares=(1,))
            for first, last, device in zip(firsts, lasts, devices, strict=False)
        ),
        num_samples=num_samples,
        num_micro_batches=min(num_samples, 4 * number),
        partitioner=EVEN_PIPELINE,
    )


def even_lasts(chain: Chain, number: int) -> list[int]:
    """The last layers of stages of about equal seconds, each with a layer at least.

    Example:
        >>> from bayplan.data.chain import Layer
        >>> layers = [Layer(name=str(s), forward_seconds=s, backward_seconds=0.0)
        ...     for s in (1.0, 1.0, 2.0)]
        >>> even_lasts(Chain(name="c", num_samples=1, layers=layers, source="guess"), 2)
        [1, 2]
    """
    seconds = [one.forward_seconds + one.backward_seconds for one in chain.layers]
    total, passed = sum(seconds), 0.0
    lasts: list[int] = []
    for at, own in enumerate(seconds):
        passed += own
        left_layers, left_stages = len(seconds) - 1 - at, number - len(lasts) - 1
        is_due = passed >= total * (len(lasts) + 1) / number - own / 2
        if left_stages and (left_layers == left_stages or (is_due and left_layers > left_stages)):
            lasts.append(at)
    return [*lasts, len(seconds) - 1]


def smallest_that_fits(
    plain: Split,
    counts: Sequence[int],
    fits: Callable[[Split], bool],
    *,
    may_recompute: bool = True,
) -> Split:
    """The split with as few micro-batches as fit; if none do, with as many as there can be.

    Args:
        plain: with its fewest micro-batches.
        counts: of micro-batches that may be chosen.
        fits: whether a split does.
        may_recompute: whether stages may repeat their forward.
    """
    most = plain.num_samples // max(len(stage.devices) for stage in plain.stages)
    split = plain
    for count in sorted({plain.num_micro_batches, *counts}):
        if not plain.num_micro_batches <= count <= most:
            continue
        split = replace(plain, num_micro_batches=count)
        if fits(split):
            return split
        repeated = replace(split, recomputed=(True,) * len(split.stages))
        if may_recompute and fits(repeated):
            return repeated
    return split
