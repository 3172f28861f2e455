"""What ranks tell each other through their store, and who is to blame when one is lost.

`Board`: every rank owns one entry and overwrites it with each heartbeat; one more entry holds the
verdict, which the first to write it wins. Two dangers of the store shape it:

1. A connection serves one call at a time, and the main thread may wait in one for half an hour
   (a process group that is being made). The board has a connection of its own.
2. A call to a host that is stopped, not dead, never returns and has no timeout. Calls run in a
   thread of their own, and whoever asked waits a bounded time.

`Judge`: from heartbeats to the reason for which all ranks must stop; no threads, no store. Silence
is summed up from the judge's own rounds, each counted at most `longest_round_seconds`. So a machine
that was suspended, or a whole job that was paused with Ctrl-Z, accuses nobody when it wakes up: the
others get the same number of rounds to speak again.

A beat that stands still is weak proof: it comes from a thread of Python, which waits for whoever
holds the interpreter. A pulse that is missing (`Lifelines`) is strong proof, and one that is felt
shows that the process lives. So a rank without one may be silent for longer, and one with a pulse
for a minute, after which its interpreter counts as stuck.
"""

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch.distributed as dist

from bayplan.data.errors import ExitCode
from bayplan.devices.copy_thread import CopyThread
from bayplan.devices.machine import host_identity, is_running

__all__ = ["Board", "BoardGone", "Entry", "Failure", "Judge", "Verdict"]

T = TypeVar("T")
STUCK_SECONDS = 60.0  # a process lives, and its interpreter does nothing
_WAITS = 10


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended a rank, in one line, and its exit code."""

    text: str
    exit_code: int


def _own_place() -> str:
    with contextlib.suppress(OSError):
        return host_identity()
    return ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself with each heartbeat.

    Attributes:
        beat: counts heartbeats; one that stands still is a rank that is silent.
        place: the same for processes that see each other; empty where nothing is seen.
        lifeline: where the rank listens for the lines of the others; empty if it does not.
        felt: the ranks whose pulse it feels.
        batch: the number of the batch that is worked on, from 1 on, and its form.
        is_terminated: the rank got SIGTERM, and only looks for the reason before it ends.
        is_done: the rank ended well; its silence is no failure.
    """

    beat: int
    doing: str
    process: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    place: str = msgspec.field(default_factory=_own_place)
    lifeline: str = ""
    felt: tuple[int, ...] = ()
    batch: tuple[int, str] = (0, "")
    is_terminated: bool = False
    is_done: bool = False
    failure: Failure | None = None

    @property
    def is_ended(self) -> bool:
        return self.is_done or self.failure is not None

    def is_seen_running(self) -> bool:
        """Whether it is another process of this host that runs; of other hosts nothing is seen."""
        is_near = bool(self.place) and self.place == _own_place() and self.process != os.getpid()
        return is_near and is_running(self.process)


_UNHEARD = Entry(beat=-1, doing="none: it never opened its watch", process=0, host="", place="")


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
        store: of the process group; every rank passes its own view of the same one.
        patience_seconds: a call that takes longer means that the store is gone.
        has_pulse: whether the process that holds the store has a pulse; None if that is unknown.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        patience_seconds: float,
        has_pulse: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._unheard = set(range(world_size)) - {rank}  # those that have written nothing yet
        self._heard: list[int] = []
        self._patience_seconds, self._has_pulse = patience_seconds, has_pulse
        self._gone: str | None = None  # why; a store never comes back, so nobody waits for it twice
        self._lane = CopyThread("bayplan-board")
        self._store = self._call(lambda: _own_store(store, rank))

    def exchange(self, own: Entry) -> tuple[dict[int, Entry], Verdict | None]:
        """Write the own entry; read those of the others that have written one, and the verdict."""
        return self._call(lambda: self._exchange(own))

    def agree(self, verdict: Verdict) -> Verdict:
        """Propose a verdict and return the one that holds: that of the first to propose."""
        text = msgspec.json.encode(verdict).decode()
        won = self._call(lambda: self._store.compare_set("verdict", "", text))
        return msgspec.json.decode(won, type=Verdict)

    def claim_voice(self) -> bool:
        """Whether this rank is the one to print the verdict; only one ever is."""
        own = str(self._rank)
        return self._call(lambda: self._store.compare_set("voice", "", own)) == own.encode()

    def count_left(self, own: int = 0) -> int:
        """How many ranks have read all they need, so that the host may go; 1 for this one, too."""
        return self._call(lambda: self._store.add("left", own))

    def close(self) -> None:
        """Ask for nothing any more; a call that hangs is left alone."""
        self._lane.close(joins=False)

    def _exchange(self, own: Entry) -> tuple[dict[int, Entry], Verdict | None]:
        self._store.set(_key(self._rank), msgspec.json.encode(own).decode())
        # Reading a key that is not there yet would block, so each is looked for first.
        heard = {rank for rank in self._unheard if self._store.check([_key(rank)])}
        self._unheard -= heard
        self._heard += heard
        values = self._store.multi_get(list(map(_key, self._heard))) if self._heard else []
        entries = (msgspec.json.decode(value, type=Entry) for value in values)
        verdict = None
        if self._store.check(["verdict"]):
            verdict = msgspec.json.decode(self._store.get("verdict"), type=Verdict)
        return dict(zip(self._heard, entries, strict=True)), verdict

    def _call(self, ask: Callable[[], T]) -> T:
        if self._gone is not None:
            raise BoardGone(self._gone)
        answer = self._lane.submit(ask)
        # In many short waits: one that takes long because the interpreter was held counts as short.
        wait_seconds = self._patience_seconds / _WAITS
        seconds = {True: 0.0, None: 0.0}
        while seconds[None] < self._patience_seconds and seconds[True] < STUCK_SECONDS:
            with contextlib.suppress(TimeoutError):
                try:
                    return answer.result(wait_seconds)
                except RuntimeError as error:  # all errors of a store are: DistNetworkError, ...
                    self._gone = str(error).strip().splitlines()[0]
                    raise BoardGone(self._gone) from error
            has_pulse = self._has_pulse()
            if has_pulse is False:
                break
            seconds[has_pulse] += wait_seconds
        self._gone = f"the store does not answer, limit {self._patience_seconds:.1f} s"
        raise BoardGone(self._gone)


def _key(rank: int) -> str:
    return f"rank{rank}"


def _own_store(store: dist.Store, rank: int) -> dist.Store:
    """A connection of our own, below a prefix that the n-th watch of every rank shares."""
    below = dist.PrefixStore("bayplan/watch", store.clone())  # pyrefly: ignore[missing-attribute] - stubs
    generation = below.add(f"opened{rank}", 1)
    return dist.PrefixStore(str(generation), below)


@dataclass(kw_only=True)
class Judge:
    """Keeps the last word of every rank (`entries`) and says who is to blame.

    Args:
        silence_seconds: for so long a pulse may be missing; a beat may stand still for longer.
        longest_round_seconds: what one round counts at most.
        patience: how much longer a beat may stand still where no pulse is known of.
    """

    rank: int
    world_size: int
    silence_seconds: float
    longest_round_seconds: float
    patience: float = 3.0

    def __post_init__(self) -> None:
        self.entries = dict.fromkeys(range(self.world_size), _UNHEARD)
        self._silent_seconds = dict.fromkeys(range(self.world_size), 0.0)
        self._gone: frozenset[int] = frozenset()
        self._missed: frozenset[int] = frozenset()
        self._felt: frozenset[int] = frozenset()

    def hear(
        self,
        entries: Mapping[int, Entry],
        *,
        elapsed_seconds: float,
        gone: frozenset[int] = frozenset(),
        missed: frozenset[int] = frozenset(),
        felt: frozenset[int] = frozenset(),
    ) -> None:
        """Take in one round of entries; a rank without one has not spoken yet.

        Args:
            gone: ranks whose process had ended before the entries were read, which are thus their
                last words.
            missed: ranks whose pulse has been missing for `silence_seconds`.
            felt: those whose pulse is felt, here or by rank 0.
        """
        self._gone, self._missed, self._felt = gone, missed, felt
        seconds = min(elapsed_seconds, self.longest_round_seconds)
        for rank, old in self.entries.items():
            new = entries.get(rank, old)
            silent_seconds = self._silent_seconds[rank] + seconds if new.beat == old.beat else 0.0
            self.entries[rank], self._silent_seconds[rank] = new, silent_seconds

    def verdict(self) -> Verdict | None:
        """The reason to stop: a failure, another batch, a death, a silence, or None."""
        for rank, entry in self.entries.items():
            if entry.failure is not None:
                text = f"{self._name(rank)} failed at [{entry.doing}]: {entry.failure.text}"
                return self._blame(rank, text, exit_code=entry.failure.exit_code)
        return self._odd_batch() or self._death() or self._silence()

    def host_gone(self, host: int | None, reason: str) -> Verdict | None:
        """The verdict when the store cannot be reached; None if its host had ended well."""
        if host is None:
            text = f"the store of the process group, kept outside the ranks, is gone ({reason})"
            speaker = next(self._living(), self.rank)
            return Verdict(rank=self.rank, text=text, exit_code=ExitCode.BUG, speaker=speaker)
        if self.entries[host].is_done:
            return None
        text = (
            f"{self._name(host)}, the host of the store, is gone ({reason}), "
            f"last action [{self.entries[host].doing}]"
        )
        return self._blame(host, text)

    @property
    def is_all_ending(self) -> bool:
        """Whether every rank has ended or is told to: then the reason is none of theirs."""
        return all(entry.is_terminated or entry.is_ended for entry in self.entries.values())

    @property
    def num_to_leave(self) -> int:
        """How many ranks are worth waiting for: not those that have been silent for rounds.

        One that has not spoken yet may be about to, however early this one is done.
        """
        entries = self.entries.items()
        return sum(entry.is_ended or not self._is_overdue(rank) for rank, entry in entries)

    def _odd_batch(self) -> Verdict | None:
        """Blame a rank whose batch has another form: messages between them would not match."""
        seen: dict[int, tuple[int, str]] = {}
        for rank, entry in self.entries.items():
            number, form = entry.batch
            first, first_form = seen.setdefault(number, (rank, form))
            if number and form != first_form:
                text = (
                    f"{self._name(rank)} was given another batch than rank {first}: its batch"
                    f" {number} is {form}, there it is {first_form}; give every rank the whole"
                    " batch, the same everywhere"
                )
                return self._blame(rank, text, exit_code=ExitCode.USAGE)
        return None

    def _death(self) -> Verdict | None:
        """Blame a rank whose process is gone without a word, and without having been told to go."""
        for rank in sorted(self._gone):
            entry = self.entries[rank]
            if not entry.is_ended and not entry.is_terminated:
                return self._blame(rank, f"{self._name(rank)} died, last action [{entry.doing}]")
        return None

    def _silence(self) -> Verdict | None:
        """Blame the rank that is furthest beyond its limit."""
        others = (r for r, entry in self.entries.items() if r != self.rank and not entry.is_done)
        silent = max(others, key=self._excess, default=None)
        if silent is None or self._excess(silent) < 1:
            return None
        limit_seconds = self._limit_seconds(silent)
        why = "it was killed, stopped, or cut off"
        if silent in self._felt:
            why = "its process lives, so something in it holds Python's interpreter lock"
        text = (
            f"{self._name(silent)} fell silent: no heartbeat for"
            f" {max(self._silent_seconds[silent], limit_seconds):.1f} s, limit"
            f" {limit_seconds:.1f} s, last action [{self.entries[silent].doing}]; {why}"
        )
        return self._blame(silent, text)

    def _limit_seconds(self, rank: int) -> float:
        if rank in self._missed:
            return self.silence_seconds
        return max(
            STUCK_SECONDS if rank in self._felt else 0.0, self.patience * self.silence_seconds
        )

    def _excess(self, rank: int) -> float:
        if rank in self._missed:
            return math.inf
        return self._silent_seconds[rank] / self._limit_seconds(rank)

    def _blame(self, blamed: int, text: str, *, exit_code: int = ExitCode.BUG) -> Verdict:
        """A verdict that is told by the lowest rank that can still speak, as far as known here."""
        speaker = next((rank for rank in self._living() if rank != blamed), self.rank)
        return Verdict(rank=blamed, text=text, exit_code=int(exit_code), speaker=speaker)

    def _living(self) -> Iterator[int]:
        for rank, entry in self.entries.items():
            if entry.host and not entry.is_ended and not self._is_overdue(rank):
                yield rank

    def _is_overdue(self, rank: int) -> bool:
        is_silent = self._silent_seconds[rank] > self.longest_round_seconds
        is_silent = is_silent and rank not in self._felt
        return is_silent or rank in self._gone or rank in self._missed

    def _name(self, rank: int) -> str:
        entry = self.entries[rank]
        return f"rank {rank}" + (f" (pid {entry.process} on {entry.host})" if entry.host else "")
