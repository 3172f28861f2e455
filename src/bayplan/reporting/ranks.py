"""Plans for many ranks and their runs as plain text: a line for each rank, and for each stage."""

from bayplan.data.placement import Placement
from bayplan.data.plan import Plan, StageOrder
from bayplan.data.record import DeviceRecord, RunRecord
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.histogram import histogram_text, rows_of
from bayplan.reporting.kinds import kind_lines
from bayplan.reporting.plans import choice_counts, choice_lines, table_text

__all__ = ["exchange_text", "pipeline_text", "ranks_text", "start_text", "whole_pipeline_text"]

_MOST_KEPT = 5

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
    """How many ranks share a stage with this one."""
    return sum(not {*one.stages}.isdisjoint(device.stages) for one in record.devices)


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
    if plan.sync_batch_norm:
        parts = "the batch" if plan.num_micro_batches == 1 else "each micro-batch"
        lines.append(f"  BatchNorm normalises {parts} by the statistics of all replicas")
    for at, stage in enumerate(plan.stages):
        ranks = ", ".join(map(str, stage.devices))
        lines.append(f"  stage {at}: operators {stage.first} to {stage.last} on ranks {ranks}")
        own = [one for one in plan.stage_orders if one.stage == at]
        lines += [f"    {_order_line(one)}" for one in own]
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
    """All that a plan for many ranks says: who is where, keeps, exchanges and does what."""
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
    parts += [*_stage_lines(plan), "what each rank does, in order:", *lists, start_text(plan)]
    return "\n".join(parts)


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


def _stage_lines(plan: Plan) -> list[str]:
    """What stages keep, recompute, pack and swap inside."""
    if not plan.stage_orders:
        return ["inside stages every activation is kept"]
    lines = ["inside stages:"]
    for one in plan.stage_orders:
        lines.append(f"  stage {one.stage}, {one.num_samples} samples at a time")
        lines += [f"    {line}" for line in _inside(one)]
    return lines


def _order_line(one: StageOrder) -> str:
    """What a stage does at one size, and what that costs."""
    return (
        f"{one.num_samples} samples at a time, {one.in_flight} in flight:"
        f" {format_bytes(one.held_bytes)} kept of each, {format_bytes(one.passing_bytes)} more in"
        f" passing; {one.order.time_ratio:.3f} x plain; {choice_counts(one.decisions)}"
    )


def _inside(one: StageOrder) -> list[str]:
    """What every forward and backward of a stage does that no action of a list tells."""
    lines: list[str] = []
    if one.swap_bytes:
        away = format_bytes(one.swap_bytes)
        lines.append(f"every F sends {away} out, which its B brings back")
    if one.kept:
        largest = [
            " ".join(
                filter(None, (value.value, value.place, f"({format_bytes(value.size_bytes)})"))
            )
            for value in one.kept[:_MOST_KEPT]
        ]
        more = len(one.kept) - len(largest)
        lines.append(f"kept, the largest first: {', '.join(largest)}{', ...' if more else ''}")
    return [*lines, *choice_lines(one.decisions)]


def _stages(plan: Plan, rank: int) -> str:
    return "+".join(str(at) for at, stage in enumerate(plan.stages) if rank in stage.devices)


def _peak_bytes(device: DeviceRecord) -> int:
    return max(device.step_peak_bytes[1:], default=device.peak_bytes)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"
