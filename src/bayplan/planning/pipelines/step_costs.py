"""`StepCosts`: what the parts of a step take, each alone on an idle machine."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from bayplan.data.actions import Action
from bayplan.planning.pipelines.routing import Message
from bayplan.simulating.network import Network, Transfer

__all__ = ["Loading", "StepCosts"]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Samples that must be read and made ready before a forward can begin.

    A loader makes the samples of its ranks ready one micro-batch after the other, in a buffer: it
    begins with a batch when all samples of the batch `num_ahead` before it were taken.

    Attributes:
        loader: of a rank; ranks of one host share one.
        seconds: that the loader needs for the samples of a rank's forward; 0 for none.
        num_ahead: batches that have room in the buffer.
    """

    loader: Callable[[int], Hashable]
    seconds: Callable[[int, Action], float]
    num_ahead: int = 2

    def __post_init__(self) -> None:
        if self.num_ahead < 1:
            raise ValueError(f"num_ahead is {self.num_ahead}, must be at least 1")


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the parts of a step take on an idle machine.

    Attributes:
        seconds: of a rank's forward, backward or half of one.
        update_seconds: by rank, of its optimizer's update.
        message_bytes: of a message; True for the gradients that go back.
        bucket_bytes: by bucket.
        own_seconds: of a rank's send, receive or reduce, what the rank is busy with itself, while
            what it sends is on its way, or when what it receives is here.
        network: between ranks, which are its devices' numbers.
        num_cores: that all ranks share; infinite where each has a device of its own.
        early: of a rank's backward that is the last of its stage, by bucket, how many seconds
            before its end it has made the bucket's gradients.
        copies: what a rank's forward swaps out or its backward swaps in; None for nothing. Copies
            of a rank go one after the other, beside what it computes, and a backward that swaps in
            does not end before its copies do.
        loading: how samples come; None if they are always there.
    """

    seconds: Callable[[int, Action], float]
    update_seconds: Sequence[float]
    message_bytes: Callable[[Message, bool], float]
    bucket_bytes: Sequence[float]
    network: Network
    num_cores: float = math.inf
    early: Callable[[int, Action], Mapping[int, float]] = lambda rank, action: {}
    own_seconds: Callable[[int, Action], float] = lambda rank, action: 0.0
    copies: Callable[[int, Action], Transfer | None] = lambda rank, action: None
    loading: Loading | None = None
