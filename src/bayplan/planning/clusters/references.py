"""The splits that every plan is compared with: pure data parallel, and an even pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from bayplan.data.chain import Chain
from bayplan.data.plan import Stage
from bayplan.planning.clusters.split import Split
from bayplan.planning.pipelines.cuts import cuts_by_share

__all__ = [
    "DATA_PARALLEL",
    "EVEN_PIPELINE",
    "data_parallel",
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
    seconds = [one.forward_seconds + one.backward_seconds for one in chain.layers]
    firsts = cuts_by_share(seconds, (1,) * number)
    return Split(
        stages=tuple(
            Stage(first=first, last=after - 1, devices=(device,), shares=(1,))
            for (first, after), device in zip(
                pairwise((*firsts, len(seconds))), devices, strict=False
            )
        ),
        num_samples=num_samples,
        num_micro_batches=min(num_samples, 4 * number),
        partitioner=EVEN_PIPELINE,
    )


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
