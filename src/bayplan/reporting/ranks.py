"""Runs on many ranks as plain text: a line for each rank, as the reference reports have it."""

from bayplan.data.plan import Plan
from bayplan.data.record import DeviceRecord, Lane, RunRecord
from bayplan.data.units import format_seconds
from bayplan.reporting.plans import table_text

__all__ = ["pipeline_text", "ranks_text"]


def ranks_text(record: RunRecord, plan: Plan) -> str:
    """Peak and load of each rank, and the step's time."""
    num_samples = None if plan.request is None else plan.request.batch
    seconds = record.typical_step_seconds
    speed = f", {num_samples / seconds:.1f} samples/s" if num_samples and seconds else ""
    rows = [
        (
            str(rank),
            _stages(plan, rank),
            f"{_peak_bytes(device) / 2**20:.0f}",
            f"{plan.predicted_peak_bytes[rank] / 2**20:.0f}",
            _busy(device),
        )
        for rank, device in enumerate(record.devices)
    ]
    table = table_text(("device", "stage", "peak MiB", "predicted", "busy %"), rows)
    oldest = max((max(device.staleness, default=0) for device in record.devices), default=0)
    stale = f", weights up to {oldest} updates old" if oldest else ""
    return f"{table}\nstep {format_seconds(seconds)}{speed}{stale}"


def pipeline_text(plan: Plan) -> str:
    """What a plan for many ranks does, in a few lines."""
    lines = [
        f"{plan.model}: {len(plan.stages)} stages on {len(plan.actions)} ranks,"
        f" {plan.num_micro_batches} micro-batches ({plan.route}), {plan.schedule}"
    ]
    if any(plan.lags):
        ages = ":".join(map(str, plan.lags))
        lines.append(f"  weights are {ages} updates old, by stage: not the numbers of one device")
    if plan.sync_batch_norm:
        parts = "the batch" if plan.num_micro_batches == 1 else "each micro-batch"
        lines.append(f"  BatchNorm normalises {parts} by the statistics of all replicas")
    for at, stage in enumerate(plan.stages):
        ranks = ", ".join(map(str, stage.devices))
        lines.append(f"  stage {at}: operators {stage.first} to {stage.last} on ranks {ranks}")
    longest = max(range(len(plan.actions)), key=lambda rank: len(plan.actions[rank]))
    lines.append(f"  rank {longest} does: {' '.join(plan.actions[longest][:16])} …")
    return "\n".join(lines)


def _stages(plan: Plan, rank: int) -> str:
    return "+".join(str(at) for at, stage in enumerate(plan.stages) if rank in stage.devices)


def _peak_bytes(device: DeviceRecord) -> int:
    return max(device.step_peak_bytes[1:], default=device.peak_bytes)


def _busy(device: DeviceRecord) -> str:
    """The part of the last step that a rank computed in."""
    if not device.events:
        return ""
    whole = max(event.start_seconds + event.seconds for event in device.events)
    computing = sum(event.seconds for event in device.events if event.lane is Lane.COMPUTE)
    return f"{100 * computing / whole:.0f}" if whole else ""
