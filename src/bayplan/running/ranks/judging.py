"""`Judge`: from heartbeats to the reason for which all ranks must stop; no threads, no store.

Silence is summed up from the judge's own rounds, each counted at most `longest_round_seconds`.
So a machine that was suspended, or a whole job that was paused with Ctrl-Z, accuses nobody when
it wakes up: the others get the same number of rounds to speak again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bayplan.data.errors import ExitCode
from bayplan.running.ranks.board import Entry, Verdict

__all__ = ["Judge"]


@dataclass
class _Heard:
    """The last entry of a rank, and for how long its beat and its action have stood still."""

    entry: Entry | None = None
    silent_seconds: float = 0.0
    still_seconds: float = 0.0


class Judge:
    """Keeps the last word of every rank and says who is to blame.

    Args:
        rank: the rank that judges.
        world_size: how many ranks there are.
        silence_seconds: a heartbeat that stands still for so long is a dead rank.
        stall_seconds: no rank has a new action for so long: nothing moves. None: not looked at.
        longest_round_seconds: what one round counts at most.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        silence_seconds: float,
        stall_seconds: float | None,
        longest_round_seconds: float,
    ) -> None:
        self.silence_seconds = silence_seconds
        self._rank = rank
        self._stall_seconds = stall_seconds
        self._longest_round_seconds = longest_round_seconds
        self._heard = {other: _Heard() for other in range(world_size)}

    def hear(self, entries: Mapping[int, Entry], *, elapsed_seconds: float) -> None:
        """Take in one round of entries; a rank without one has not spoken yet."""
        seconds = min(elapsed_seconds, self._longest_round_seconds)
        for rank, heard in self._heard.items():
            old, new = heard.entry, entries.get(rank, heard.entry)
            beat_moved = new is not None and (old is None or new.beat != old.beat)
            action_moved = new is not None and (old is None or new.doing != old.doing)
            heard.silent_seconds = 0.0 if beat_moved else heard.silent_seconds + seconds
            heard.still_seconds = 0.0 if action_moved else heard.still_seconds + seconds
            heard.entry = new

    def verdict(self) -> Verdict | None:
        """The reason to stop: a failure, another batch, a silence, a stall, or None."""
        for rank, heard in self._heard.items():
            if heard.entry is not None and heard.entry.failure is not None:
                failure = heard.entry.failure
                text = f"{self._name(rank)} failed at {self._doing(rank)}: {failure.text}"
                return self._blame(rank, text, exit_code=failure.exit_code)
        odd = self._odd_batch()
        if odd is not None:
            return odd
        silent = max(
            (rank for rank in self._heard if rank != self._rank and not self.is_done(rank)),
            key=lambda rank: self._heard[rank].silent_seconds,
            default=self._rank,
        )
        seconds = self._heard[silent].silent_seconds
        if silent != self._rank and seconds >= self.silence_seconds:
            return self._blame(
                silent,
                f"{self._name(silent)} fell silent: no heartbeat for {seconds:.1f} s, limit "
                f"{self.silence_seconds:.1f} s, last action {self._doing(silent)}; "
                "it was killed, stopped, or cut off",
            )
        return self._stall()

    def host_gone(self, host: int | None, reason: str) -> Verdict | None:
        """The verdict when the store cannot be reached; None if its host had ended well."""
        if host is None:
            text = f"the store of the process group, kept outside the ranks, is gone ({reason})"
            return self._blame(self._rank, text)
        if self.is_done(host):
            return None
        text = (
            f"{self._name(host)}, the host of the store, is gone ({reason}), "
            f"last action {self._doing(host)}"
        )
        return self._blame(host, text)

    def is_done(self, rank: int) -> bool:
        """Whether the rank said that it ended well."""
        entry = self._heard[rank].entry
        return entry is not None and entry.is_done

    def place_of_failed(self, rank: int) -> str:
        """Where a rank is that said that an exception ends it; empty if it said nothing."""
        entry = self._heard[rank].entry
        return entry.place if entry is not None and entry.failure is not None else ""

    @property
    def is_all_ending(self) -> bool:
        """Whether every rank has ended or is told to: then the reason is none of theirs."""
        entries = [heard.entry for heard in self._heard.values()]
        return all(
            entry is not None and (entry.is_terminated or entry.is_done or entry.failure)
            for entry in entries
        )

    @property
    def num_to_leave(self) -> int:
        """How many ranks are worth waiting for: not those that have been silent for rounds.

        One that has not spoken yet may be about to, however early this one is done.
        """
        return sum(
            not self._is_overdue(heard)
            or (heard.entry is not None and bool(heard.entry.is_done or heard.entry.failure))
            for heard in self._heard.values()
        )

    def _odd_batch(self) -> Verdict | None:
        """Blame a rank whose batch has another form: messages between them would never meet."""
        seen: dict[int, tuple[int, str]] = {}
        for rank, heard in self._heard.items():
            number, form = heard.entry.batch if heard.entry is not None else (0, "")
            if not number:
                continue
            first, first_form = seen.setdefault(number, (rank, form))
            if form != first_form:
                text = (
                    f"{self._name(rank)} was given another batch than rank {first}: its batch"
                    f" {number} is {form}, there it is {first_form}; give every rank the whole"
                    " batch, the same everywhere"
                )
                return self._blame(rank, text, exit_code=ExitCode.USAGE)
        return None

    def _stall(self) -> Verdict | None:
        """Blame, when no rank moves, the lowest that does not wait for another."""
        moving = {rank: heard for rank, heard in self._heard.items() if not self.is_done(rank)}
        limit = self._stall_seconds
        if limit is None or any(heard.still_seconds < limit for heard in moving.values()):
            return None
        busy = [
            rank for rank, heard in moving.items() if heard.entry and not heard.entry.is_waiting
        ]
        others = ", ".join(f"rank {rank} {self._doing(rank)}" for rank in moving)
        if not busy:
            text = f"every rank waits for another for {limit:.1f} s: {others}"
            return self._blame(min(moving, default=self._rank), text)
        text = (
            f"{self._name(busy[0])} is stuck at {self._doing(busy[0])}: "
            f"no rank has a new action for {limit:.1f} s ({others})"
        )
        return self._blame(busy[0], text)

    def _blame(self, rank: int, text: str, *, exit_code: int = ExitCode.BUG) -> Verdict:
        return Verdict(
            rank=rank, text=text, exit_code=int(exit_code), speaker=self._lowest_living(rank)
        )

    def _lowest_living(self, blamed: int) -> int:
        """The lowest rank that can still speak, in the knowledge of this one."""
        for rank, heard in self._heard.items():
            is_ended = heard.entry is not None and (heard.entry.is_done or heard.entry.failure)
            if rank != blamed and not is_ended and not self._is_silent(rank):
                return rank
        return self._rank

    def _is_silent(self, rank: int) -> bool:
        heard = self._heard[rank]
        return heard.entry is None or self._is_overdue(heard)

    def _is_overdue(self, heard: _Heard) -> bool:
        return heard.silent_seconds > self._longest_round_seconds

    def _name(self, rank: int) -> str:
        entry = self._heard[rank].entry
        return f"rank {rank} ({entry.place})" if entry else f"rank {rank}"

    def _doing(self, rank: int) -> str:
        entry = self._heard[rank].entry
        return f"[{entry.doing}]" if entry else "[none: it never opened its watch]"
