"""Which samples make up which batch: a pure function of seed, epoch and position.

Nothing about the order is kept while a run goes on, and workers have no part in it. So a run that
was interrupted goes on with the very sample that was next, and the number of workers may change.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from bayplan.data.record import DataPosition

__all__ = ["BatchIndices", "batch_indices", "epoch_order", "num_batches"]

_WINDOW = 4096  # samples of shards that are shuffled together


@dataclass(frozen=True)
class BatchIndices:
    """The samples of one batch.

    Attributes:
        start: of the batch in its epoch's order, counted in samples.
        ends: whether it is the last training batch of an epoch, or the last of an evaluation.
    """

    is_training: bool
    epoch: int
    start: int
    samples: tuple[int, ...]
    ends: bool


def epoch_order(
    num_samples: int, *, seed: int, epoch: int, shards: Sequence[int] = ()
) -> numpy.ndarray:
    """All samples of an epoch, shuffled.

    Args:
        num_samples: to put in order.
        seed, epoch: what the order depends on.
        shards: how many samples each has, of those that are best read one after the other. Then
            shards are shuffled, and samples within windows of a few thousand.

    Example:
        >>> epoch_order(6, seed=0, epoch=0).tolist() == epoch_order(6, seed=0, epoch=0).tolist()
        True
        >>> sorted(epoch_order(6, seed=0, epoch=1, shards=(4, 2)).tolist())
        [0, 1, 2, 3, 4, 5]
    """
    generator = numpy.random.Generator(numpy.random.PCG64((seed, epoch)))
    if not shards:
        return generator.permutation(num_samples)
    begins = numpy.cumsum([0, *shards])
    parts = [
        numpy.arange(begins[shard], begins[shard + 1])
        for shard in generator.permutation(len(shards))
    ]
    order = numpy.concatenate(parts)
    for begin in range(0, num_samples, _WINDOW):
        window = order[begin : begin + _WINDOW]
        order[begin : begin + _WINDOW] = window[generator.permutation(len(window))]
    return order


def num_batches(num_samples: int, batch_size: int, *, position: DataPosition, epochs: int) -> int:
    """Training batches from a position to the end of the last of some epochs."""
    if position.epoch >= epochs:
        return 0
    rest = (num_samples - position.index) // batch_size
    return rest + (epochs - position.epoch - 1) * (num_samples // batch_size)


def batch_indices(
    num_samples: int,
    batch_size: int,
    *,
    position: DataPosition,
    num_steps: int,
    shards: Sequence[int] = (),
    num_evaluated: int = 0,
    share: tuple[int, int] = (0, 1),
) -> Iterator[BatchIndices]:
    """Batches to train on, and to evaluate with after each epoch.

    A last batch that would be smaller is left out in training, and kept in evaluation.

    Args:
        num_samples: to train on in an epoch.
        batch_size: of each batch.
        position: where to begin.
        num_steps: how many batches to train on.
        shards: as for `epoch_order`.
        num_evaluated: samples to evaluate with; 0 evaluates nothing.
        share: of the batches to evaluate with: every so manieth, from a first one.
    """
    epoch, start, done = position.epoch, position.index, 0
    while done < num_steps:
        order = epoch_order(num_samples, seed=position.seed, epoch=epoch, shards=shards)
        while start + batch_size <= num_samples and done < num_steps:
            done, end = done + 1, start + batch_size
            ends = end + batch_size > num_samples
            samples = tuple(order[start:end].tolist())
            yield BatchIndices(True, epoch, start, samples, ends)
            start = end
        if start + batch_size <= num_samples:
            return  # the steps ended within an epoch
        firsts = range(share[0] * batch_size, num_evaluated, share[1] * batch_size)
        for first in firsts:
            samples = tuple(range(first, min(first + batch_size, num_evaluated)))
            yield BatchIndices(False, epoch, first, samples, first == firsts[-1])
        if num_evaluated and not firsts:  # all are for others, who wait for this one's sums
            yield BatchIndices(False, epoch, num_evaluated, (), True)
        epoch, start = epoch + 1, 0
