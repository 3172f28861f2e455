"""A simulated plan as plain text: the step with its interval, and a line for each device."""

from bayplan.data.record import DeviceRecord, RunRecord
from bayplan.data.units import format_seconds
from bayplan.reporting.plans import table_text

__all__ = ["simulation_text"]

_MOST_DEVICES = 32  # that are shown; the record has all


def simulation_text(record: RunRecord, *, cluster: str) -> str:
    """What a plan would do on a cluster.

    Args:
        record: of it.
        cluster: its name.
    """
    seconds, spread = record.typical_step_seconds, record.step_spread_seconds
    lines = [
        f"{record.model} on {cluster}: simulated, nothing ran",
        f"step {format_seconds(seconds)}, between {format_seconds(max(0.0, seconds - spread))} and"
        f" {format_seconds(seconds + spread)} by the spread of the figures"
        + (
            f"; {record.samples_per_second:,.0f} samples/s"
            if record.samples_per_second is not None
            else ""
        ),
        "",
        _devices_table(record),
    ]
    hidden = len(record.devices) - _MOST_DEVICES
    if hidden > 0:
        lines.append(f"… and {hidden} more; --json has all")
    lines += [
        "",
        "needed: what is alive at once; allocated: as the allocator rounds it; total: with what the"
        " device takes before the first tensor",
        "not counted: " + "; ".join(record.not_counted),
    ]
    return "\n".join(lines)


def _devices_table(record: RunRecord) -> str:
    rows = [
        (
            device.device,
            "" if busy is None else f"{100 * busy:.0f}",
            *map(_mebibytes, (device.needed_bytes, device.peak_bytes, device.total_bytes)),
            _mebibytes(device.capacity_bytes),
            _share(device),
        )
        for device, busy in list(zip(record.devices, record.busy, strict=True))[:_MOST_DEVICES]
    ]
    columns = ("device", "busy %", "needed MiB", "allocated", "total", "of", "%")
    return table_text(columns, rows)


def _mebibytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**20:.0f}"


def _share(device: DeviceRecord) -> str:
    if device.total_bytes is None or not device.capacity_bytes:
        return ""
    return f"{100 * device.total_bytes / device.capacity_bytes:.0f}"
