"""A plan carried out by ranks of this machine, and what they say of it as one record."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bayplan.data import files
from bayplan.data.errors import PlanBroken
from bayplan.data.plan import Plan
from bayplan.data.record import RunRecord
from bayplan.rank_swap import check_room, planned_swap_bytes
from bayplan.running.ranks.launching import launch

__all__ = ["RankRun", "run_on_ranks"]


@dataclass(frozen=True)
class RankRun:
    """What came of a run on many ranks.

    Attributes:
        measured: a device for each rank; the step times are the slowest rank's.
        losses: one for each step, the first to warm up.
        exit_code: of the first rank that failed, 0 if none did; then there is no record.
    """

    measured: RunRecord | None
    losses: tuple[float, ...]
    exit_code: int


def run_on_ranks(
    plan: Plan,
    *,
    num_steps: int,
    log_folder: Path,
    target: str | None = None,
    seed: int = 0,
    swap: Path | None = None,
    swap_bytes: int | None = None,
    on_line: Callable[[str], None],
) -> RankRun:
    """Start a process for each rank of a plan, train, and gather what they measured.

    Args:
        plan: for ranks on this machine.
        num_steps: after one to warm up.
        log_folder: for the log of each rank; it is kept.
        target: needed where the plan names a function of the user's own.
        seed: of every rank.
        swap: a directory for what the plan swaps.
        swap_bytes: the most that each rank may take there; None for what the plan needs.
        on_line: hears what rank 0 tells, and why a run ended early.
    """
    check_room(planned_swap_bytes(plan), swap, max_bytes=swap_bytes)
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        path, records = Path(folder) / "plan.json", Path(folder)
        files.write(path, plan)
        arguments = ["-m", "bayplan.rank", str(path), "--records", str(records)]
        arguments += ["--steps", str(num_steps), "--seed", str(seed)]
        arguments += [] if target is None else ["--target", target]
        arguments += [] if swap is None else ["--swap-dir", str(swap.resolve())]
        arguments += [] if swap_bytes is None else ["--swap-bytes", str(swap_bytes)]
        num_ranks = len(plan.actions)
        exit_code = launch(arguments, num_ranks=num_ranks, log_folder=log_folder, on_line=on_line)
        if exit_code:
            return RankRun(None, (), exit_code)
        found = [
            files.read(records / f"rank{rank}.record.json", RunRecord) for rank in range(num_ranks)
        ]
        losses = msgspec.json.decode((records / "rank0.losses.json").read_bytes(), type=list[float])
    return RankRun(_joined(found), tuple(losses), 0)


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
