"""Which replica computes which samples of the batch.

Every stage cuts the same micro-batches into pieces, each for one rank. What one stage must tell
the next then follows from the two cuts alone, for any numbers of replicas:

    samples        0 1 2 3 4 5 6 7
    stage 0        [rank 0][rank 1]
    stage 1        [rank 2 ][3][ 4]     messages: 0->2 0:4, 1->3 4:6, 1->4 6:8

so 7:1, 1:7 and 3:2 are no special cases, and a gradient takes its activation's way back.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from bayplan.data.errors import UsageError
from bayplan.data.plan import Stage

__all__ = ["Message", "Piece", "Routing", "resplit", "round_robin"]


class Piece(NamedTuple):
    """Samples `begin` to `end` (exclusive, of the whole batch) of a micro-batch, on one rank."""

    rank: int
    begin: int
    end: int


class Message(NamedTuple):
    """Activations of some samples, from sender to receiver; their gradients go back the same way.

    Where both are the same rank, nothing is sent: the rank hands over to itself.
    """

    source_stage: int
    target_stage: int
    micro_batch: int
    sender: int
    receiver: int
    begin: int
    end: int

    @property
    def is_local(self) -> bool:
        return self.sender == self.receiver


@dataclass(frozen=True)
class Routing:
    """The pieces of every stage, by stage and micro-batch, in the order of their samples.

    A micro-batch is the same samples in every stage, and each sample is in exactly one. A rank
    has at most one piece of a stage's micro-batch, so an action needs to name no samples.
    """

    pieces: tuple[tuple[tuple[Piece, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.pieces[0])

    @property
    def num_samples(self) -> int:
        return self.pieces[0][-1][-1].end

    def messages(
        self, source_stage: int, target_stage: int, micro_batch: int
    ) -> tuple[Message, ...]:
        """What the pieces of two stages have in common, in the order of the samples."""
        sources = self.pieces[source_stage][micro_batch]
        targets = self.pieces[target_stage][micro_batch]
        key = (source_stage, target_stage, micro_batch)
        messages: list[Message] = []
        s = t = 0
        while s < len(sources) and t < len(targets):  # both cover the same samples, in order
            source, target = sources[s], targets[t]
            begin, end = max(source.begin, target.begin), min(source.end, target.end)
            messages.append(Message(*key, source.rank, target.rank, begin, end))
            s += source.end == end
            t += target.end == end
        return tuple(messages)

    def pieces_of(self, stage: int, rank: int) -> tuple[tuple[int, Piece], ...]:
        """A rank's pieces of a stage, each with its micro-batch."""
        return self._pieces_of.get((stage, rank), ())

    @cached_property
    def _pieces_of(self) -> dict[tuple[int, int], tuple[tuple[int, Piece], ...]]:
        by_key: dict[tuple[int, int], list[tuple[int, Piece]]] = defaultdict(list)
        for stage, micro_batches in enumerate(self.pieces):
            for micro_batch, pieces in enumerate(micro_batches):
                for piece in pieces:
                    by_key[stage, piece.rank].append((micro_batch, piece))
        return {key: tuple(pieces) for key, pieces in by_key.items()}


def resplit(stages: Sequence[Stage], *, num_samples: int, num_micro_batches: int) -> Routing:
    """Cut every micro-batch over all replicas of a stage, in proportion to their shares.

    Micro-batches differ by at most one sample, the larger ones first; none is dropped. A share is
    rounded by largest remainder within each micro-batch, and is never less than one sample.
    """
    widest, num_replicas = _widest(stages, num_samples, num_micro_batches)
    smallest = num_samples // num_micro_batches
    if smallest < num_replicas:
        raise UsageError(
            f"{num_samples} samples in {num_micro_batches} micro-batches leave {smallest} for the"
            f" smallest, but stage {widest} has {num_replicas} replicas; works with a batch of"
            f" {num_replicas * num_micro_batches}" + _fewer(num_samples // num_replicas)
        )
    bounds = _bounds(num_samples, num_micro_batches)
    return Routing(
        tuple(
            tuple(_split(stage, begin, end) for begin, end in pairwise(bounds)) for stage in stages
        )
    )


def round_robin(stages: Sequence[Stage], *, num_samples: int, num_micro_batches: int) -> Routing:
    """Give micro-batch m whole to replica m mod n of each stage; shares play no part.

    This is how PipeDream (SOSP 2019) runs a 7:1 plan.
    """
    widest, num_replicas = _widest(stages, num_samples, num_micro_batches)
    if num_micro_batches < num_replicas:
        raise UsageError(
            f"{num_micro_batches} micro-batches cannot go round the {num_replicas} replicas of"
            f" stage {widest}; works with {num_replicas} micro-batches"
        )
    if num_samples < num_micro_batches:
        raise UsageError(
            f"{num_samples} samples do not fill {num_micro_batches} micro-batches; works with a"
            f" batch of {num_micro_batches}"
            + _fewer(num_samples if num_samples >= num_replicas else 0)
        )
    bounds = _bounds(num_samples, num_micro_batches)
    return Routing(
        tuple(
            tuple(
                (Piece(stage.devices[index % len(stage.devices)], begin, end),)
                for index, (begin, end) in enumerate(pairwise(bounds))
            )
            for stage in stages
        )
    )


def _widest(stages: Sequence[Stage], num_samples: int, num_micro_batches: int) -> tuple[int, int]:
    """The first stage of the most replicas, and how many; refuses an empty batch."""
    if not stages:
        raise UsageError("0 stages; a routing needs at least 1")
    if num_samples < 1:
        raise UsageError(f"a batch of {num_samples} samples; must be at least 1")
    if num_micro_batches < 1:
        raise UsageError(f"{num_micro_batches} micro-batches; must be at least 1")
    widest = max(range(len(stages)), key=lambda stage: len(stages[stage].devices))
    return widest, len(stages[widest].devices)


def _fewer(num_micro_batches: int) -> str:
    return f", or with {num_micro_batches} micro-batches" if num_micro_batches else ""


def _bounds(num_samples: int, num_micro_batches: int) -> list[int]:
    size, longer = divmod(num_samples, num_micro_batches)
    sizes = (size + (index < longer) for index in range(num_micro_batches))
    return list(accumulate(sizes, initial=0))


def _split(stage: Stage, begin: int, end: int) -> tuple[Piece, ...]:
    bounds = accumulate(_counts(stage.shares, end - begin), initial=begin)
    return tuple(
        Piece(rank, first, last)
        for rank, (first, last) in zip(stage.devices, pairwise(bounds), strict=True)
    )


def _counts(shares: Sequence[int], size: int) -> list[int]:
    """Whole numbers in proportion to the shares, each at least 1, that add up to `size`."""
    total = sum(shares)
    counts = [max(1, size * share // total) for share in shares]

    def lacks(index: int) -> int:  # in parts of 1/total of a sample, so that nothing is rounded
        return size * shares[index] - counts[index] * total

    while sum(counts) < size:
        counts[max(range(len(counts)), key=lacks)] += 1
    while sum(counts) > size:  # some were raised to 1: taken from who has most over its share
        counts[min((i for i, count in enumerate(counts) if count > 1), key=lacks)] -= 1
    return counts
