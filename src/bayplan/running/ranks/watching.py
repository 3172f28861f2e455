"""`Watch`: when a rank dies, fails or falls silent, all stop within seconds and one says why.

torchrun sends SIGTERM to all ranks of a machine a tenth of a second after one has died: before
any of them can know which. Python runs signal handlers in the main thread only, and a main thread
that waits in gloo never gets there; what works is that C writes the signal's number to a socket.

gloo names no rank, and waits half an hour for a silent one; a main thread that waits in it cannot
be woken (`ProcessGroup.abort` returns and changes nothing). So every rank has a thread that beats
in the store and listens to the others. A process that ends is known at once by its connection
(`Lifelines`), one that was stopped or cut off by its missing pulse there. When a thread finds a
rank to blame, it agrees with the others on one verdict, one rank prints it, and each ends its own
process.

    main thread    doing = 0F0 .. doing = 1B3 ....... waits for rank 2 in gloo ..... (ended)
    its thread     beat    beat    beat    beat    rank 2 is gone -> verdict -> os._exit

It is the first thing that a rank opens, so that whatever is wrong with the rest is told once.
"""

import atexit
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import distributed

from bayplan import torch_compat as torch_compat
from bayplan.data.errors import BayplanError, ExitCode, UsageError
from bayplan.running.ranks.failures import (
    REPORT_MARK,
    TERMINATED,
    RankFailure,
    ToldFailure,
    end_process,
    exit_code_of,
    is_symptom,
    one_line,
    told,
    write_line,
)
from bayplan.running.ranks.judging import Board, BoardGone, Entry, Failure, Judge, Verdict
from bayplan.running.ranks.lifelines import Lifelines

__all__ = ["Watch", "heard_sigterm", "host_of_store", "open_watch"]


@contextlib.contextmanager
def heard_sigterm(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell`, in a thread, instead of dying by SIGTERM.

    Does nothing where somebody else takes care of SIGTERM, or outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    old_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    if old_fd != -1:  # an event loop's, say
        signal.set_wakeup_fd(old_fd)
        reading.close()
        writing.close()
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_listen, args=(reading, tell), daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        writing.close()  # ends the thread


def _listen(reading: socket.socket, tell: Callable[[], None]) -> None:
    with reading:
        while numbers := reading.recv(64):
            if signal.SIGTERM in numbers:
                tell()


_SILENCE_SECONDS = 3.0
LINGER_SECONDS = 5.0  # what the host of the store gives the others to read their last entries
LEAD_SECONDS = 8.0  # at most, for one that failed: Python takes seconds to end on a busy machine


def host_of_store(environment: Mapping[str, str]) -> int | None:
    """The rank that hosts the store of `env://`, or None where torchrun's agent does."""
    return None if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


class Watch:
    """Beats for this rank, listens to the others, and ends its process (`end`) when one is lost.

    Open it on every rank right after the process group; several in one run are opened in the same
    order everywhere. `with watch:` tells the others of an exception before it leaves, and closes
    the watch otherwise. Tell what the rank does by `watch.doing = ...`: a plain attribute, whose
    text the watch's thread takes once per beat. In the `with` block, SIGTERM ends the process only
    after a look for a lost rank: torchrun sends it to all ranks when one dies.

    The action told of a killed rank is that of its last beat, so up to a second old.

    A heartbeat shows that a process lives, not that it gets on: a thread beats while the main
    thread hangs in C. A process that holds the interpreter lock for a minute counts as dead.

    Args:
        world_size: how many ranks watch; one alone watches nobody.
        silence_seconds: how long a pulse may be missing, and the store may not answer.
        host: the rank whose process holds the store, None if it is none (`host_of_store`).
        address: of the machine that rank 0 is on, as the other ranks reach it.
    """

    doing: Any = "start"
    batch: tuple[int, str] = (0, "")  # the number of the batch that is worked on, and its form

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        silence_seconds: float = _SILENCE_SECONDS,
        host: int | None = 0,
        address: str = "127.0.0.1",
        end: Callable[[int], None] = end_process,
    ) -> None:
        if not silence_seconds > 0:
            raise ValueError(f"silence_seconds is {silence_seconds}, must be more than 0")
        self._rank, self._host, self._end = rank, host, end
        self._silence_seconds = silence_seconds
        self._interval_seconds = min(1.0, silence_seconds / 4)
        self._beat = 0
        self._failure: Failure | None = None
        self._is_done = False
        self._is_explaining = False
        self._terminated_seconds: float | None = None  # when SIGTERM came
        self._signals = contextlib.ExitStack()
        self._told: Verdict | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if world_size == 1:
            return
        self._judge = Judge(
            rank=rank,
            world_size=world_size,
            silence_seconds=silence_seconds,
            longest_round_seconds=2 * self._interval_seconds,
        )
        self._lifelines = Lifelines(
            self._wake.set, silence_seconds=silence_seconds, world_size=world_size
        )
        try:
            self._board = Board(
                store,
                rank=rank,
                world_size=world_size,
                patience_seconds=silence_seconds,
                has_pulse=self._has_pulse,
            )
        except BoardGone as gone:
            message = f"rank {rank} cannot open its watch: {gone}; is the store's host alive?"
            self._lifelines.close()
            raise RankFailure(message) from gone
        self._is_joined = threading.Event()
        if rank == 0:
            self._lifelines.listen(address)
            self._is_joined.set()
        self._thread = threading.Thread(target=self._run, name="bayplan-watch", daemon=True)
        self._thread.start()
        # One that dies before its line is open would be missed only by its silence.
        self._is_joined.wait(2 * self._interval_seconds)

    def __enter__(self) -> "Watch":
        if self._thread is not None:
            self._signals.enter_context(heard_sigterm(self._hear_sigterm))
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        with self._signals:
            if fault is None or (isinstance(fault, SystemExit) and not fault.code):
                self.close()
                return
            if is_symptom(fault):
                cause = self.explain(fault)
                if cause is not None:
                    raise cause from None
            self._failure = Failure(text=one_line(fault), exit_code=exit_code_of(fault))
            self._finish()
            if self._told is not None and self._told.rank != self._rank:
                # Another was first, most often with the same mistake; one traceback is enough.
                code = self._told.exit_code
                if isinstance(fault, BayplanError):
                    raise told(fault, exit_code=code) from fault
                raise ToldFailure(self._told.text, exit_code=code) from fault

    def telling(self) -> "_Telling":
        """Tell the others of an exception, as `with watch:` does, but stay open without one.

        A mistake of the user's becomes a line that all ranks share and an exit code; anything else
        stays a traceback, of one rank.
        """
        return _Telling(self)

    def close_at_exit(self) -> None:
        """What `with watch:` would have done, for a process that is about to end."""
        fault = getattr(sys, "last_value", None)  # what Python has just shown as uncaught
        with contextlib.suppress(ToldFailure):  # too late to raise anything
            self.__exit__(None if fault is None else type(fault), fault, None)

    def explain(self, fault: BaseException) -> ToldFailure | None:
        """Find the cause behind a symptom, waiting for it to show for a while.

        A closed connection is half the proof that its other end is dead, so half the silence is
        enough. Without a cause, the symptom gets a note that says so.
        """
        seconds = 2 * (self._silence_seconds + self._interval_seconds)
        self._is_explaining = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(seconds)
        if self._told is None:
            fault.add_note(
                f"No other rank failed or fell silent within {seconds:.1f} s, so look at the"
                " network between them."
            )
            return None
        if self._rank == self._host:
            self._linger()
        return ToldFailure(self._told.text, exit_code=self._told.exit_code)

    def close(self) -> None:
        """Mark this rank as done; the host of the store waits a moment for the others."""
        self._is_done = True
        self._finish()

    def _finish(self) -> None:
        """Let the thread write its last entry, and stay until those who must have read it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._wake.set()
        thread.join(self._silence_seconds)
        # One that failed stays as well: a launcher may end the others as soon as it is gone.
        if self._rank == self._host or self._failure is not None:
            self._linger()
        if not thread.is_alive():
            self._board.close()
            self._lifelines.close()

    def _hear_sigterm(self) -> None:
        self._terminated_seconds = time.monotonic()
        self._wake.set()

    # The rest runs in the thread.

    def _run(self) -> None:
        last_seconds = time.monotonic()
        is_gone = False
        while True:
            now_seconds = time.monotonic()
            is_last = self._is_done or self._failure is not None
            try:
                verdict = self._round(now_seconds - last_seconds)
            except BoardGone as gone:
                is_gone = True
                verdict = self._judge.host_gone(self._host, str(gone))
                is_last = is_last or verdict is None
            if is_last:
                if self._failure is not None and verdict is not None and not is_gone:
                    self._speak(verdict)
                    self._told = verdict
                self._leave()
                return
            if verdict is not None:
                self._stop(verdict)
                return
            if self._is_due():
                self._leave()
                self._end(TERMINATED)
                return
            last_seconds = now_seconds
            is_joined = self._is_joined.is_set()
            self._wake.wait(self._interval_seconds if is_joined else self._interval_seconds / 20)
            self._wake.clear()

    def _has_pulse(self) -> bool | None:
        """Whether the host of the store is known to live, or known not to."""
        lines = self._lifelines
        return True if self._host in lines.felt else False if self._host in lines.silent else None

    def _round(self, elapsed_seconds: float) -> Verdict | None:
        if self._is_explaining or self._terminated_seconds is not None:
            self._judge.patience = 1.5
        self._beat += 1
        own = Entry(
            beat=self._beat,
            doing=self._text(),
            batch=self.batch,
            is_terminated=self._terminated_seconds is not None,
            is_done=self._is_done,
            failure=self._failure,
            lifeline=self._lifelines.address,
            felt=tuple(self._lifelines.felt),
        )
        gone = frozenset(self._lifelines.ended)
        entries, agreed = self._board.exchange(own)
        if not self._is_joined.is_set() and 0 in entries:
            if entries[0].lifeline:
                self._lifelines.join(entries[0].lifeline, self._rank)
            self._is_joined.set()
        felt = self._lifelines.felt
        if 0 in felt and 0 in entries:
            felt |= frozenset(entries[0].felt)
        self._judge.hear(
            {**entries, self._rank: own},
            elapsed_seconds=elapsed_seconds,
            gone=gone,
            missed=self._lifelines.silent,
            felt=felt,
        )
        verdict = agreed or self._judge.verdict()
        if verdict is None:
            return None
        verdict = self._board.agree(verdict)
        self._lifelines.ring()
        return verdict

    def _is_due(self) -> bool:
        """Whether SIGTERM is to be obeyed: nobody else is to blame, or nobody was found."""
        if self._terminated_seconds is None:
            return False
        seconds = time.monotonic() - self._terminated_seconds
        return self._judge.is_all_ending or seconds > self._silence_seconds

    def _stop(self, verdict: Verdict) -> None:
        """See that the verdict is told, and end the process or hand the verdict over."""
        if self._rank == verdict.speaker:
            self._speak(verdict)
            self._leave()
        else:
            # Leaves first, so that the one that failed need not wait; speaks if nobody else did.
            self._leave()
            time.sleep(1.5 * self._interval_seconds)
            self._speak(verdict)
        self._told = verdict
        if self._is_explaining:
            return
        if self._rank == self._host:
            self._linger()
        # The one that failed goes first, so that a launcher takes it for the cause.
        begin_seconds, blamed = time.monotonic(), self._judge.entries[verdict.rank]
        while (seconds := time.monotonic() - begin_seconds) < LEAD_SECONDS:
            if self._failure is not None:  # the main thread is there as well, and can go on alone
                return
            is_ending = blamed.failure is not None and blamed.is_seen_running()
            if seconds > 2 * self._interval_seconds and not is_ending:
                break
            self._wake.wait(self._interval_seconds / 4)
            self._wake.clear()
        self._end(verdict.exit_code)

    def _speak(self, verdict: Verdict) -> None:
        """Print the verdict, unless another rank has."""
        try:
            is_ours = self._board.claim_voice()
        except BoardGone:
            is_ours = self._rank == verdict.speaker
        if is_ours:
            # A mistake of the user's is told in full; of all else the log knows more.
            is_whole = verdict.exit_code not in (ExitCode.BUG, TERMINATED)
            more = "" if is_whole else f". Read the log of rank {verdict.rank}."
            write_line(f"{REPORT_MARK}{verdict.text}{more}")

    def _leave(self) -> None:
        with contextlib.suppress(BoardGone):
            self._board.count_left(own=1)

    def _linger(self) -> None:
        """Stay until all that live have left, as they do when they have read all they need."""
        end_seconds = time.monotonic() + LINGER_SECONDS
        with contextlib.suppress(BoardGone):
            num_to_leave = self._judge.num_to_leave
            while self._board.count_left() < num_to_leave and time.monotonic() < end_seconds:
                time.sleep(self._interval_seconds / 10)

    def _text(self) -> str:
        try:
            return str(self.doing)
        except Exception as error:  # a thread that ends here would look like a dead rank
            return f"an action without a text: {one_line(error)}"


class _Telling:
    """No generator: Ctrl-C may come between its lines, and the others would never hear of it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if fault is None:
            return
        self._watch.__exit__(kind, fault, trace)
        if isinstance(fault, BayplanError) and not isinstance(fault, ToldFailure):
            if self._watch._told is None:  # alone, or cut off from the others
                write_line(f"bayplan: rank {self._watch._rank}: {fault}")
            raise told(fault, exit_code=fault.exit_code) from fault


def open_watch() -> Watch:
    """Open the watch of this rank; it closes at exit by itself.

    Raises:
        UsageError: BAYPLAN_TIMEOUT is no time; all ranks are told.
    """
    text = os.environ.get("BAYPLAN_TIMEOUT", str(_SILENCE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    is_time = 0 < seconds < math.inf
    watch = Watch(
        torch_compat.default_store(),
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        silence_seconds=seconds if is_time else _SILENCE_SECONDS,
        host=host_of_store(os.environ),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
    )
    watch.__enter__()
    atexit.register(watch.close_at_exit)
    if not is_time:
        with watch.telling():
            raise UsageError(f"BAYPLAN_TIMEOUT is {text!r}; give seconds of silence, like 3")
    return watch
