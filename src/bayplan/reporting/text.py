"""Verdicts, profiles and records as plain text, one screen each."""

from collections import Counter, defaultdict

from bayplan.data.graph import StepGraph
from bayplan.data.profile import Origin, Profile
from bayplan.data.record import AllocatorPeaks, LiveStorage, RunRecord, Source
from bayplan.data.units import LimitCounts, format_bytes, format_count, format_seconds
from bayplan.data.verdict import Finding, Verdict
from bayplan.reporting.inputs import input_text
from bayplan.reporting.plans import count_text, kind_lines, ratio_text, share_text
from bayplan.reporting.ranks import ranks_text

__all__ = [
    "comparison_text",
    "findings_text",
    "part_text",
    "profile_text",
    "record_text",
    "report_text",
    "verdict_line",
    "verdict_text",
]

_MOST_SHAPES = 3  # of a batch's tensors that are told
_ORIGIN_WORDS = {
    Origin.MEASURED: "time measured on this device",
    Origin.SCALED: "time measured here at another batch size and scaled",
    Origin.DERIVED: "time derived from the device's figures, nothing ran",
}


def verdict_line(verdict: Verdict) -> str:
    plain_bytes, limit_bytes = verdict.plain_bytes, verdict.limit_bytes
    plain, limit = format_bytes(plain_bytes), format_bytes(limit_bytes)
    peak = verdict.limit_counts.words
    if verdict.plain_fits:
        seconds = format_seconds(verdict.plain_step_seconds)
        return f"fits: plain {peak} {part_text(plain_bytes, limit_bytes)}, {seconds} per plain step"
    planned = verdict.planned
    if planned is not None:
        ways = (
            (planned.num_recomputed, "recomputed"),
            (planned.num_packed, "packed"),
            (planned.num_swapped, "swapped"),
        )
        done = ", ".join(f"{number} {verb}" for number, verb in ways if number)
        return (
            f"fits {'with a plan' if verdict.in_pieces is None else 'in pieces, with bayplan.fit'}:"
            f" planned {peak} {part_text(verdict.planned_bytes, limit_bytes)} at"
            f" {ratio_text(planned.time_ratio, planned.time_ratio_spread)} x the plain step's time"
            f" ({done or 'rewritten at no cost'});"
            f" plain {peak} {plain}"
        )
    over = format_bytes(plain_bytes - limit_bytes)
    change = (
        f"would fit: {verdict.would_fit[0]}" if verdict.would_fit else "no change tried would help"
    )
    return f"does not fit: plain {peak} {plain}, limit {limit}, {over} too much; {change}"


def verdict_text(verdict: Verdict) -> str:
    batch = "" if verdict.batch is None else f", batch {verdict.batch}"
    if verdict.batch_shapes:
        more = "" if len(verdict.batch_shapes) <= _MOST_SHAPES else ", …"
        batch += f" ({', '.join(verdict.batch_shapes[:_MOST_SHAPES])}{more})"
    dtypes = f" in {' and '.join(verdict.parameter_dtypes)}" if verdict.parameter_dtypes else ""
    spread = format_seconds(verdict.plain_step_spread_seconds)
    lines = [
        verdict_line(verdict),
        "",
        f"{verdict.model}{batch}, {format_count(verdict.num_parameters)} parameters{dtypes},"
        f" optimizer {verdict.optimizer}, on {verdict.device}",
        f"one plain step {format_seconds(verdict.plain_step_seconds)} ± {spread}"
        f" ({_ORIGIN_WORDS[verdict.time_origin]})",
        *_peak_lines(verdict),
        *_allocator_lines(verdict.allocator, verdict.total_bytes),
        *([f"but {verdict.runs_out}"] if verdict.runs_out else []),
        *([verdict.operators_note] if verdict.operators_note else []),
        "",
        f"at the plain peak ({verdict.peak_place})",
        *kind_lines(verdict.peak_by_kind),
        "",
        "largest values alive at the plain peak",
        *map(_storage_line, verdict.largest),
    ]
    if verdict.in_pieces is not None:
        pieces = verdict.in_pieces
        lines += [
            "",
            f"the forward is not one graph: bayplan.fit plans its {pieces.num_pieces} pieces"
            " together, and nothing is recomputed across a break. It breaks at",
            *(f"  {line}" for line in pieces.breaks),
        ]
    if verdict.would_fit:
        lines += ["", "what would make it fit", *(f"  {change}" for change in verdict.would_fit)]
    lines += ["", "not counted: " + "; ".join(verdict.not_counted)]
    return "\n".join(lines)


def _peak_lines(verdict: Verdict) -> list[str]:
    """Peaks of live bytes, where the first line is of others."""
    if verdict.limit_counts is LimitCounts.LIVE:
        return []
    planned = verdict.planned
    with_plan = "" if planned is None else f", with the plan {format_bytes(planned.peak_bytes)}"
    return [f"peak of live tensors: plain {format_bytes(verdict.plain_peak_bytes)}{with_plan}"]


def _allocator_lines(allocator: AllocatorPeaks | None, total_bytes: int | None) -> list[str]:
    if allocator is None:
        return []
    reserved, lost = format_bytes(allocator.reserved_bytes), allocator.fragmented_bytes
    shown = "" if total_bytes is None else f"; nvidia-smi shows {format_bytes(total_bytes)}"
    return [
        f"torch reserves {reserved} for plain steps, {format_bytes(lost)} of it lost to"
        f" fragmentation{shown}"
    ]


def profile_text(graph: StepGraph, profile: Profile) -> str:
    """Where the time of a step goes: by phase, by operator, and the slowest nodes."""
    total = profile.step_seconds
    by_phase: dict[str, float] = defaultdict(float)
    by_op: dict[str, float] = defaultdict(float)
    for node, seconds in zip(graph.nodes, profile.seconds, strict=True):
        by_phase[node.phase] += seconds
        by_op[node.op] += seconds
    by_phase["overhead"] = profile.overhead_seconds
    calls = Counter(node.op for node in graph.nodes)
    slowest = sorted(range(len(graph.nodes)), key=lambda index: -profile.seconds[index])[:5]
    top_ops = sorted(by_op.items(), key=lambda item: -item[1])[:8]
    how = (
        "derived, nothing ran"
        if profile.origin is Origin.DERIVED
        else f"{profile.origin}, {count_text(profile.repeats, 'repeat')}, {profile.clock} clock,"
        f" {count_text(profile.threads, 'thread')}"
    )
    lines = [
        f"{profile.model} on {profile.device}: {format_seconds(total)} per step"
        f" ± {format_seconds(profile.step_spread_seconds)} ({how})",
        "",
        *(
            f"  {phase:<10} {format_seconds(seconds):>8}  {share_text(seconds, total)}"
            for phase, seconds in by_phase.items()
        ),
        "",
        "by operator",
        *(
            f"  {format_seconds(seconds):>8}  {share_text(seconds, total)}  {calls[op]:>5} x {op}"
            for op, seconds in top_ops
        ),
        "",
        "slowest nodes",
    ]
    for index in slowest:
        node = graph.nodes[index]
        workspace = format_bytes(profile.workspace_bytes[index])
        lines.append(
            f"  {format_seconds(profile.seconds[index]):>8}  workspace {workspace:>10}"
            f"  {node.phase} {node.op.split('.')[1]} {node.module} {node.source}".rstrip()
        )
    return "\n".join(lines)


def record_text(record: RunRecord) -> str:
    num_steps = len(record.step_seconds)
    what = "" if record.source is Source.SIMULATED else f" {count_text(num_steps, 'step')},"
    typical = format_seconds(record.typical_step_seconds) if num_steps else "none ended"
    lines = [
        f"{record.model or 'a training loop'}: {record.source},{what} memory by {record.method}",
        f"  step  {typical} ({record.clock} clock)",
    ]
    if any(device.stages for device in record.devices):
        return "\n".join([lines[0], *input_text(record), ranks_text(record)])
    lines += (f"  {line}" for line in input_text(record))
    for device in record.devices:
        lines.append(f"  peak  {format_bytes(device.peak_bytes)} on {device.device}")
        lines += (f"  {line}" for line in _allocator_lines(device.allocator, device.total_bytes))
        lines += kind_lines(device.peak_by_kind)
    if record.not_counted:
        lines.append("  not counted: " + "; ".join(record.not_counted))
    return "\n".join(lines)


def report_text(record: RunRecord, against: RunRecord | None = None) -> str:
    """A record; with another one both, and how far they differ."""
    if against is None:
        return record_text(record)
    return "\n".join([record_text(record), record_text(against), comparison_text(record, against)])


def comparison_text(first: RunRecord, second: RunRecord) -> str:
    """Prediction next to reality, in that order, with the error of each.

    Two predictions, or two runs, stand in the order given, with the change between them.
    """
    if first.source is Source.MEASURED and second.source is Source.SIMULATED:
        first, second = second, first
    peaks = (first.steady_peak_bytes, second.steady_peak_bytes)
    seconds = (first.typical_step_seconds, second.typical_step_seconds)
    is_change = first.source is second.source
    errors = [_error(*(pair[::-1] if is_change else pair)) for pair in (peaks, seconds)]
    rows = [
        ("", "first", "second", "change") if is_change else ("", "predicted", "measured", "error"),
        ("peak", *map(format_bytes, peaks), errors[0]),
        ("step", *map(format_seconds, seconds), errors[1]),
    ]
    return "\n".join(f"{a:<6}{b:>12}{c:>12} {change:>9}" for a, b, c, change in rows)


def findings_text(findings: list[Finding]) -> str:
    """The doctor's findings, one line each, with what to change where it is amiss or helps."""
    lines, width = [], max(len(finding.subject) for finding in findings)
    for finding in findings:
        change = f" -> {finding.change}" if finding.change else ""
        mark = ("tip" if change else "ok ") if finding.is_good else "BAD"
        lines.append(f"{mark} {finding.subject:<{width}} {finding.found}{change}")
    return "\n".join(lines)


def _storage_line(live: LiveStorage) -> str:
    kind = live.kind.replace("_", " ")
    return f"  {format_bytes(live.size_bytes):>10}  {kind:<15}  {live.name}  {live.source}".rstrip()


def _error(figure: float, reference: float) -> str:
    return f"{100 * (figure / reference - 1):+.2f} %" if reference else "-"


def part_text(part: int, whole: int) -> str:
    """Two sizes, the unit said once if it is the same, as in `5.1 of 8.0 GiB`."""
    shown, limit = format_bytes(part), format_bytes(whole)
    amount, unit = shown.split()
    return f"{amount if limit.endswith(f' {unit}') else shown} of {limit}"
