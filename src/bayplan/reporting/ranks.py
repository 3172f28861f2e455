"""Plans for many ranks and their runs as plain text: a line for each rank, and for each stage."""

from bayplan.data.histogram import histogram_text, rows_of
from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan, StageOrder
from bayplan.data.record import DeviceRecord, RunRecord
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.plans import (
    choice_counts,
    choice_lines,
    count_text,
    fullest_device,
    kind_lines,
    limit_text,
    mebibytes,
    percent,
    table_text,
)

__all__ = ["exchange_text", "pipeline_text", "ranks_text", "start_text", "whole_pipeline_text"]

_MOST_KEPT = 5
_MOST_ACTIONS = 16


def ranks_text(record: RunRecord) -> str:
    """Peak and load of each rank, predicted next to measured, and the step's time."""
    predicted = record.predicted
    peaks = predicted.peak_bytes if predicted else ()
    predicted_busy = predicted.busy if predicted else ()
    busy = record.busy
    rows = [
        (
            str(rank),
            "+".join(map(str, device.stages)),
            mebibytes(device.steady_peak_bytes),
            mebibytes(peaks[rank] if peaks else None),
            percent(busy[rank]),
            percent(predicted_busy[rank] if predicted_busy else None),
        )
        for rank, device in enumerate(record.devices)
    ]
    columns = ("device", "stage", "peak MiB", "predicted", "busy %", "predicted")
    return "\n".join([table_text(columns, rows), *_step_lines(record)])


def exchange_text(record: RunRecord) -> str:
    """Sums of gradients by size class, of each rank that made any."""
    tables = [
        f"sums of rank {rank}, without waits for other ranks\n"
        + histogram_text(rows_of(device.messages, num_ranks=_num_replicas(record, device)))
        for rank, device in enumerate(record.devices)
        if device.messages
    ]
    return "\n\n".join(tables) or "no gradient is summed over ranks: no stage has replicas"


def _num_replicas(record: RunRecord, device: DeviceRecord) -> int:
    """How many ranks, itself included, share a stage with this one."""
    return sum(not {*peer.stages}.isdisjoint(device.stages) for peer in record.devices)


def _step_lines(record: RunRecord) -> list[str]:
    seconds, predicted = record.typical_step_seconds, record.predicted
    line = f"step {format_seconds(seconds)}"
    if predicted is not None and predicted.step_seconds:
        line += f", predicted {format_seconds(predicted.step_seconds)}"
    if record.samples_per_second is not None:
        line += f", {record.samples_per_second:.1f} samples/s"
    oldest = max((max(device.staleness, default=0) for device in record.devices), default=0)
    line += f", weights up to {oldest} updates old" if oldest else ""
    lines = [line]
    if record.epoch_seconds is not None:
        lines.append(
            f"an epoch of {record.epoch_samples:,} samples would take"
            f" {record.epoch_seconds / 3600:.3g} h, extrapolated from the median step"
        )
    fullest = fullest_device(record)
    if fullest is not None and fullest.peak_by_kind:
        lines += [f"at the peak of {fullest.device}", *kind_lines(fullest.peak_by_kind)]
    return lines


def pipeline_text(plan: RankPlan) -> str:
    lines = [
        f"{plan.model}: {count_text(len(plan.stages), 'stage')} on {len(plan.actions)} ranks,"
        f" {count_text(plan.num_micro_batches, 'micro-batch', 'es')} ({plan.route}),"
        f" {plan.schedule}"
    ]
    if any(plan.lags):
        ages = ":".join(map(str, plan.lags))
        lines.append(f"  weights are {ages} updates old, by stage: not the numbers of one device")
    if not plan.static_order:
        lines.append("  no static order: a rank does whatever is ready of its list")
    if plan.sync_batch_norm:
        parts = "the batch" if plan.num_micro_batches == 1 else "each micro-batch"
        lines.append(f"  BatchNorm normalises {parts} by the statistics of all replicas")
    for index, stage in enumerate(plan.stages):
        ranks = ", ".join(map(str, stage.devices))
        lines.append(f"  stage {index}: operators {stage.first} to {stage.last} on ranks {ranks}")
        lines += [
            f"    {_order_line(inside)}" for inside in plan.stage_orders if inside.stage == index
        ]
    fullest = max(range(len(plan.actions)), key=lambda rank: plan.predicted_peak_bytes[rank])
    peak = format_bytes(plan.predicted_peak_bytes[fullest])
    seconds = format_seconds(plan.predicted_seconds) if plan.predicted_seconds else "unknown"
    lines.append(f"  predicted: step {seconds}, peak {peak} on rank {fullest}")
    longest = max(range(len(plan.actions)), key=lambda rank: len(plan.actions[rank]))
    more = " …" if len(plan.actions[longest]) > _MOST_ACTIONS else ""
    shown = " ".join(plan.actions[longest][:_MOST_ACTIONS])
    lines.append(f"  rank {longest} does: {shown}{more}")
    return "\n".join(lines)


def whole_pipeline_text(plan: RankPlan) -> str:
    """All that a plan for many ranks says: who is where, keeps, exchanges and does what."""
    rows = [
        (
            str(rank),
            "+".join(
                str(index) for index, stage in enumerate(plan.stages) if rank in stage.devices
            ),
            mebibytes(plan.predicted_peak_bytes[rank]),
            str(len(actions)),
        )
        for rank, actions in enumerate(plan.actions)
    ]
    table = table_text(("rank", "stage", "predicted MiB", "actions"), rows)
    sums = [
        f"  bucket {index}: {len(bucket.parameters)} gradients, {format_bytes(bucket.size_bytes)},"
        f" of stage {' and '.join(map(str, bucket.stages))}"
        for index, bucket in enumerate(plan.buckets)
    ]
    lists = [f"  rank {rank}: {' '.join(actions)}" for rank, actions in enumerate(plan.actions)]
    parts = [pipeline_text(plan), f"memory, {limit_text(plan)}:", table]
    parts += ["sums of gradients:", *sums] if sums else []
    parts += [*_stage_lines(plan), "what each rank does, in order:", *lists, start_text(plan)]
    return "\n".join(parts)


def start_text(plan: RankPlan) -> str:
    """How ranks of a plan are started from a script."""
    counts = Placement.parse(plan.placement).devices_per_node if plan.placement else ()
    if len(counts) < 2:
        command = f"torchrun --nproc-per-node {len(plan.actions)}"
        return f"start with `bayplan run`, or a script with bayplan.bind by `{command}`"
    lines, first = [], 0
    for node, count in enumerate(counts):
        lines.append(
            f"  node {node}, ranks {first} to {first + count - 1}: torchrun --nnodes {len(counts)}"
            f" --node-rank {node} --nproc-per-node {count} --master-addr NODE0 …"
        )
        first += count
    return "\n".join(["start a script with bayplan.bind, on each node:", *lines])


def _stage_lines(plan: RankPlan) -> list[str]:
    if not plan.stage_orders:
        return ["inside stages every activation is kept"]
    lines = ["inside stages:"]
    for inside in plan.stage_orders:
        lines.append(f"  stage {inside.stage}, {inside.num_samples} samples at a time")
        lines += [f"    {line}" for line in _inside_lines(inside)]
    return lines


def _order_line(inside: StageOrder) -> str:
    held, passing = map(format_bytes, (inside.held_bytes, inside.passing_bytes))
    return (
        f"{inside.num_samples} samples at a time, {inside.in_flight} in flight: {held} kept of"
        f" each, {passing} more in passing; {inside.order.time_ratio:.3f} x plain;"
        f" {choice_counts(inside.decisions)}"
    )


def _inside_lines(inside: StageOrder) -> list[str]:
    """What every forward and backward of a stage does that no action of a list tells."""
    lines: list[str] = []
    if inside.swap_bytes:
        away = format_bytes(inside.swap_bytes)
        lines.append(f"every F sends {away} out, which its B brings back")
    if inside.kept:
        largest = [
            " ".join(filter(None, (live.value, live.place, f"({format_bytes(live.size_bytes)})")))
            for live in inside.kept[:_MOST_KEPT]
        ]
        more = ", ..." if len(inside.kept) > _MOST_KEPT else ""
        lines.append(f"kept, the largest first: {', '.join(largest)}{more}")
    return [*lines, *choice_lines(inside.decisions)]
