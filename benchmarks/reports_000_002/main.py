"""Reports 000 to 002 again: OneFlow's and PipeDream's pipelines and data parallel, row by row.

Every run of the reports is planned at its full size, which gives the memory of each rank by
prediction, and carried out by local processes at an eighth of it (see models.py). Does the order of
ranks by memory agree with what the reports saw? All ranks share the cores of this machine, so times
say nothing of speed-ups.
"""

import json
import sys
import tempfile
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say
from reports_000_002.orders import order_of, orders_of_runs
from reports_000_002.rows import RUNS, Reported, Run
from reports_000_002.running import NoRoom, Outcome, at_full_size, measure, smaller

from bayplan.data.plan import RankPlan

COLUMNS = (
    "run",
    "report",
    "data",
    "static_order",
    "memory_mib",
    "report_memory_mib",
    "busy",
    "report_busy",
    "epoch_seconds",
    "report_epoch_seconds",
    "images_per_second",
    "report_images_per_second",
    "order",
    "full_size_order",
    "report_order",
    "agrees",
)
NUM_STEPS = 3
SMALL = ("OneFlow AlexNet, data parallel", "OneFlow AlexNet, 15:1, no static order")


def main() -> None:
    parser = options(__doc__ or "")
    names = [run.name for run in RUNS]
    parser.add_argument("--runs", nargs="*", choices=names, help="these anew")
    arguments = parser.parse_args()
    chosen = arguments.runs or (SMALL if arguments.quick else names)
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    with suppress(KeyboardInterrupt):
        for run in (one for one in RUNS if one.name in chosen):
            say(run.name)
            try:
                rows += _rows(_shrunk(run) if arguments.quick else run, arguments.quick)
            except RuntimeError as fault:
                failures.append({"run": run.name, "fault": str(fault)})
                say(failures[-1])
    rows = _with_known(rows, arguments)
    result: dict[str, Any] = {"rows": rows, "failures": failures}
    result["orders_of_runs"] = orders_of_runs(rows)
    result["claims"] = _claims(result)
    say(result["claims"])
    if rows:
        finish(__file__, result, columns=COLUMNS, arguments=arguments)
    if failures:
        sys.exit(1)


def _shrunk(run: Run) -> Run:
    """Few ranks, a few images for each."""
    return replace(run, local="0:0.0:1" if run.is_pipeline else "0:0-1", batch=256)


def _with_known(rows: list[dict[str, Any]], arguments: Namespace) -> list[dict[str, Any]]:
    """Where only some runs are made anew, what the last full one tells of the others."""
    latest = Path(__file__).parent / "results" / "latest.json"
    if arguments.quick or not arguments.runs or not latest.exists():
        return rows
    known = json.loads(latest.read_text())["rows"]
    rows = [*rows, *(row for row in known if row["run"] not in arguments.runs)]
    order = [run.name for run in RUNS]
    return sorted(rows, key=lambda row: order.index(row["run"]))


def _rows(run: Run, is_quick: bool) -> list[dict[str, Any]]:
    """One for each row of the reports; one for a run that only we have."""
    row: dict[str, Any] = {"run": run.name, "static_order": run.has_static_order}
    row |= {"placement": run.placement, "shares": ":".join(map(str, run.shares))}
    if run.local and not is_quick:
        row["not_as_reported"] = f"{run.local} for {run.placement or 16}: as many samples for each"
    if not is_quick and run.has_static_order:
        full = at_full_size(run)
        found = [round(one / 2**20) for one in full.predicted_peak_bytes]
        row |= {"full_size_mib": found, "full_size_order": order_of(found, _groups(full))}
    small = smaller(run)
    try:
        with tempfile.TemporaryDirectory() as logs:
            outcome = measure(
                small, num_steps=1 if is_quick else NUM_STEPS, log_folder=Path(logs), on_line=say
            )
    except NoRoom as reason:
        row["skipped"] = str(reason)
    else:
        row |= _measured(small, outcome)
    return [{**row, **_reported(one, row, run, small)} for one in run.reported] or [row]


def _measured(plan: RankPlan, outcome: Outcome) -> dict[str, Any]:
    return {
        "ranks": len(plan.actions),
        "batch": outcome.batch,
        "memory_mib": outcome.memory_mib,
        "predicted_mib": outcome.predicted_mib,
        "busy": outcome.busy,
        "step_seconds": outcome.step_seconds,
        "images_per_second": outcome.images_per_second,
        "order": order_of(outcome.memory_mib, _groups(plan)),
    }


def _reported(one: Reported, row: dict[str, Any], run: Run, plan: RankPlan) -> dict[str, Any]:
    """The report's own columns, and whether its order is ours."""
    groups = _groups(plan)
    if run.local:  # of the reports' eight devices, which are alike
        groups = [[rank for rank in own if rank < len(one.memory_mib)] for own in groups]
    order = order_of(one.memory_mib, groups)
    found = [row[name] for name in ("order", "full_size_order") if name in row]
    epoch_seconds = None
    if one.epoch_seconds and one.images_per_second and "images_per_second" in row:
        # Of as many images as the report's epoch has.
        epoch_seconds = one.epoch_seconds * one.images_per_second / row["images_per_second"]
    return {
        "report": f"{one.report}:{one.line}",
        "data": one.data,
        "report_memory_mib": list(one.memory_mib),
        "report_busy": list(one.utilisation),
        "epoch_seconds": epoch_seconds,
        "report_epoch_seconds": one.epoch_seconds,
        "report_images_per_second": one.images_per_second,
        "report_order": order,
        "agrees": bool(found) and all(each == order for each in found),
        "note": one.note,
    }


def _groups(plan: RankPlan) -> list[list[int]]:
    """The ranks of each stage; those that share several stages once."""
    found = dict.fromkeys(tuple(stage.devices) for stage in plan.stages)
    return [list(ranks) for ranks in found]


def _claims(result: dict[str, Any]) -> dict[str, Any]:
    """How many orders were compared, and every one that disagrees."""
    rows = [row for row in result["rows"] if "agrees" in row]
    several = [row for row in rows if " " in row["report_order"]]
    pairs = [
        (kind, pair)
        for pair in result["orders_of_runs"]
        for kind in ("measured", "full_size")
        if f"{kind}_agrees" in pair
    ]
    return {
        "num_rows": len(rows),
        "num_orders_of_ranks": len(several),  # the other rows have one kind of rank
        "orders_of_ranks_that_disagree": [
            (row["run"], row["report"]) for row in several if not row["agrees"]
        ],
        "num_orders_of_runs": len(pairs),
        "orders_of_runs_that_disagree": [
            (kind, pair["lower"], pair["higher"], pair["report"])
            for kind, pair in pairs
            if not pair[f"{kind}_agrees"]
        ],
        "skipped": [(row["run"], row["skipped"]) for row in result["rows"] if "skipped" in row],
    }


if __name__ == "__main__":
    main()
