"""A plan carried out by ranks of this machine, what they tell meanwhile, and their one record."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bayplan.data import files
from bayplan.data.errors import DoesNotFit, PlanBroken
from bayplan.data.plan import RankPlan
from bayplan.data.record import Prediction, RunRecord
from bayplan.data.units import format_bytes, format_seconds
from bayplan.devices.device import HOST, Device
from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions
from bayplan.running.inputs.feed import FeedOptions
from bayplan.running.inputs.sources import Data
from bayplan.running.ranks.failures import INTERRUPTED, TERMINATED
from bayplan.running.ranks.launching import launch
from bayplan.running.swaps.swap_space import check_swap_room, planned_swap_bytes

__all__ = [
    "INTERRUPTED",
    "TERMINATED",
    "RankRun",
    "SharedFigures",
    "StepLine",
    "check_room",
    "run_on_ranks",
    "step_line",
]


class SharedFigures:
    """What ranks tell the run beside their lines: peaks, shortages, and where all stop.

    A page of memory behind a file made by `create`: to write a number costs no message and no
    wait, so a rank may tell after every step how full it has been, and be told which step is the
    last.
    """

    def __init__(self, path: Path) -> None:
        self._numbers = np.memmap(path, dtype=np.int64, mode="r+")

    @staticmethod
    def create(path: Path, *, num_ranks: int) -> None:
        path.write_bytes(np.zeros(1 + 2 * num_ranks, dtype=np.int64).tobytes())

    @property
    def _num_ranks(self) -> int:
        return len(self._numbers) // 2

    def tell_peak(self, rank: int, peak_bytes: int) -> None:
        self._numbers[1 + rank] = peak_bytes

    @property
    def peaks_bytes(self) -> tuple[int, ...]:
        """By rank, how full it has been; 0 before its first step."""
        return tuple(self._numbers[1 : 1 + self._num_ranks].tolist())

    def tell_short(self, rank: int, smaller_bytes: int) -> None:
        """This rank ran out of memory; it may try a plan within so much."""
        self._numbers[1 + self._num_ranks + rank] = smaller_bytes

    @property
    def smaller_bytes(self) -> int:
        """The least that a rank which ran out may try; 0 if none did."""
        told = self._numbers[1 + self._num_ranks :]
        return int(min(told[told > 0], default=0))

    def stop_before(self, step: int) -> None:
        """Let all ranks stop before a step, counted from 0, at least 1; the first word holds."""
        if not self._numbers[0]:
            self._numbers[0] = step

    def is_over(self, step: int) -> bool:
        return 0 < int(self._numbers[0]) <= step


_LINE = re.compile(r"step ([0-9]{1,12}) of ([0-9]{1,12}), .+")


@dataclass(frozen=True)
class StepLine:
    """Rank 0's line for a step, and how many of all steps are done."""

    done: int
    total: int
    text: str

    @classmethod
    def parse(cls, line: str) -> "StepLine | None":
        """None for any other line."""
        match = _LINE.fullmatch(line)
        return None if match is None else cls(int(match[1]), int(match[2]), line)

    def __str__(self) -> str:
        return self.text


def step_line(
    done: int,
    total: int,
    *,
    loss: float,
    num_samples: int,
    num_measured: int,
    seconds: float,
    peaks_bytes: tuple[int, ...],
) -> str:
    """What rank 0 tells after a step: `seconds` are of so many, `peaks_bytes` by rank."""
    own, most = peaks_bytes[0], max(peaks_bytes)
    fullest = f" ({format_bytes(most)} on rank {peaks_bytes.index(most)})" if most > own else ""
    return (
        f"step {done} of {total}, loss {loss:.4f},"
        f" {num_samples * num_measured / seconds:.1f} samples/s,"
        f" peak {format_bytes(own)}{fullest},"
        f" {format_seconds(seconds / num_measured * (total - done))} left"
    )


_TORCH_BYTES = 200 << 20  # what a process takes that has imported torch and done nothing
# After Ctrl-C the ranks end the step they are in; a second Ctrl-C ends all at once.
_LONGEST_STEP_SECONDS = 120.0


@dataclass(frozen=True)
class RankRun:
    """What came of a run on many ranks.

    Attributes:
        measured: a device for each rank; the step times are the slowest rank's. None if a rank
            failed, or none had a step to tell of when Ctrl-C came.
        exit_code: of the first rank that failed, 130 after Ctrl-C, 143 after SIGTERM, else 0.
        smaller_bytes: the limit of each rank to try, where one ran out of memory.
    """

    measured: RunRecord | None
    exit_code: int
    smaller_bytes: int = 0


def check_room(
    plan: RankPlan,
    swap: Path | None = None,
    *,
    swap_bytes: int | None = None,
    device: Device = HOST,
) -> None:
    """Refuse, before any is started, ranks that this machine has no room for.

    Raises:
        DoesNotFit: more memory is needed than there is: the machine would stop for everybody.
        UsageError: what is swapped has no place.
    """
    check_swap_room(planned_swap_bytes(plan), swap, max_bytes=swap_bytes)
    if device.is_accelerator:
        return
    num_ranks = len(plan.actions)
    needed = num_ranks * _TORCH_BYTES + sum(plan.predicted_peak_bytes)
    there = HOST.shared_free_bytes
    if needed > there:
        raise DoesNotFit(
            f"{num_ranks} ranks on this machine need {format_bytes(needed)}, of which"
            f" {format_bytes(num_ranks * _TORCH_BYTES)} for torch alone, and"
            f" {format_bytes(there)} are free; name fewer devices, or a smaller --batch"
        )


def run_on_ranks(
    plan: RankPlan,
    *,
    num_steps: int,
    log_folder: Path | None,
    target: str | None = None,
    seed: int = 0,
    device: Device = HOST,
    swap: Path | None = None,
    swap_bytes: int | None = None,
    epoch_samples: int | None = None,
    checkpoints: CheckpointOptions | None = None,
    data: Data | None = None,
    options: FeedOptions | None = None,
    on_line: Callable[[str], None],
    on_step: Callable[[StepLine], None] = lambda step: None,
) -> RankRun:
    """Start a process for each rank of a plan, train, and gather what they measured.

    Args:
        plan: for ranks on this machine, which has room for them.
        num_steps: after one to warm up; with checkpoints, all since the beginning.
        log_folder: for the log of each rank; None keeps logs only of a run that fails.
        target: needed where the plan names a function of the user's own.
        device: of each rank; accelerators are numbered by rank.
        swap_bytes: the most that each rank may take in `swap`; None for what the plan needs.
        data: to train on, and what `options` say of it; `num_steps` is not asked for then.
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
        arguments = ["-m", "bayplan.running.ranks.rank", str(path), "--records", str(records)]
        arguments += ["--steps", str(num_steps), "--seed", str(seed)]
        arguments += ["--on", str(device.where)]
        arguments += [] if target is None else ["--target", target]
        if data is not None:
            arguments += _data_arguments(data, options or FeedOptions())
        arguments += [] if swap is None else ["--swap-dir", str(swap.resolve())]
        arguments += [] if swap_bytes is None else ["--swap-bytes", str(swap_bytes)]
        if checkpoints is not None:
            arguments += ["--checkpoint", str(checkpoints.folder.resolve())]
            arguments += ["--every", str(checkpoints.every), "--keep", str(checkpoints.keep)]
            arguments += ["--resume"] if checkpoints.resume else []
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
        if exit_code not in (0, INTERRUPTED, TERMINATED) or not all(
            path.exists() for path in paths
        ):
            return RankRun(None, exit_code, SharedFigures(records / "figures").smaller_bytes)
        rank_records = [files.read(path, RunRecord) for path in paths]
    predicted = Prediction(
        step_seconds=plan.predicted_seconds,
        peak_bytes=plan.predicted_peak_bytes,
        busy=plan.predicted_busy,
    )
    whole = msgspec.structs.replace(_joined(rank_records), predicted=predicted)
    if epoch_samples is not None:
        whole = msgspec.structs.replace(whole, epoch_samples=epoch_samples)
    return RankRun(whole, exit_code)


def _data_arguments(data: Data, options: FeedOptions) -> list[str]:
    """What a rank is told of the data, which it opens for itself."""
    said = ["--synthetic"] if data.is_synthetic and not data.num_synthetic else []
    return [f"--data={data.path}", f"--feed-options={msgspec.json.encode(options).decode()}", *said]


def _joined(rank_records: list[RunRecord]) -> RunRecord:
    counts = {len(record.step_seconds) for record in rank_records}
    if len(counts) != 1:
        raise PlanBroken(f"ranks ran different numbers of steps: {sorted(counts)}")
    steps = zip(*(record.step_seconds for record in rank_records), strict=True)
    return msgspec.structs.replace(
        rank_records[0],
        step_seconds=tuple(max(seconds) for seconds in steps),
        devices=tuple(record.devices[0] for record in rank_records),
    )
