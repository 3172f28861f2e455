"""Plans for many ranks and their runs as plain text: a line for each rank, and for each stage."""

from bayplan.data.plan import Plan, StageOrder
from bayplan.data.record import DeviceRecord, Lane, RunRecord
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.plans import choice_counts, choice_lines, table_text

__all__ = ["pipeline_text", "ranks_explanation", "ranks_text"]

_MOST_KEPT = 5


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
    for at, stage in enumerate(plan.stages):
        ranks = ", ".join(map(str, stage.devices))
        lines.append(f"  stage {at}: operators {stage.first} to {stage.last} on ranks {ranks}")
        own = [one for one in plan.stage_orders if one.stage == at]
        lines += [f"    {_order_line(one)}" for one in own]
    longest = max(range(len(plan.actions)), key=lambda rank: len(plan.actions[rank]))
    lines.append(f"  rank {longest} does: {' '.join(plan.actions[longest][:16])} …")
    return "\n".join(lines)


def ranks_explanation(plan: Plan) -> str:
    """Every rank's list, and what its stages keep, recompute, pack and swap inside."""
    limit = "no limit" if plan.limit_bytes is None else f"limit {format_bytes(plan.limit_bytes)}"
    first, *others = pipeline_text(plan).splitlines()
    lines = [f"{first}, {limit} for each rank", *others[:-1], ""]
    for rank, actions in enumerate(plan.actions):
        peak = format_bytes(plan.predicted_peak_bytes[rank])
        lines.append(f"rank {rank}, stage {_stages(plan, rank)}, peak {peak}: {' '.join(actions)}")
    if not plan.stage_orders:
        lines += ["", "every activation is kept"]
    for one in plan.stage_orders:
        lines += ["", f"stage {one.stage}, {_order_line(one)}", *_inside(one)]
    return "\n".join(lines)


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


def _busy(device: DeviceRecord) -> str:
    """The part of the last step that a rank computed in."""
    if not device.events:
        return ""
    whole = max(event.start_seconds + event.seconds for event in device.events)
    computing = sum(event.seconds for event in device.events if event.lane is Lane.COMPUTE)
    return f"{100 * computing / whole:.0f}" if whole else ""
