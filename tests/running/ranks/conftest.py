"""What tests that start processes share: a launcher with a hard limit, and a look for leftovers."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bayplan.running.ranks import launching

# Every script says its number first, so that the test can look for it afterwards.
PROLOGUE = """
import os, pathlib, signal, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
(folder / f"{rank}.pid").write_text(str(os.getpid()))
"""


@dataclass
class Job:
    """Runs a script as ranks and keeps what was shown."""

    folder: Path
    lines: list[str] = field(default_factory=list)

    def run(self, script, *arguments, num_ranks=2, timeout_seconds=100.0, on_line=None, **options):
        path = self.write(script)

        def show(line):
            self.lines.append(line)
            if on_line is not None:
                on_line(line)

        return launching.launch(
            [str(path), str(self.folder), *arguments],
            num_ranks=num_ranks,
            **{"log_folder": self.folder / "logs", **options},
            timeout_seconds=timeout_seconds,
            on_line=show,
        )

    def write(self, script):
        path = self.folder / "script.py"
        path.write_text(PROLOGUE + script)
        return path

    def log(self, rank):
        return (self.folder / "logs" / f"rank{rank}.log").read_text()

    def is_gone(self, name):
        """Whether a process is gone; one that was killed may take a moment to be reaped."""
        pid = int((self.folder / f"{name}.pid").read_text())
        for _ in range(100):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)
