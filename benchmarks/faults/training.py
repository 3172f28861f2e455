"""What a rank of the benchmark runs, and what happens to it in the middle of that.

A small training as a user writes it, with three lines for checkpoints. It writes down every loss,
every save that has ended, and when it was struck.
"""

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from ranks.joining import enter_host
from torch import distributed, nn

from bayplan.data import files
from bayplan.data.plan import RankPlan
from bayplan.running.ranks import rank as run_rank
from bayplan.running.ranks import watching
from bayplan.running.ranks.failures import REPORT_MARK
from bayplan.running.ranks.journal import Journal
from bayplan.running.ranks.pipelined import bind

__all__ = ["EVERY", "TARGET", "batch_of", "build", "live"]

EVERY = 3  # steps between checkpoints
TARGET = "faults.training:build"
_WIDTH, _CLASSES, _SAMPLES = 16, 4, 16
# Matches nothing, in time that doubles with each letter, and holds the interpreter meanwhile.
_SLOW, _LETTERS = re.compile("(a|a)*b"), 26

Case = dict[str, Any]


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randn(_SAMPLES, _WIDTH, generator=generator),
        torch.randint(_CLASSES, (_SAMPLES,), generator=generator),
    )


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], nn.Module]:
    """A model, a batch and a loss."""
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(_WIDTH, _WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(_WIDTH, _CLASSES)), batch_of(0), _loss()


def _loss() -> nn.Module:
    return nn.CrossEntropyLoss()


class _Notes:
    """Lines of JSON, one file for all ranks; each is written in one piece."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._rank = rank

    def write(self, what: str, **more: object) -> None:
        note = {"what": what, "rank": self._rank, "at": time.monotonic(), **more}
        os.write(self._file, f"{json.dumps(note)}\n".encode())


class _Striker:
    """Strikes this rank once, at an action of a step."""

    def __init__(self, fault: Case | None, notes: _Notes, rank: int) -> None:
        self._fault = fault if fault is not None and fault.get("rank") == rank else None
        self._notes = notes
        self.number = 0  # of the step that runs
        began, striker = Journal.began, self

        def begin(journal: Journal, position: int) -> None:
            began(journal, position)
            striker.at(position, str(journal))

        if self._fault is not None:
            Journal.began = begin  # pyrefly: ignore[bad-assignment]

    def at(self, position: int, action: str) -> None:
        fault = self._fault
        if fault is None or self.number != fault["step"] or position < fault["position"]:
            return
        if fault["kind"] not in _ELSEWHERE:
            self.strike(action)

    def strike(self, action: str) -> None:
        assert self._fault is not None
        kind, self._fault = self._fault["kind"], None
        self._notes.write("struck", action=action)
        _STRIKES[kind]()

    def is_due(self, kind: str) -> bool:
        fault = self._fault
        return fault is not None and fault["kind"] == kind and self.number >= fault["step"]


def _own_signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _fail() -> None:
    raise ValueError("a number that cannot be")


def _pause() -> None:
    """For less than counts as silence."""
    subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


_STRIKES: dict[str, Callable[[], Any]] = {
    "kill": _own_signal(signal.SIGKILL),
    "crash": _own_signal(signal.SIGSEGV),
    "stop": _own_signal(signal.SIGSTOP),
    "leave": lambda: os._exit(0),
    "error": _fail,
    "loader": _fail,
    "save": lambda: threading.Timer(0.004, _own_signal(signal.SIGKILL)).start(),
    "pause": _pause,
    "hold": lambda: _SLOW.match("a" * _LETTERS),
}


_ELSEWHERE = ("loader", "save")  # struck between actions


def _train(case: Case, notes: _Notes, rank: int) -> None:
    """As in a script of a user's."""
    striker = _Striker(case.get("fault"), notes, rank)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=100))
    model, _, loss_fn = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = files.read(Path(case["plan"]), RankPlan)
    step = bind(model, optimizer, plan, loss_fn=loss_fn, swap=case.get("swap"))
    root = Path(case["checkpoints"])
    step.load(root)
    notes.write("began", step=step.number)
    while step.number < case["steps"]:
        striker.number = step.number + 1
        if striker.is_due("loader"):
            striker.strike(str(step.journal))
        loss = step(*batch_of(step.number))
        if not rank:
            notes.write("step", step=step.number, loss=repr(loss.item()))
            print(f"step {step.number}", file=sys.stderr, flush=True)
        if step.number % EVERY == 0:
            saved, number = step.save(root), step.number
            if not rank:
                saved.add_done_callback(
                    lambda done, number=number: (
                        done.exception() or notes.write("saved", step=number)
                    )
                )
            if striker.is_due("save"):
                striker.strike(str(step.journal))
        time.sleep(case.get("rest_seconds", 0.0))
    left = [repr(loss.item()) for loss in step.flush()]
    if not rank:
        notes.write("left", losses=left)
    step.close()
    distributed.destroy_process_group()


def _run(case: Case, notes: _Notes, rank: int) -> None:
    """As `bayplan run` does."""
    sys.argv = ["rank", case["plan"], "--records", case["records"], "--steps", str(case["steps"])]
    sys.argv += ["--target", TARGET, "--checkpoint", case["checkpoints"], "--resume"]
    run_rank.main()


def live(case: Case) -> None:
    """Be the rank of a process that was forked; does not come back."""
    atexit._clear()  # what the parent would do at its own end
    enter_host(case.get("hosts", []))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    rank, code = int(os.environ["RANK"]), 0
    notes, write = _Notes(Path(case["notes"]), rank), watching.write_line

    def told(line: str) -> None:
        write(line)
        if line.startswith(REPORT_MARK):
            notes.write("told", text=line)

    watching.write_line = told
    try:
        (_run if case.get("is_run") else _train)(case, notes, rank)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as fault:
        sys.last_value = fault  # as the interpreter does, which a watch looks at
        traceback.print_exc()
        code = 130 if isinstance(fault, KeyboardInterrupt) else 1
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)
