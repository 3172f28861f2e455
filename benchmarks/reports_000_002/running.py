"""A run of the reports, planned for its own size and carried out here at a smaller one."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from reports_000_002.models import SCALE
from reports_000_002.rows import Run

from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan, Route
from bayplan.data.record import DeviceRecord, Lane, RunRecord
from bayplan.models.targets import resolve_target
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.preparing.step import PreparedStep
from bayplan.running.ranks.local_run import run_on_ranks

__all__ = ["NoRoom", "Outcome", "at_full_size", "measure", "smaller"]

_OPTIMIZER, _STATE_PER_PARAMETER = "sgd", 1.0  # with momentum, as in the reports
_NUM_DEVICES, _NUM_RANKS_OF_TWO_NODES = 8, 16
_PROCESS_BYTES = 400 << 20  # Python, torch and its libraries, which no plan counts
_SIGNALLED = 128  # and the number of the signal, as exit code of ranks that were told to stop
_FOLDER = Path(__file__).resolve().parents[1]


class NoRoom(Exception):
    """The ranks would need more memory than the machine has left."""


@dataclass(frozen=True)
class Outcome:
    """What was measured.

    Attributes:
        memory_mib, predicted_mib: by rank.
        busy: by rank, the percent of the last step that it computed in.
        batch: of all ranks together.
    """

    memory_mib: list[float]
    predicted_mib: list[float]
    busy: list[int]
    step_seconds: list[float]
    batch: int

    @property
    def images_per_second(self) -> float:
        """By the typical step."""
        steady = sorted(self.step_seconds[1:] or self.step_seconds)
        return self.batch / steady[len(steady) // 2]


def _planned(run: Run, *, target: str, scale: int) -> RankPlan:
    """A plan as the run had it: OneFlow by operators, PipeDream where its planner cuts.

    Both train with weights that are one update old in the first of two stages.
    """
    places = Placement.parse(run.local or run.placement, num_devices=_NUM_DEVICES)
    batch = run.batch // scale
    if run.local:  # as many samples for each of fewer ranks
        batch = batch * len(places.places) // _NUM_RANKS_OF_TWO_NODES
    wishes = RankPlanOptions(
        placement=places,
        shares=run.shares,
        shares_by=SharesBy.OPS,
        cut_at=(run.cut_at,) if run.cut_at else (),
        route=Route.ROUND_ROBIN if run.is_round_robin else Route.SPLIT,
        num_micro_batches=len(places.stages[0]) if run.is_round_robin else 1,
        staleness=int(run.is_pipeline),
        static_order=run.has_static_order,
        state_per_parameter=_STATE_PER_PARAMETER,
    )
    question = PreparedStep(target=resolve_target(target), batch=batch, optimizer=_OPTIMIZER)
    return place(PreparedStages.of(question), wishes)


def at_full_size(run: Run) -> RankPlan:
    """The run as it was, for the prediction of its memory."""
    return _planned(run, target=run.model.replace("_", "-"), scale=1)


def smaller(run: Run) -> RankPlan:
    """The run at the size that it has here."""
    return _planned(run, target=f"reports_000_002.models:{run.model}", scale=SCALE)


def measure(
    plan: RankPlan, *, num_steps: int, log_folder: Path, on_line: Callable[[str], None]
) -> Outcome:
    """Carry a plan out.

    Raises:
        NoRoom: there is too little memory for it.
    """
    needed = sum(plan.predicted_peak_bytes) + _PROCESS_BYTES * len(plan.actions)
    available = psutil.virtual_memory().available
    if needed > available:
        raise NoRoom(
            f"{len(plan.actions)} ranks need {needed / 2**30:.1f} GiB, the machine has"
            f" {available / 2**30:.1f} GiB left"
        )
    assert plan.request is not None
    assert plan.request.batch is not None
    # The ranks import the models from the folder of benchmarks, as this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_FOLDER), *filter(None, sys.path)])
    done = run_on_ranks(
        plan,
        num_steps=num_steps,
        log_folder=log_folder,
        target=plan.request.target,
        on_line=on_line,
    )
    if done.exit_code > _SIGNALLED:
        raise KeyboardInterrupt  # the ranks were told to stop, and so is this
    if done.measured is None:
        raise RuntimeError(f"the ranks end with exit code {done.exit_code}; see above why")
    return _outcome(plan, done.measured, plan.request.batch)


def _outcome(plan: RankPlan, record: RunRecord, batch: int) -> Outcome:
    return Outcome(
        memory_mib=[round(_peak_bytes(one) / 2**20, 1) for one in record.devices],
        predicted_mib=[round(one / 2**20, 1) for one in plan.predicted_peak_bytes],
        busy=[_busy(one) for one in record.devices],
        step_seconds=list(record.step_seconds),
        batch=batch,
    )


def _peak_bytes(device: DeviceRecord) -> int:
    return max(device.step_peak_bytes[1:], default=device.peak_bytes)


def _busy(device: DeviceRecord) -> int:
    whole = max((event.start_seconds + event.seconds for event in device.events), default=0.0)
    computing = sum(event.seconds for event in device.events if event.lane is Lane.COMPUTE)
    return round(100 * computing / whole) if whole else 0
