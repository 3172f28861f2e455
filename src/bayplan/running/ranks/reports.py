"""What a rank prints when all stop, and how a launcher finds it in the logs; free of torch."""

import contextlib
import os
from pathlib import Path

__all__ = ["INTERRUPTED", "REPORT_MARK", "find_report", "last_lines", "write_line"]

REPORT_MARK = "bayplan: all ranks stop: "
INTERRUPTED = 130  # what a shell gives a command ended by Ctrl-C
TAIL_BYTES = 64 * 1024  # a report is among the last things printed, and a log may be huge


def write_line(line: str) -> None:
    """Write to stderr at once, in one piece.

    Not through `sys.stderr`: the main thread may hold its lock for ever.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


def find_report(log: Path) -> str | None:
    """The line by which a rank told why all stop, None if this one did not."""
    return next((line for line in _tail(log) if line.startswith(REPORT_MARK)), None)


def last_lines(log: Path, *, num_lines: int) -> list[str]:
    """The last lines of a log that are not blank."""
    return [line for line in _tail(log) if line.strip()][-num_lines:]


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
