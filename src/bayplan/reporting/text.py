"""Verdicts, profiles and records as plain text, one screen each."""

from collections import defaultdict

from bayplan.data.finding import Finding
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Origin, Profile
from bayplan.data.record import LiveStorage, RunRecord, Source
from bayplan.data.units import format_bytes, format_count, format_seconds
from bayplan.data.verdict import Verdict
from bayplan.reporting.kinds import kind_lines, share_text
from bayplan.reporting.ranks import ranks_text

__all__ = [
    "comparison_text",
    "findings_text",
    "profile_text",
    "record_text",
    "verdict_line",
    "verdict_text",
]

_ORIGIN_WORDS = {
    Origin.MEASURED: "time measured on this device",
    Origin.SCALED: "time measured here at another batch size and scaled",
    Origin.DERIVED: "time derived from the device's figures, nothing ran",
}


def verdict_line(verdict: Verdict) -> str:
    """The answer in one line."""
    seconds = format_seconds(verdict.step_seconds)
    peak, limit = format_bytes(verdict.peak_bytes), format_bytes(verdict.limit_bytes)
    if verdict.fits:
        return f"fits: peak {_of(verdict.peak_bytes, verdict.limit_bytes)}, {seconds} per step"
    planned = verdict.planned
    if planned is not None:
        ways = (
            (planned.num_recomputed, "recomputed"),
            (planned.num_packed, "packed"),
            (planned.num_swapped, "swapped"),
        )
        done = ", ".join(f"{number} {verb}" for number, verb in ways if number)
        return (
            f"fits with a plan: peak {_of(planned.peak_bytes, verdict.limit_bytes)} at"
            f" {planned.time_ratio:.2f} x the plain step's time ({done or 'rewritten at no cost'});"
            f" without one, {peak}"
        )
    over = format_bytes(verdict.peak_bytes - verdict.limit_bytes)
    change = (
        f"would fit: {verdict.would_fit[0]}" if verdict.would_fit else "no change tried would help"
    )
    return f"does not fit: peak {peak}, limit {limit}, {over} too much; {change}"


def verdict_text(verdict: Verdict) -> str:
    """The answer with all that explains it."""
    batch = "" if verdict.batch is None else f", batch {verdict.batch}"
    spread = format_seconds(verdict.step_spread_seconds)
    lines = [
        verdict_line(verdict),
        "",
        f"{verdict.model}{batch}, {format_count(verdict.num_parameters)} parameters,"
        f" optimizer {verdict.optimizer}, on {verdict.device}",
        f"one step {format_seconds(verdict.step_seconds)} ± {spread}"
        f" ({_ORIGIN_WORDS[verdict.time_origin]})",
        "",
        f"at the peak ({verdict.peak_place})",
        *kind_lines(verdict.peak_by_kind),
        "",
        "largest values alive at the peak",
        *map(_value_line, verdict.largest),
    ]
    if verdict.would_fit:
        lines += ["", "what would make it fit", *(f"  {change}" for change in verdict.would_fit)]
    lines += ["", "not counted: " + "; ".join(verdict.not_counted)]
    return "\n".join(lines)


def profile_text(graph: StepGraph, profile: Profile) -> str:
    """Where the time of a step goes: by phase, by operator, and the slowest nodes."""
    total = profile.step_seconds
    by_phase: dict[str, float] = defaultdict(float)
    by_op: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for node, seconds in zip(graph.nodes, profile.seconds, strict=True):
        by_phase[node.phase] += seconds
        count, so_far = by_op[node.op]
        by_op[node.op] = (count + 1, so_far + seconds)
    slowest = sorted(range(len(graph.nodes)), key=lambda index: -profile.seconds[index])[:5]
    top_ops = sorted(by_op.items(), key=lambda item: -item[1][1])[:8]
    how = (
        "derived, nothing ran"
        if profile.origin is Origin.DERIVED
        else f"{profile.origin}, {_count(profile.repeats, 'repeat')}, {profile.clock} clock,"
        f" {_count(profile.threads, 'thread')}"
    )
    lines = [
        f"{profile.model} on {profile.device}: {format_seconds(total)} per step"
        f" ± {format_seconds(profile.step_spread_seconds)} ({how})",
        "",
        *(
            f"  {phase:<10} {format_seconds(seconds):>8}  {share_text(seconds, total)}"
            for phase, seconds in by_phase.items()
        ),
        f"  {'overhead':<10} {format_seconds(profile.overhead_seconds):>8}"
        f"  {share_text(profile.overhead_seconds, total)}",
        "",
        "by operator",
        *(
            f"  {format_seconds(seconds):>8}  {share_text(seconds, total)}  {count:>5} x {op}"
            for op, (count, seconds) in top_ops
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
    """What a run did, or would do."""
    num_steps = len(record.step_seconds)
    what = "" if record.source is Source.SIMULATED else f" {_count(num_steps, 'step')},"
    typical = format_seconds(record.typical_step_seconds) if num_steps else "none ended"
    lines = [
        f"{record.model or 'a training loop'}: {record.source},{what} memory by {record.method}",
        f"  step  {typical} ({record.clock} clock)",
    ]
    if any(device.stages for device in record.devices):
        return "\n".join([lines[0], ranks_text(record)])
    for device in record.devices:
        lines.append(f"  peak  {format_bytes(device.peak_bytes)} on {device.device}")
        lines += kind_lines(device.peak_by_kind)
    if record.not_counted:
        lines.append("  not counted: " + "; ".join(record.not_counted))
    return "\n".join(lines)


def comparison_text(one: RunRecord, other: RunRecord) -> str:
    """Prediction next to reality, in that order, with the error of each.

    Two predictions, or two runs, stand in the order given, with the change between them.
    """
    if one.source is Source.MEASURED and other.source is Source.SIMULATED:
        one, other = other, one
    peaks = (one.steady_peak_bytes, other.steady_peak_bytes)
    seconds = (one.typical_step_seconds, other.typical_step_seconds)
    if one.source is other.source:
        head = f"{'':<6}{'first':>12}{'second':>12}{'change':>10}"
        errors = [_error(*pair[::-1]) for pair in (peaks, seconds)]
    else:
        head = f"{'':<6}{'predicted':>12}{'measured':>12}{'error':>10}"
        errors = [_error(*pair) for pair in (peaks, seconds)]
    return "\n".join(
        [
            head,
            f"{'peak':<6}{format_bytes(peaks[0]):>12}{format_bytes(peaks[1]):>12}{errors[0]:>10}",
            f"{'step':<6}{format_seconds(seconds[0]):>12}{format_seconds(seconds[1]):>12}"
            f"{errors[1]:>10}",
        ]
    )


def findings_text(findings: list[Finding]) -> str:
    """The doctor's findings, one line each, with what to change where it is amiss or helps."""
    lines = []
    for finding in findings:
        change = f" -> {finding.change}" if finding.change else ""
        mark = ("tip" if change else "ok ") if finding.is_good else "BAD"
        lines.append(f"{mark} {finding.subject:<8} {finding.found}{change}")
    return "\n".join(lines)


def _value_line(value: LiveStorage) -> str:
    kind = value.kind.replace("_", " ")
    line = f"  {format_bytes(value.size_bytes):>10}  {kind:<15}  {value.name}  {value.source}"
    return line.rstrip()


def _error(found: float, reference: float) -> str:
    return f"{100 * (found / reference - 1):+.2f} %" if reference else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _of(part: int, whole: int) -> str:
    """Two sizes, the unit said once if it is the same, as in `5.1 of 8.0 GiB`."""
    shown, limit = format_bytes(part), format_bytes(whole)
    amount, unit = shown.split()
    return f"{amount if limit.endswith(f' {unit}') else shown} of {limit}"
