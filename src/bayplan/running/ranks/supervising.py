"""`Supervisor`: ranks that run as one: what ends one ends all, and is told once."""

import signal
import time
from collections.abc import Callable, Sequence

from bayplan.data.errors import ExitCode
from bayplan.running.ranks.local_rank import LocalRank
from bayplan.running.ranks.reports import REPORT_MARK, find_report, last_lines

__all__ = ["Supervisor"]

GRACE_SECONDS = 10.0  # for the other ranks to say why they stop
KILL_SECONDS = 3.0  # between SIGTERM and SIGKILL
ROUND_SECONDS = 0.05


class Supervisor:
    """Waits for all ranks, and ends those that outlive their reason to be.

    Args:
        ranks: all of them, running; whoever started them ends what is left of them.
        signals: those sent to this process, still growing.
        timeout_seconds: how long all of it may take.
        on_line: gets what is to be shown.
        signal_seconds: what ranks have to end in after a signal was passed on.
    """

    def __init__(
        self,
        ranks: Sequence[LocalRank],
        *,
        signals: Sequence[int],
        timeout_seconds: float | None,
        on_line: Callable[[str], None],
        signal_seconds: float | None = None,
    ) -> None:
        self._ranks = ranks
        self._signals = signals
        self._timeout_seconds = timeout_seconds
        self._on_line = on_line
        self._signal_seconds = GRACE_SECONDS if signal_seconds is None else signal_seconds
        self._start_seconds = time.monotonic()
        self._end_seconds: float | None = None  # when SIGTERM is due, and after it SIGKILL
        self._is_terminated = False
        self._is_late_told = False
        self._failed: tuple[int, int] | None = None  # rank and code of the first that failed
        self._num_passed_on = 0

    def wait(self, *, is_fatal: Callable[[str], bool]) -> bool:
        """Wait until all have ended, or a line of rank 0 is fatal to the whole try: then False."""
        with self._ranks[0].log.open("rb") as log:
            rest = b""
            while not self._is_over():
                rest = self._show(rest + log.read())
                time.sleep(ROUND_SECONDS)
                self._act()
                if self._has_fatal_line(is_fatal):
                    return False
            self._show(rest + log.read() + b"\n")
        return not self._has_fatal_line(is_fatal)

    def conclude(self) -> int:
        """Make sure that a failure was told, and return the exit code."""
        if self._failed is None and not self._signals:
            return ExitCode.DONE
        reports = [report for report in (find_report(rank.log) for rank in self._ranks) if report]
        if reports and not self._signals and find_report(self._ranks[0].log) is None:
            self._on_line(reports[0])
        if self._signals:
            return 128 + self._signals[0]
        assert self._failed is not None, "neither a failure nor a signal"
        index, code = self._failed
        if not reports and not self._is_late_told:
            self._on_line(self._obituary(index, code))
        return code if code > 0 else ExitCode.BUG

    def _has_fatal_line(self, is_fatal: Callable[[str], bool]) -> bool:
        return self._failed is not None and any(map(is_fatal, self._ending_of(0, num_lines=100)))

    def _is_over(self) -> bool:
        codes = [rank.exit_code() for rank in self._ranks]
        if self._failed is None:
            # Of several that ended in one round, the one that was killed did not follow another.
            failed = [(code, index) for index, code in enumerate(codes) if code]
            self._failed = next(((index, code) for code, index in sorted(failed)), None)
        return all(code is not None for code in codes)

    def _act(self) -> None:
        """Pass on signals, start the grace, and end it."""
        now_seconds = time.monotonic()
        for number in self._signals[self._num_passed_on :]:
            self._num_passed_on += 1
            self._send(number if self._num_passed_on == 1 else signal.SIGKILL)
            self._grant(now_seconds + self._signal_seconds)
        if self._failed is not None:
            self._grant(now_seconds + GRACE_SECONDS)
        if self._is_late(now_seconds):
            self._tell_late()
            self._end_seconds = now_seconds
        if self._end_seconds is None or now_seconds < self._end_seconds:
            return
        self._send(signal.SIGKILL if self._is_terminated else signal.SIGTERM)
        self._is_terminated = True
        self._end_seconds = now_seconds + KILL_SECONDS

    def _is_late(self, now_seconds: float) -> bool:
        limit = self._timeout_seconds
        is_over = limit is not None and now_seconds - self._start_seconds > limit
        return is_over and not self._is_late_told

    def _tell_late(self) -> None:
        running = [index for index, rank in enumerate(self._ranks) if rank.exit_code() is None]
        self._on_line(
            f"bayplan: ranks {', '.join(map(str, running))} still ran after "
            f"{self._timeout_seconds:.1f} s, the limit of the whole run; all are ended"
        )
        self._failed = self._failed or (min(running, default=0), ExitCode.BUG)
        self._is_late_told = True

    def _grant(self, end_seconds: float) -> None:
        if self._end_seconds is None:
            self._end_seconds = end_seconds

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.exit_code() is None:
                rank.send(number)

    def _show(self, data: bytes) -> bytes:
        """Hand on the whole lines of rank 0's stderr, and return what is left."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            # After a signal, each rank tells of it; who sent it knows.
            if line and not (self._signals and line.startswith(REPORT_MARK.encode())):
                self._on_line(line.decode(errors="replace"))
        return rest

    def _ending_of(self, index: int, *, num_lines: int) -> list[str]:
        return last_lines(self._ranks[index].log, num_lines=num_lines)

    def _obituary(self, index: int, code: int) -> str:
        way = (
            f"with exit code {code}"
            if code >= 0
            else f"by signal {-code} ({signal.strsignal(-code)})"
        )
        ending = "\n  ".join(["ends with:", *self._ending_of(index, num_lines=5)])
        return f"bayplan: rank {index} ended {way}; its log {self._ranks[index].log} {ending}"
