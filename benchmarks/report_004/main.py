"""Report 004 again: what could buckets have gained in its runs, and what could nothing gain?

For each run, latency and bandwidth are fitted to its histogram of messages. On that link the real
gradients of the model are exchanged by planned buckets, by Horovod with its default and with the
settings its tuner named, by PyTorch's DDP, and the bound is computed that no way to fuse can beat.
All of this is simulated; nothing is sent.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say
from report_004.backward import (
    BATCH_SIZE,
    FLOPS_PER_SECOND,
    Layer,
    backward_seconds,
    gradients,
    layers_of,
)
from report_004.fitting import FittedLink, fitted_link
from report_004.report import NUM_RANKS, RUNS, ReportedRun

from bayplan.data.histogram import histogram, histogram_text
from bayplan.planning.buckets.bucket_plan import (
    BucketPlan,
    ddp_timeline,
    horovod_timeline,
    least_end_seconds,
)
from bayplan.planning.buckets.bucketing import Order, plan_buckets

COLUMNS = (
    "run",
    "source",
    "backward_ms",
    "report_ms",
    "fitted_ms",
    "planned_ms",
    "planned_unhidden_ms",
    "horovod_default_ms",
    "horovod_default_unhidden_ms",
    "horovod_tuned_ms",
    "horovod_tuned_unhidden_ms",
    "ddp_unhidden_ms",
    "bound_unhidden_ms",
    "report_giant_share",
    "planned_giant_share",
)
MIB = 2**20
GIANT_BYTES = 392 * MIB
HOROVOD = {"default": (64 * MIB, 0.005), "tuned": (4 * MIB, 0.005)}
# Within which all of backward is queued on the GPU, and so seen by Horovod. An assumption: VGG16
# then has 7 messages in a step with the default settings, where the report has 6.3.
QUEUED_SECONDS = 0.015
PART_BYTES = MIB  # where gradients may be cut, to see what that gains
NEED_BYTES = 16 * MIB  # the most of a message by need, so that others can pass


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    runs = [RUNS[0], RUNS[-1]] if arguments.quick else RUNS
    layers = {name: layers_of(name) for name in dict.fromkeys(run.model for run in runs)}
    rows: list[dict[str, Any]] = []
    for run in runs:
        say(run.name)
        for seconds in (0.0, backward_seconds(layers[run.model])):
            rows.append(_row(run, layers[run.model], seconds, is_quick=arguments.quick))
    result: dict[str, Any] = {
        "rows": rows,
        "backward": {"batch": BATCH_SIZE, "flops_per_second": FLOPS_PER_SECOND},
        "bytes": [_bytes(run, layers[run.model]) for run in runs],
        "claims": _claims(rows),
    }
    say(result["claims"])
    finish(__file__, result, columns=COLUMNS, arguments=arguments)


def _row(
    run: ReportedRun, layers: list[Layer], seconds: float, *, is_quick: bool
) -> dict[str, Any]:
    """One run with one length of backward."""
    fitted = fitted_link(run.classes)
    link, row = fitted.cost, gradients(layers, seconds=seconds)
    planned = plan_buckets(row, link)
    found: dict[str, Any] = {
        "run": run.name,
        "model": run.model,
        "is_tuned": run.is_tuned,
        "source": "simulated",
        "backward_ms": 1e3 * seconds,
        "latency_ms": 1e3 * fitted.latency_seconds,
        "mib_per_second": fitted.bytes_per_second / MIB,
        "report_ms": 1e3 * run.step_seconds,
        "report_messages": run.step_messages,
        "fitted_ms": 1e3 * fitted.total_seconds(run.classes) / run.num_steps,
        "largest_error_of_a_class": fitted.largest_error(run.classes),
        **_times("planned", planned),
        "giant_ms": 1e3 * GIANT_BYTES / fitted.bytes_per_second if run.giant_share else None,
        "report_giant_share": run.giant_share,
        "planned_giant_share": _giant_share(planned, fitted) if run.giant_share else None,
    }
    seen_share = min(1.0, QUEUED_SECONDS / seconds) if seconds else 1.0
    for name, (threshold_bytes, cycle_seconds) in HOROVOD.items():
        horovod = horovod_timeline(
            row,
            link,
            threshold_bytes=threshold_bytes,
            cycle_seconds=cycle_seconds,
            seen_seconds=lambda one: one.ready_seconds * seen_share,
        )
        found |= _times(f"horovod_{name}", horovod)
    found |= _times("ddp", ddp_timeline(row, link))
    bound = least_end_seconds(
        row, latency_seconds=fitted.latency_seconds, bytes_per_second=fitted.bytes_per_second
    )
    found["bound_unhidden_ms"] = 1e3 * (bound - planned.backward_seconds)
    if not is_quick:
        found |= _in_parts(row, fitted)
    found["histogram"] = _histogram(planned).splitlines()
    return found


def _times(name: str, plan: BucketPlan) -> dict[str, Any]:
    return {
        f"{name}_ms": 1e3 * plan.exchange_seconds,
        f"{name}_unhidden_ms": 1e3 * plan.unhidden_seconds,
        f"{name}_hidden_share": plan.hidden_share,
        f"{name}_messages": len(plan.buckets),
    }


def _giant_share(plan: BucketPlan, link: FittedLink) -> float:
    """Of the exchange, what the bytes of the giant alone take."""
    return GIANT_BYTES / link.bytes_per_second / plan.exchange_seconds


def _in_parts(row: list[Any], link: FittedLink) -> dict[str, Any]:
    """What cutting gradients gains, and what order by need does for the first layer."""
    cut = plan_buckets(row, link.cost, part_bytes=PART_BYTES)
    needed = plan_buckets(
        row, link.cost, part_bytes=PART_BYTES, most_bytes=NEED_BYTES, order=Order.NEED
    )
    first = row[-1].name
    return {
        "in_parts_unhidden_ms": 1e3 * cut.unhidden_seconds,
        "by_need_unhidden_ms": 1e3 * needed.unhidden_seconds,
        "by_need_first_layer_ms": 1e3 * (needed.end_of(first) - needed.backward_seconds),
        "by_need_messages": len(needed.buckets),
    }


def _histogram(plan: BucketPlan) -> str:
    """The planned messages in the report's own form."""
    messages = [(one.size_bytes, one.end_seconds - one.begin_seconds) for one in plan.buckets]
    return histogram_text(histogram(messages, num_ranks=NUM_RANKS))


def _bytes(run: ReportedRun, layers: list[Layer]) -> dict[str, Any]:
    """The report's bytes per step next to those of the model's gradients."""
    own = sum(size for layer in layers for _, size in layer.parameters)
    assert abs(own / run.step_bytes - 1) < 1e-3, f"{run.name}: {own} bytes, {run.step_bytes}"
    return {"run": run.name, "report_mib": run.step_bytes / MIB, "model_mib": own / MIB}


def _claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How good the fits are, and what there was to gain; least and most of all runs."""
    bare = [row for row in rows if not row["backward_ms"]]
    overlapped = [row for row in rows if row["backward_ms"]]
    names = ("bound", "ddp", "horovod_default", "horovod_tuned")
    as_run = [
        ("horovod_tuned" if row["is_tuned"] else "horovod_default", row) for row in overlapped
    ]
    return {
        "fitted_over_report": _range([row["fitted_ms"] / row["report_ms"] for row in bare]),
        "largest_error_of_a_class": max(row["largest_error_of_a_class"] for row in bare),
        "horovod_as_run_over_report": _range(
            [row[f"{name}_ms"] / row["report_ms"] for name, row in as_run]
        ),
        "report_over_bound": _range([row["report_ms"] / row["bound_unhidden_ms"] for row in bare]),
        "giant_over_bound": _range(
            [row["giant_ms"] / row["bound_unhidden_ms"] for row in bare if row["giant_ms"]]
        ),
        "planned_end_over": {
            name: {
                "without backward": _range(
                    [_end(row, "planned") / _end(row, name) for row in bare]
                ),
                "with": _range([_end(row, "planned") / _end(row, name) for row in overlapped]),
            }
            for name in names
        },
    }


def _end(row: dict[str, Any], name: str) -> float:
    """When all is summed, from the begin of backward."""
    return row["backward_ms"] + row[f"{name}_unhidden_ms"]


def _range(figures: list[float]) -> list[float]:
    return [min(figures), max(figures)]


if __name__ == "__main__":
    main()
