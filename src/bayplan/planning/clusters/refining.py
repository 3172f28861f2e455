"""Plain splits, and variants of any: other ways to pass its batches, small changes to its stages.

The dynamic programme is exact in a cost model that knows no events: who waits for whom, and which
messages meet on a wire, shows only in the simulation. So the planner also simulates what reference
partitioners found, passed in every way, and changes the fastest split a little for as long as that
helps: a cut by some layers, a device from a stage to the next, micro-batches by one step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from msgspec.structs import replace as _with

from bayplan.data.chain import Chain
from bayplan.data.plan import Stage
from bayplan.planning.clusters.memory import BACKWARD_FIRST
from bayplan.planning.clusters.split import Split, equal_stages
from bayplan.planning.pipelines.cuts import cuts_by_share

__all__ = [
    "DATA_PARALLEL",
    "EVEN_PIPELINE",
    "data_parallel",
    "even_pipeline",
    "neighbours",
    "passings",
    "smallest_that_fits",
]

DATA_PARALLEL = "pure data parallel"
EVEN_PIPELINE = "even pipeline"

_SYNCHRONOUS_COUNTS = (1, 8, 24)
_STALE_COUNTS = (1, 2, 3, 4, 8, 16)
_MOST_UNDER_WAY = 64  # micro-batches in the first stage; more hide nothing
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
_STEPS = (-1, 1, -3, 3)  # layers; a residual branch is about three long


def data_parallel(chain: Chain, devices: Sequence[int], num_samples: int) -> Split:
    """All layers on all devices, or on as many as there are samples."""
    stages = equal_stages([(0, len(chain.layers))], [devices[:num_samples]])
    return Split(stages=stages, num_samples=num_samples, partitioner=DATA_PARALLEL)


def even_pipeline(chain: Chain, devices: Sequence[int], num_samples: int) -> Split | None:
    """A stage of about equal seconds for each device; None if that is one stage."""
    number = min(len(devices), len(chain.layers))
    if number < 2:
        return None
    seconds = [layer.forward_seconds + layer.backward_seconds for layer in chain.layers]
    spans = pairwise((*cuts_by_share(seconds, (1,) * number), len(seconds)))
    return Split(
        stages=equal_stages(spans, [(device,) for device in devices[:number]]),
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
    """The split with as few micro-batches as fit, but no fewer than it has.

    If none of `counts` does, with as many as there can be.
    """
    most = plain.num_samples // max(plain.replicas)
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


def passings(
    split: Split, *, staleness: int = 0, micro_batches: Sequence[int] = ()
) -> Iterator[Split]:
    """The ways for batches to pass the stages of a split, which stay as they are.

    With `micro_batches`, only these numbers of them; else a few typical ones.
    """
    num_stages = len(split.stages)
    most = split.num_samples // max(split.replicas)
    lags = tuple(range(num_stages - 1, -1, -1))
    for count in micro_batches or _SYNCHRONOUS_COUNTS[: 1 if num_stages == 1 else None]:
        if count <= most:
            yield replace(split, num_micro_batches=count, schedule="1f1b", lags=())
    if 1 < num_stages <= staleness + 1:
        for count in micro_batches or _STALE_COUNTS:
            if count <= most and count * lags[0] <= _MOST_UNDER_WAY:
                yield replace(split, num_micro_batches=count, schedule="one-by-one", lags=lags)
        if not micro_batches or 1 in micro_batches:
            yield replace(split, num_micro_batches=1, schedule=BACKWARD_FIRST, lags=lags)


def neighbours(split: Split, *, micro_batches: Sequence[int] = ()) -> Iterator[Split]:
    """Splits that differ from one in one thing, with a sample for every replica."""
    stages = split.stages
    most = split.num_samples // split.num_micro_batches
    for index, (before, after) in enumerate(pairwise(stages)):
        for step in _STEPS:
            last = before.last + step
            if before.first <= last < after.last:
                both = _with(before, last=last), _with(after, first=last + 1)
                yield _replaced(split, index, both)
        for step in (-1, 1):
            number = len(before.devices) + step
            others = len(after.devices) - step
            # Devices of one kind have equal shares; only these may change places.
            is_alike = len({*before.shares, *after.shares}) == 1
            if is_alike and 0 < number <= most and 0 < others <= most:
                yield _replaced(split, index, _moved(before, after, number))
    counts = sorted({*(micro_batches or _COUNTS), split.num_micro_batches})
    place = counts.index(split.num_micro_batches)
    if len(stages) > 1 and split.schedule != BACKWARD_FIRST:
        for count in (*counts[max(0, place - 1) : place], *counts[place + 1 : place + 2]):
            if split.num_samples // count >= max(split.replicas):
                yield replace(split, num_micro_batches=count, partitioner="bayplan")


def _replaced(split: Split, index: int, both: Sequence[Stage]) -> Split:
    stages = (*split.stages[:index], *both, *split.stages[index + 2 :])
    return replace(split, stages=stages, partitioner="bayplan")


def _moved(before: Stage, after: Stage, number: int) -> tuple[Stage, Stage]:
    """With so many of both stages' devices in the first."""
    devices, shares = (*before.devices, *after.devices), (*before.shares, *after.shares)
    return (
        _with(before, devices=devices[:number], shares=shares[:number]),
        _with(after, devices=devices[number:], shares=shares[number:]),
    )
