"""One run of forked ranks with one fault, and what was seen of it."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from faults.forked import ForkedRank, left_of_sessions
from faults.training import live
from ranks.hosts import Host
from torch import distributed

from bayplan.running.ranks.failures import REPORT_MARK
from bayplan.running.ranks.launching import Supervisor

__all__ = ["Case", "Outcome", "Strike", "command", "run", "step_of"]

Case = dict[str, Any]
_TIMEOUT_SECONDS = 120.0  # of a whole run: what needs it hangs
_SIGNAL_SECONDS = 30.0
_KEPT_LETTERS = 4000  # of a log


@dataclass
class Outcome:
    """What a run has left.

    Attributes:
        code: as of the launcher.
        heard: what the launcher showed, and when.
        notes: what the ranks wrote down, by kind, in order.
        reports: lines by which a rank told why all stop.
        logs: the end of each rank's.
        left: processes that still lived when the launcher was done.
        struck_at, ended_at: on the clock of the machine; when the fault happened, and when the last
            rank that could end was gone.
    """

    code: int
    notes: dict[str, list[Case]]
    reports: list[str]
    logs: list[str]
    heard: list[tuple[float, str]]
    left: list[int]
    began_at: float
    ended_at: float
    struck_at: float | None = None
    is_hung: bool = False
    by_step: dict[int, str] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """What the launcher showed."""
        return [line for _, line in self.heard]

    def of(self, what: str) -> list[Case]:
        return self.notes.get(what, [])


@dataclass
class Strike:
    """What is done to the ranks from outside, when rank 0 has told that it has done `step`."""

    step: int
    do: Callable[[], None]


def run(
    case: Case,
    *,
    folder: Path,
    num_ranks: int,
    strike: Strike | None = None,
    signals: list[int] | None = None,
    hosts: Sequence[Host] = (),
    has_own_store: bool = False,
) -> Outcome:
    """Fork the ranks, do to them what is to be done, and wait until all are gone.

    Args:
        signals: what `strike` sends to the launcher.
        has_own_store: the store of the process group is in a process beside the ranks, whose number
            is in the file `store`.
    """
    for old in (*folder.glob("*.log"), folder / "notes"):
        old.unlink(missing_ok=True)
    case = {**case, "notes": str(folder / "notes"), "hosts": [asdict(host) for host in hosts]}
    struck: list[float] = []
    heard: list[tuple[float, str]] = []

    def hear(line: str) -> None:
        heard.append((time.monotonic(), line))
        if strike is not None and not struck and step_of(line) >= strike.step:
            struck.append(time.monotonic())
            strike.do()

    began_at = time.monotonic()
    with ExitStack() as stack:
        environment = _environment(num_ranks, stack.enter_context(_held_port()))
        if has_own_store:
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            stack.callback(_store(folder, int(environment["MASTER_PORT"])).end)
        ranks: list[ForkedRank] = []
        for rank in range(num_ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = folder / f"rank{rank}.log"
            ranks.append(ForkedRank(lambda: live(case), log=log, environment=own))
            stack.callback(ranks[-1].end)
        supervisor = Supervisor(
            ranks=ranks,
            signals=[] if signals is None else signals,
            timeout_seconds=_TIMEOUT_SECONDS,
            on_line=hear,
            signal_seconds=_SIGNAL_SECONDS,
        )
        code = supervisor.wait()
        ended_at = time.monotonic()
        left = left_of_sessions({rank.pid for rank in ranks})
    notes = _notes(folder / "notes")
    struck += [note["at"] for note in notes.get("struck", [])]
    logs = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(num_ranks)]
    return Outcome(
        code=code,
        notes=notes,
        reports=[x for log in logs for x in log.splitlines() if x.startswith(REPORT_MARK)],
        logs=[log[-_KEPT_LETTERS:] for log in logs],
        heard=heard,
        left=left,
        began_at=began_at,
        ended_at=ended_at,
        struck_at=min(struck, default=None),
        is_hung=ended_at - began_at > _TIMEOUT_SECONDS,
        by_step={note["step"]: note["loss"] for note in notes.get("step", [])},
    )


def step_of(line: str) -> int:
    """The step that rank 0 tells of; 0 in any other line."""
    word, _, rest = line.partition(" ")
    number = rest.partition(" ")[0]
    return int(number) if word == "step" and number.isdigit() else 0


def _notes(path: Path) -> dict[str, list[Case]]:
    """By kind, in order."""
    notes: dict[str, list[Case]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        note = json.loads(line)
        notes.setdefault(note["what"], []).append(note)
    return notes


@contextmanager
def _held_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _environment(num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun would give all ranks."""
    return {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _store(folder: Path, port: int) -> ForkedRank:
    """A process that holds the store of the process group, as torchrun's agent does."""

    def hold() -> None:
        held = distributed.TCPStore(
            "127.0.0.1", port, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
        )
        (folder / "store").write_text(str(os.getpid()))
        while held is not None:
            signal.pause()

    (folder / "store").unlink(missing_ok=True)
    rank = ForkedRank(hold, log=folder / "store.log", environment={})
    while not (folder / "store").exists():
        time.sleep(0.01)
    return rank


def command(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True)
