"""A plan carried out by ranks of this machine, and what they say of it as one record."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bayplan.data import files
from bayplan.data.errors import DoesNotFit, PlanBroken
from bayplan.data.plan import Plan
from bayplan.data.record import Prediction, RunRecord
from bayplan.data.units import format_bytes
from bayplan.devices.machine import available_memory_bytes
from bayplan.rank_swap import check_swap_room, planned_swap_bytes
from bayplan.running.ranks.figures import SharedFigures
from bayplan.running.ranks.launching import launch
from bayplan.running.ranks.reports import INTERRUPTED
from bayplan.running.ranks.telling import StepLine

__all__ = ["INTERRUPTED", "RankRun", "check_room", "run_on_ranks"]

_TORCH_BYTES = 200 << 20  # what a process takes that has imported torch and done nothing
# After Ctrl-C the ranks end the step they are in; a second Ctrl-C ends all at once.
_LONGEST_STEP_SECONDS = 120.0


@dataclass(frozen=True)
class RankRun:
    """What came of a run on many ranks.

    Attributes:
        measured: a device for each rank; the step times are the slowest rank's. None if a rank
            failed, or none had a step to tell of when Ctrl-C came.
        exit_code: of the first rank that failed, 130 after Ctrl-C, else 0.
    """

    measured: RunRecord | None
    exit_code: int


def check_room(plan: Plan, swap: Path | None = None, *, swap_bytes: int | None = None) -> None:
    """Refuse, before any is started, ranks that this machine has no room for.

    Args:
        plan: for ranks on this machine.
        swap: a directory for what the plan swaps.
        swap_bytes: the most that each rank may take there.

    Raises:
        DoesNotFit: more memory is needed than there is: the machine would stop for everybody.
        UsageError: what is swapped has no place.
    """
    check_swap_room(planned_swap_bytes(plan), swap, max_bytes=swap_bytes)
    if torch.cuda.is_available():
        return
    num_ranks = len(plan.actions)
    needed = num_ranks * _TORCH_BYTES + sum(plan.predicted_peak_bytes)
    there = available_memory_bytes(torch.device("cpu"))
    if needed > there:
        raise DoesNotFit(
            f"{num_ranks} ranks on this machine need {format_bytes(needed)}, of which"
            f" {format_bytes(num_ranks * _TORCH_BYTES)} for torch alone, and"
            f" {format_bytes(there)} are free; name fewer devices, or a smaller --batch"
        )


def run_on_ranks(
    plan: Plan,
    *,
    num_steps: int,
    log_folder: Path,
    target: str | None = None,
    seed: int = 0,
    swap: Path | None = None,
    swap_bytes: int | None = None,
    epoch_samples: int | None = None,
    on_line: Callable[[str], None],
    on_step: Callable[[StepLine], None] = lambda step: None,
) -> RankRun:
    """Start a process for each rank of a plan, train, and gather what they measured.

    Args:
        plan: for ranks on this machine, which has room for them.
        num_steps: after one to warm up.
        log_folder: for the log of each rank; it is kept.
        target: needed where the plan names a function of the user's own.
        seed: of every rank.
        swap: a directory for what the plan swaps.
        swap_bytes: the most that each rank may take there; None for what the plan needs.
        epoch_samples: of an epoch, whose time is extrapolated.
        on_line: hears what rank 0 tells, and why a run ended early.
        on_step: hears of each step instead.
    """

    def hear(line: str) -> None:
        step = StepLine.parse(line)
        if step is None:
            on_line(line)
        else:
            on_step(step)

    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        path, records = Path(folder) / "plan.json", Path(folder)
        files.write(path, plan)
        arguments = ["-m", "bayplan.rank", str(path), "--records", str(records)]
        arguments += ["--steps", str(num_steps), "--seed", str(seed)]
        arguments += [] if target is None else ["--target", target]
        arguments += [] if swap is None else ["--swap-dir", str(swap.resolve())]
        arguments += [] if swap_bytes is None else ["--swap-bytes", str(swap_bytes)]
        num_ranks = len(plan.actions)
        SharedFigures.create(records / "figures", num_ranks=num_ranks)
        exit_code = launch(
            arguments,
            num_ranks=num_ranks,
            log_folder=log_folder,
            on_line=hear,
            signal_seconds=_LONGEST_STEP_SECONDS,
        )
        paths = [records / f"rank{rank}.record.json" for rank in range(num_ranks)]
        is_told = all(path.exists() for path in paths)
        if not is_told or exit_code not in (0, INTERRUPTED):
            return RankRun(None, exit_code)
        found = [files.read(path, RunRecord) for path in paths]
    predicted = Prediction(
        step_seconds=plan.predicted_seconds,
        peak_bytes=plan.predicted_peak_bytes,
        busy=plan.predicted_busy,
    )
    whole = msgspec.structs.replace(
        _joined(found), epoch_samples=epoch_samples, predicted=predicted
    )
    return RankRun(whole, exit_code)


def _joined(found: list[RunRecord]) -> RunRecord:
    """One record of all ranks."""
    counts = {len(record.step_seconds) for record in found}
    if len(counts) != 1:
        raise PlanBroken(f"ranks ran different numbers of steps: {sorted(counts)}")
    steps = zip(*(record.step_seconds for record in found), strict=True)
    return msgspec.structs.replace(
        found[0],
        step_seconds=tuple(max(seconds) for seconds in steps),
        devices=tuple(record.devices[0] for record in found),
    )
