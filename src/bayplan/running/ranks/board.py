"""`Board`: what ranks tell each other through the store of their process group.

Every rank owns one entry and overwrites it with each heartbeat; one more entry holds the verdict,
which the first to write it wins. Two dangers of the store shape this file:

1. A connection serves one call at a time, and the main thread may wait in one for half an hour
   (a process group that is being made). The board has a connection of its own.
2. A call to a host that is stopped, not dead, never returns and has no timeout. Calls run in a
   thread of their own, and whoever asked waits a bounded time.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import torch.distributed as dist

from bayplan.devices.copy_thread import CopyThread

__all__ = ["Board", "BoardGone", "Entry", "Failure", "Verdict"]

T = TypeVar("T")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended a rank, in one line, and the exit code that goes with it."""

    text: str
    exit_code: int


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself with each heartbeat.

    Attributes:
        beat: counts heartbeats; one that stands still is a rank that is silent.
        place: process id and host, to find the process by.
        doing: the last action, as text.
        batch: the number of the batch that is worked on, from 1 on, and its form.
        is_waiting: the action waits for another rank.
        is_terminated: the rank got SIGTERM, and only looks for the reason before it ends.
        is_done: the rank ended well; its silence is no failure.
        failure: set when the rank ended by an exception.
    """

    beat: int
    place: str
    doing: str
    batch: tuple[int, str] = (0, "")
    is_waiting: bool = False
    is_terminated: bool = False
    is_done: bool = False
    failure: Failure | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why all ranks stop, and which of them says so."""

    rank: int
    text: str
    exit_code: int
    speaker: int


class BoardGone(Exception):
    """The store cannot be reached: its host died, was stopped, or the network is down."""


class Board:
    """The entries of all ranks of one watch.

    Args:
        store: the store of the process group; every rank passes its own view of the same one.
        rank: whose entry this board writes.
        world_size: how many entries there are.
        patience_seconds: a call that takes longer means that the store is gone.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, patience_seconds: float
    ) -> None:
        self._rank = rank
        self._ranks = range(world_size)
        self._patience_seconds = patience_seconds
        self._known: set[int] = set()
        self._gone: str | None = None  # why; a store never comes back, so nobody waits for it twice
        self._lane = CopyThread("bayplan-board")
        self._store = self._call(lambda: _own_store(store, rank))

    def exchange(self, own: Entry) -> dict[int, Entry]:
        """Write the own entry and read those of the others that have written one."""
        return self._call(lambda: self._exchange(own))

    def verdict(self) -> Verdict | None:
        """The verdict, None as long as there is none."""
        return self._call(self._read_verdict)

    def agree(self, verdict: Verdict) -> Verdict:
        """Propose a verdict and return the one that holds: that of the first to propose."""
        text = msgspec.json.encode(verdict).decode()
        won = self._call(lambda: self._store.compare_set("verdict", "", text))
        return msgspec.json.decode(won, type=Verdict)

    def claim_voice(self) -> bool:
        """Whether this rank is the one to print the verdict; only one ever is."""
        own = str(self._rank)
        return self._call(lambda: self._store.compare_set("voice", "", own)) == own.encode()

    def leave(self) -> None:
        """Say that this rank has read all it needs, so that the host may go."""
        self._call(lambda: self._store.add("left", 1))

    def close(self) -> None:
        """Ask for nothing any more; a call that hangs is left alone."""
        self._lane.close(joins=False)

    def num_left(self) -> int:
        """How many ranks have left."""
        return self._call(lambda: self._store.add("left", 0))

    def _exchange(self, own: Entry) -> dict[int, Entry]:
        self._store.set(_key(self._rank), msgspec.json.encode(own).decode())
        # Reading a key that is not there yet would block, so each is looked for first.
        unknown = [rank for rank in self._ranks if rank not in self._known]
        self._known |= {rank for rank in unknown if self._store.check([_key(rank)])}
        known = sorted(self._known - {self._rank})
        return dict(zip(known, self._read(known), strict=True))

    def _read(self, ranks: Iterable[int]) -> list[Entry]:
        keys = [_key(rank) for rank in ranks]
        values = self._store.multi_get(keys) if keys else []
        return [msgspec.json.decode(value, type=Entry) for value in values]

    def _read_verdict(self) -> Verdict | None:
        if not self._store.check(["verdict"]):
            return None
        return msgspec.json.decode(self._store.get("verdict"), type=Verdict)

    def _call(self, ask: Callable[[], T]) -> T:
        if self._gone is not None:
            raise BoardGone(self._gone)
        answers: list[T] = []
        job = self._lane.submit(lambda: answers.append(ask()))
        try:
            job.result(self._patience_seconds)
        except TimeoutError:
            self._gone = f"the store has not answered for {self._patience_seconds:.1f} s"
            raise BoardGone(self._gone) from None
        except RuntimeError as error:  # all errors of a store are: DistNetworkError and its kin
            self._gone = str(error).strip().splitlines()[0]
            raise BoardGone(self._gone) from error
        return answers[0]


def _key(rank: int) -> str:
    return f"rank{rank}"


def _own_store(store: dist.Store, rank: int) -> dist.Store:
    """A connection of our own, below a prefix that the n-th watch of every rank shares."""
    below = dist.PrefixStore("bayplan/watch", store.clone())  # pyrefly: ignore[missing-attribute] - stubs
    generation = below.add(f"opened{rank}", 1)
    return dist.PrefixStore(str(generation), below)
