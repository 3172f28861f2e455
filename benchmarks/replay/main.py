"""Real runs on many ranks, replayed from their own records: is the clock's model of a step right?

Each case is planned and run by real processes. The durations of what the ranks did in the last step
are given to the clock that predicts steps, which puts them together again; its step is compared
with the step that was measured. What a rank was planned to take is compared with what it took.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say
from replay.gradient_times import made_shares
from replay.replaying import replayed

from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan
from bayplan.data.record import DeviceRecord, RunRecord
from bayplan.models.targets import resolve_target
from bayplan.planning.clusters.split import state_per_parameter
from bayplan.planning.pipelines.placing import RankPlanOptions, place
from bayplan.preparing.stages import PreparedStages
from bayplan.preparing.step import PreparedStep
from bayplan.running.ranks.link_speeds import local_link_speeds
from bayplan.running.ranks.local_run import run_on_ranks
from bayplan.simulating.network import Network, SpeedsNetwork

COLUMNS = ("case", "model", "batch", "repeat", "step_ms", "replayed_ms", "error_pct", "memory_pct")
STEP_TARGET_PCT, MEMORY_TARGET_PCT = 7.0, 2.0
OPTIMIZER = "sgd"


@dataclass(frozen=True)
class Case:
    """Something to run."""

    name: str
    model: str
    batch: int
    placement: str
    num_micro_batches: int


CASES = (
    Case("DP 2", "alexnet", 32, "0:0-1", 1),
    Case("DP 2, 2 micro-batches", "resnet18", 16, "0:0-1", 2),
    Case("1:1", "resnet18", 16, "0:0.0:1", 1),
    Case("1:1, 4 micro-batches", "resnet18", 16, "0:0.0:1", 4),
    Case("3:1, 2 micro-batches", "alexnet", 48, "0:0-2.0:3", 2),
)
QUICK = (Case("DP 2", "alexnet", 4, "0:0-1", 1),)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case")
    arguments = parser.parse_args()
    cases, num_steps = (QUICK, 2) if arguments.quick else (CASES, arguments.steps)
    rows: list[dict[str, Any]] = []
    for case in cases:
        say(case.name, case.model)
        question = PreparedStep(
            target=resolve_target(case.model), batch=case.batch, optimizer=OPTIMIZER
        )
        plan = plan_case(case, question)
        made = made_shares(plan, question)
        for repeat in range(1 if arguments.quick else arguments.repeats):
            record = run_plan(plan, num_steps)
            rows.append(_row(case, repeat, record, replayed(record, plan, made=made)))
            say(rows[-1])
    result = {"rows": rows, "claims": _claims(rows)}
    say(result["claims"])
    finish(__file__, result, columns=COLUMNS, arguments=arguments)


def plan_case(case: Case, question: PreparedStep) -> RankPlan:
    wishes = RankPlanOptions(
        placement=Placement.parse(case.placement),
        num_micro_batches=case.num_micro_batches,
        state_per_parameter=state_per_parameter(OPTIMIZER),
    )
    return place(PreparedStages.of(question), wishes, network=_network)


def _network() -> Network | None:
    links = local_link_speeds()
    return None if links is None else SpeedsNetwork(links)


def run_plan(plan: RankPlan, num_steps: int) -> RunRecord:
    with tempfile.TemporaryDirectory(prefix="bayplan-replay-") as logs:
        done = run_on_ranks(plan, num_steps=num_steps, log_folder=Path(logs), on_line=say)
    if done.measured is None:
        raise SystemExit(f"a rank failed with exit code {done.exit_code}")
    return done.measured


def _row(case: Case, repeat: int, record: RunRecord, replay: RunRecord) -> dict[str, Any]:
    step, found = record.step_seconds[-1], replay.step_seconds[0]
    errors = [
        100 * (predicted.peak_bytes / _peak_bytes(measured) - 1)
        for predicted, measured in zip(replay.devices, record.devices, strict=True)
    ]
    return {
        "case": case.name,
        "model": case.model,
        "batch": case.batch,
        "placement": case.placement,
        "micro_batches": case.num_micro_batches,
        "repeat": repeat,
        "step_ms": 1e3 * step,
        "all_steps_ms": [1e3 * seconds for seconds in record.step_seconds],
        "replayed_ms": 1e3 * found,
        "error_pct": 100 * (found / step - 1),
        "memory_pct": _largest(errors),
        "memory_of_ranks_pct": errors,
    }


def _peak_bytes(device: DeviceRecord) -> int:
    return max(device.step_peak_bytes[1:], default=device.peak_bytes)


def _claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By case, the median of its runs: one of them may be disturbed by something else here."""
    names = dict.fromkeys(row["case"] for row in rows)
    medians: dict[str, float] = {
        name: statistics.median(row["error_pct"] for row in rows if row["case"] == name)
        for name in names
    }
    worst_step = _largest(medians.values())
    worst_memory = _largest(row["memory_pct"] for row in rows)
    return {
        "median_error_pct": medians,
        "worst_median_error_pct": worst_step,
        "worst_error_pct": _largest(row["error_pct"] for row in rows),
        "step_target_pct": STEP_TARGET_PCT,
        "step_holds": abs(worst_step) <= STEP_TARGET_PCT,
        "worst_memory_pct": worst_memory,
        "memory_target_pct": MEMORY_TARGET_PCT,
        "memory_holds": abs(worst_memory) <= MEMORY_TARGET_PCT,
    }


def _largest(errors: Iterable[float]) -> float:
    """The one that is furthest from 0, with its sign."""
    return max(errors, key=abs)


if __name__ == "__main__":
    main()
