"""Runs on many ranks as plain text: a line for each rank, as the reference reports have it."""

from bayplan.data.placement import Placement
from bayplan.data.plan import Plan
from bayplan.data.record import DeviceRecord, RunRecord
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.kinds import kind_lines
from bayplan.reporting.plans import table_text

__all__ = ["pipeline_text", "ranks_text", "start_text", "whole_pipeline_text"]

_MOST_ACTIONS = 16


def ranks_text(record: RunRecord) -> str:
    """Peak and load of each rank, predicted next to measured, and the step's time."""
    predicted = record.predicted
    peaks = predicted.peak_bytes if predicted else ()
    busy = predicted.busy if predicted else ()
    shares = record.busy
    rows = [
        (
            str(rank),
            "+".join(map(str, device.stages)),
            f"{_peak_bytes(device) / 2**20:.0f}",
            f"{peaks[rank] / 2**20:.0f}" if peaks else "",
            _percent(shares[rank]),
            _percent(busy[rank] if busy else None),
        )
        for rank, device in enumerate(record.devices)
    ]
    columns = ("device", "stage", "peak MiB", "predicted", "busy %", "predicted")
    return "\n".join([table_text(columns, rows), *_step_lines(record)])


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
    fullest = max(record.devices, key=_peak_bytes, default=None)
    if fullest is not None and fullest.peak_by_kind:
        lines += [f"at the peak of {fullest.device}", *kind_lines(fullest.peak_by_kind)]
    return lines


def pipeline_text(plan: Plan) -> str:
    """What a plan for many ranks does, in a few lines."""
    lines = [
        f"{plan.model}: {len(plan.stages)} stages on {len(plan.actions)} ranks,"
        f" {plan.num_micro_batches} micro-batches ({plan.route}), {plan.schedule}"
    ]
    if any(plan.lags):
        ages = ":".join(map(str, plan.lags))
        lines.append(f"  weights are {ages} updates old, by stage: not the numbers of one device")
    if not plan.static_order:
        lines.append("  no static order: a rank does whatever is ready of its list")
    for at, stage in enumerate(plan.stages):
        ranks = ", ".join(map(str, stage.devices))
        lines.append(f"  stage {at}: operators {stage.first} to {stage.last} on ranks {ranks}")
    fullest = max(range(len(plan.actions)), key=lambda rank: plan.predicted_peak_bytes[rank])
    peak = format_bytes(plan.predicted_peak_bytes[fullest])
    seconds = format_seconds(plan.predicted_seconds) if plan.predicted_seconds else "unknown"
    lines.append(f"  predicted: step {seconds}, peak {peak} on rank {fullest}")
    longest = max(range(len(plan.actions)), key=lambda rank: len(plan.actions[rank]))
    more = " …" if len(plan.actions[longest]) > _MOST_ACTIONS else ""
    shown = " ".join(plan.actions[longest][:_MOST_ACTIONS])
    lines.append(f"  rank {longest} does: {shown}{more}")
    return "\n".join(lines)


def whole_pipeline_text(plan: Plan) -> str:
    """All that a plan for many ranks says: who is where, what is exchanged, who does what."""
    limit = "no limit" if plan.limit_bytes is None else f"limit {format_bytes(plan.limit_bytes)}"
    rows = [
        (
            str(rank),
            _stages(plan, rank),
            f"{plan.predicted_peak_bytes[rank] / 2**20:.0f}",
            str(len(plan.actions[rank])),
        )
        for rank in range(len(plan.actions))
    ]
    table = table_text(("rank", "stage", "predicted MiB", "actions"), rows)
    sums = [
        f"  bucket {at}: {len(bucket.parameters)} gradients, {format_bytes(bucket.size_bytes)},"
        f" of stage {' and '.join(map(str, bucket.stages))}"
        for at, bucket in enumerate(plan.buckets)
    ]
    lists = [f"  rank {rank}: {' '.join(own)}" for rank, own in enumerate(plan.actions)]
    parts = [pipeline_text(plan), f"memory, {limit}:", table]
    parts += ["sums of gradients:", *sums] if sums else []
    return "\n".join([*parts, "what each rank does, in order:", *lists, start_text(plan)])


def start_text(plan: Plan) -> str:
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


def _stages(plan: Plan, rank: int) -> str:
    return "+".join(str(at) for at, stage in enumerate(plan.stages) if rank in stage.devices)


def _peak_bytes(device: DeviceRecord) -> int:
    return max(device.step_peak_bytes[1:], default=device.peak_bytes)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"
