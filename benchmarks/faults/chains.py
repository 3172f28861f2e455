"""One training that is struck again and again, resumed each time, compared with one that is not.

    began 0 .. killed at 5 -> began 3 .. stopped at 8 -> began 6 .. -> began 9 .. its end -> anew

Every loss of every run must have the bits of the undisturbed run, so each resume is checked by the
steps after it and by the end of its chain.
"""

import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from faults.injecting import Case, Outcome, Strike, command, run, step_of
from faults.training import EVERY, TARGET, build
from harness import say
from ranks.hosts import Host, two_hosts

from bayplan.data import files
from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan, Request
from bayplan.data.record import RunRecord
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.running.checkpoints.folders import saved_steps
from bayplan.running.ranks.local_run import SharedFigures
from bayplan.step import TrainingStep

__all__ = ["Chain", "Setup"]

Row = dict[str, Any]

_STEPS = 24  # of a chain's training, after which it begins anew
_REST_SECONDS = 0.2  # between steps, so that a heartbeat falls into some
_RUN_STEPS, _RUN_STRUCK = 80, 20
ENDED_SECONDS = 20.0  # on a machine that is busy; torchrun and our launcher kill what stays longer
GOES_ON = ("hold", "pause", "slow", "full disk")  # the others stop all ranks
_INSIDE = ("kill", "crash", "leave", "stop", "error", "loader", "save", "hold", "pause")
_SIDES = 2
_ACTION = re.compile(r"\[step \d+, stage \d+, \S+\]")


@dataclass(frozen=True)
class Setup:
    """Ranks and a plan for them."""

    name: str
    num_ranks: int
    placement: str
    staleness: int = 0
    num_hosts: int = 1

    def plan(self) -> RankPlan:
        model, batch, loss_fn = build()
        step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn)
        wishes = RankPlanOptions(
            placement=Placement.parse(self.placement),
            shares_by=SharesBy.OPS,
            staleness=self.staleness,
        )
        plan = place(PreparedStages(step=step), wishes)
        torch.compiler.reset()
        return msgspec.structs.replace(plan, request=Request(target=TARGET, optimizer="sgd"))


@dataclass
class Chain:
    """Runs of one setup, in a folder of its own."""

    setup: Setup
    folder: Path
    seed: int
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self._plan = self.setup.plan()
        files.write(self.folder / "plan.json", self._plan)
        self._random = random.Random(f"{self.seed} {self.setup.name}")
        self._hosts: Sequence[Host] = ()
        self._saved = self._done = 0  # steps, of this training
        self._resumes: Row | None = None  # the fault that the next run resumes after

    def strike_all(self, kinds: Sequence[str]) -> None:
        """Train to the end once, then again with these faults, in any order."""
        with ExitStack() as stack:
            if self.setup.num_hosts > 1:
                self._hosts = stack.enter_context(two_hosts())
            root = self.folder / "undisturbed"
            whole = self._run({}, root=root, steps=_STEPS)
            self._wanted, self._left = whole.by_step, whole.of("left")[0]["losses"]
            if whole.code or len(self._wanted) != _STEPS:
                raise RuntimeError(f"undisturbed, {self.setup.name} fails: {whole.lines[-5:]}")
            own = self._random.sample(kinds, len(kinds))
            for kind in own:
                self._strike(kind)
            self._end()
        for row in self.rows:  # one that was never resumed has shown nothing
            row.setdefault("wrong_losses", 1)
            row.setdefault("lost_steps", _STEPS)

    # One fault.

    def _strike(self, kind: str) -> None:
        if self._saved + 3 * EVERY > _STEPS:
            self._end()
        step = self._saved + self._random.randint(2, EVERY + 2)
        if kind == "save":
            step = self._saved + EVERY
        rank = self._random.randrange(self.setup.num_ranks)
        num_actions = len(self._plan.actions[rank])
        fault = {"kind": kind, "rank": rank, "step": step}
        fault["position"] = self._random.randrange(num_actions)
        row: Row = {"setup": self.setup.name, "kind": kind, **fault}
        steps = self._saved + 2 * EVERY if kind in GOES_ON else _STEPS
        options: Row = {}
        case: Case = {}
        with ExitStack() as stack:
            if kind in _INSIDE:
                case["fault"] = fault
            else:
                outside = {
                    "cut": self._cut,
                    "link down": self._down,
                    "slow": self._slow,
                    "store gone": self._store_gone,
                    "full disk": self._full_disk,
                }[kind]
                options["strike"] = Strike(step - 1, stack.enter_context(outside()))
                options["has_own_store"] = kind == "store gone"
            outcome = self._run(case, root=self.folder / "struck", steps=steps, **options)
        self._judge(row, outcome, rank if kind in _INSIDE else None)
        self.rows.append(row)
        self._resumes = row
        _tell(row)

    def _judge(self, row: Row, outcome: Outcome, rank: int | None) -> None:
        """What became of the run that was struck."""
        kind = row["kind"]
        goes_on = kind in GOES_ON
        row["hangs"] = int(outcome.is_hung or outcome.struck_at is None)
        row["left"] = len(outcome.left)
        row["unnamed"] = row["unexpected"] = 0
        if goes_on:
            row["unexpected"] = int(outcome.code != 0 or bool(outcome.reports))
        else:
            told = [note["at"] for note in outcome.of("told")]
            if told and outcome.struck_at is not None:
                row["detect_seconds"] = max(told) - outcome.struck_at
                row["end_seconds"] = outcome.ended_at - outcome.struck_at
                row["hangs"] |= int(row["end_seconds"] > ENDED_SECONDS)
            named = outcome.reports
            if rank is not None:
                named = [line for line in named if f"rank {rank} (pid " in line]
            most = _SIDES if self._hosts and kind not in _INSIDE else 1
            row["unnamed"] = int(not 1 <= len(named) == len(outcome.reports) <= most)
            if kind != "store gone":  # no rank is to blame
                row["without_action"] = sum(not _ACTION.search(line) for line in outcome.reports)
            row["unexpected"] = int(outcome.code == 0)
            row["report"] = outcome.reports[0] if outcome.reports else ""
        row["logs"] = outcome.logs
        row["stray"] = self._stray()

    def _stray(self) -> int:
        """Files that nobody asked for; what a killed save has left is gone with the next one."""
        named = ("plan.json", "notes", "undisturbed", "struck", "store")
        return sum(
            path.name not in named and path.suffix != ".log" for path in self.folder.iterdir()
        )

    def _run(self, case: Case, *, root: Path, steps: int, **options: Any) -> Outcome:
        """Begin, or resume; see how much was lost, and compare the losses."""
        case = {
            "plan": str(self.folder / "plan.json"),
            "checkpoints": str(root),
            "steps": steps,
            "rest_seconds": _REST_SECONDS,
            **case,
        }
        options = {"hosts": self._hosts, **options}
        outcome = run(case, folder=self.folder, num_ranks=self.setup.num_ranks, **options)
        row, self._resumes = self._resumes, None
        if row is not None:
            began = outcome.of("began")
            begins = {note["step"] for note in began}
            row["lost_steps"] = _lost(begins, saved=self._saved, done=self._done, kind=row["kind"])
            first = next(iter(outcome.of("step")), None)
            if first is not None:
                row["resume_seconds"] = first["at"] - outcome.began_at
            row["wrong_losses"] = self._wrong(outcome)
        if root.name == "struck":
            self._saved = next(iter(saved_steps(root)), 0)
            until = outcome.struck_at or outcome.ended_at
            done = [note["step"] for note in outcome.of("step") if note["at"] <= until]
            self._done = max(done, default=self._done)
        return outcome

    def _wrong(self, outcome: Outcome) -> int:
        wrong = sum(loss != self._wanted[step] for step, loss in outcome.by_step.items())
        return wrong + sum(note["losses"] != self._left for note in self._last_left(outcome))

    @staticmethod
    def _last_left(outcome: Outcome) -> list[Case]:
        return outcome.of("left") if _STEPS in outcome.by_step else []

    def _end(self) -> None:
        """Resume to the end of the training, compare it, and begin anew."""
        row = self._resumes
        outcome = self._run({}, root=self.folder / "struck", steps=_STEPS)
        if row is not None:
            is_whole = outcome.code == 0 and _STEPS in outcome.by_step
            row["wrong_losses"] = row.get("wrong_losses", 0) + (not is_whole)
        root = self.folder / "struck"
        row_stray = sum(path.name.startswith(".step") for path in root.iterdir())
        if row is not None:
            row["stray"] += row_stray
        shutil.rmtree(root)
        self._saved = self._done = 0

    def signal_runs(self, kinds: Sequence[str]) -> None:
        """Ctrl-C or SIGTERM to a run of the command line, which saves, stops, and is resumed."""
        wanted, _ = self._command_line(self.folder / "whole")
        for kind in kinds:
            root = self.folder / f"signalled-{kind}"
            number = {"ctrl-c": signal.SIGINT, "sigterm": signal.SIGTERM}[kind]
            step = self._random.randint(2, _RUN_STRUCK)
            loss, outcome = self._command_line(root, number=number, step=step)
            assert outcome.struck_at is not None
            saved = next(iter(saved_steps(root)), 0)
            shown = max(map(step_of, outcome.lines))
            row: Row = {"setup": self.setup.name, "kind": kind, "step": step}
            row["hangs"] = int(
                outcome.is_hung or outcome.ended_at - outcome.struck_at > ENDED_SECONDS
            )
            row["end_seconds"] = outcome.ended_at - outcome.struck_at
            row["unexpected"] = int(outcome.code != 128 + number or bool(outcome.reports))
            row["report"] = "; ".join(outcome.reports)
            row["code"], row["logs"] = outcome.code, outcome.logs
            row["left"], row["unnamed"] = len(outcome.left), 0
            row["lost_steps"] = max(0, shown - saved)
            if saved < _RUN_STEPS:  # else the signal came at its end, and a resumed run has no step
                loss, resumed = self._command_line(root)
                first = next((at for at, line in resumed.heard if step_of(line)), None)
                if first is not None:
                    row["resume_seconds"] = first - resumed.began_at
            row["wrong_losses"] = int(loss != wanted)
            row["stray"] = sum(path.name.startswith(".step") for path in root.iterdir())
            self.rows.append(row)
            _tell(row)

    def _command_line(
        self, root: Path, *, number: int = 0, step: int = 0
    ) -> tuple[float | None, Outcome]:
        """The last loss, if the run ended in order."""
        records, signals = self.folder / "records", list[int]()
        shutil.rmtree(records, ignore_errors=True)
        records.mkdir()
        SharedFigures.create(records / "figures", num_ranks=self.setup.num_ranks)
        outcome = run(
            {
                "is_run": True,
                "plan": str(self.folder / "plan.json"),
                "checkpoints": str(root),
                "records": str(records),
                "steps": _RUN_STEPS,
            },
            folder=self.folder,
            num_ranks=self.setup.num_ranks,
            strike=Strike(step, lambda: signals.append(number)) if number else None,
            signals=signals,
        )
        record = records / "rank0.record.json"
        if outcome.code not in (0, 128 + number) or not record.exists():
            return None, outcome
        return files.read(record, RunRecord).losses[-1], outcome

    # Faults from outside.

    @contextmanager
    def _cut(self) -> Iterator[Callable[[], None]]:
        """Packets go to an address that no card has, so nobody is told that they are lost."""
        first, second = self._hosts

        def cut() -> None:
            for own, far in ((first, second), (second, first)):
                command(
                    f"ip -n {own.name} neighbour replace {far.address} lladdr 02:00:00:00:00:01"
                    f" dev {own.interface} nud permanent"
                )

        yield cut
        for own, far in ((first, second), (second, first)):
            command(f"ip -n {own.name} neighbour delete {far.address} dev {own.interface}")

    @contextmanager
    def _slow(self) -> Iterator[Callable[[], None]]:
        yield lambda: self._shape("rate 1mbit burst 16kb latency 400ms")
        self._shape("rate 500mbit burst 256kb latency 50ms")

    def _shape(self, how: str) -> None:
        for host in self._hosts:
            command(f"tc -n {host.name} qdisc replace dev {host.interface} root tbf {how}")

    @contextmanager
    def _down(self) -> Iterator[Callable[[], None]]:
        far = self._hosts[1]
        yield lambda: command(f"ip -n {far.name} link set {far.interface} down")
        command(f"ip -n {far.name} link set {far.interface} up")

    @contextmanager
    def _store_gone(self) -> Iterator[Callable[[], None]]:
        yield lambda: os.kill(int((self.folder / "store").read_text()), signal.SIGKILL)

    @contextmanager
    def _full_disk(self) -> Iterator[Callable[[], None]]:
        """The checkpoints' folder is a small disk, which somebody else fills."""
        root = self.folder / "struck"
        root.mkdir(exist_ok=True)
        kept = self.folder / "disk"
        shutil.move(root, kept)
        root.mkdir()
        command(f"mount -t tmpfs -o size=4m bayplan-faults {root}")
        try:
            shutil.copytree(kept, root, dirs_exist_ok=True)
            yield lambda: _fill(root / "filler")
            (root / "filler").unlink(missing_ok=True)
            shutil.rmtree(kept)
            shutil.copytree(root, kept)
        finally:
            command(f"umount {root}")
            shutil.rmtree(root)
            shutil.move(kept, root)


def _tell(row: Row) -> None:
    told = {
        key: value for key, value in row.items() if key != "logs" and value not in (0, None, "")
    }
    say(*(f"{key} {value}" for key, value in told.items()))


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def _lost(begins: set[int], *, saved: int, done: int, kind: str) -> int:
    """Steps lost beyond the promise, which is those since the last checkpoint."""
    if len(begins) != 1:
        return done
    (begin,) = begins
    beyond = max(0, saved - begin)
    if kind != "full disk":  # where none can be written, the promise is the last one that could
        beyond = max(beyond, done - begin - 2 * EVERY + 1)
    return beyond
