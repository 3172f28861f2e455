"""Plans as text, and memory by kind."""

from collections import Counter
from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from bayplan.data.graph import StorageKind
from bayplan.data.plan import Choice, Decision, DevicePlan, Plan, StepOrder
from bayplan.data.profile import BUSY_SPREAD
from bayplan.data.record import MESSAGE, DeviceRecord, RunRecord
from bayplan.data.units import LimitCounts, format_bytes, format_seconds

__all__ = [
    "KIND_WORDS",
    "busy_text",
    "choice_counts",
    "choice_lines",
    "count_text",
    "curve_text",
    "explanation_text",
    "fit_line",
    "fullest_device",
    "kind_lines",
    "limit_text",
    "mebibytes",
    "percent",
    "plan_line",
    "ratio_text",
    "share_text",
    "short_text",
    "table_text",
]

KIND_WORDS: dict[str, str] = {
    StorageKind.PARAMETER: "parameters",
    StorageKind.GRADIENT: "gradients",
    StorageKind.OPTIMIZER_STATE: "optimizer state",
    StorageKind.BUFFER: "buffers",
    StorageKind.INPUT: "batch",
    StorageKind.ACTIVATION: "activations held for backward",
    StorageKind.TEMPORARY: "temporaries",
    "workspace": "workspace inside the kernel",
    MESSAGE: "messages between ranks",
}


def kind_lines(by_kind: dict[str, int]) -> list[str]:
    total = sum(by_kind.values())
    return [
        f"  {KIND_WORDS.get(kind, kind):<30} {format_bytes(size):>10}  {share_text(size, total)}"
        for kind, size in by_kind.items()
        if size
    ]


def share_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "    -  "


def count_text(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def mebibytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**20:.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"


def fullest_device(record: RunRecord) -> DeviceRecord | None:
    return max(record.devices, key=lambda device: device.steady_peak_bytes, default=None)


_MOST_LISTED = 10
_TABLE_WIDTH = 10_000  # wider than any table, so that rich never wraps or cuts a cell
_VERBS = {Choice.RECOMPUTE: "recomputed", Choice.SWAP: "swapped", Choice.PACK: "packed"}


def ratio_text(ratio: float, spread: float) -> str:
    """A ratio and how far it may be off, with as many digits as that leaves.

    Example:
        >>> ratio_text(1.0812, 0.03), ratio_text(1.0812, 0.0004), ratio_text(1.0812, 0.0)
        ('1.08 ± 0.03', '1.081 ± 0.001', '1.081')
    """
    if not spread:
        return f"{ratio:.3f}"
    spread = max(spread, 0.001)
    return f"{ratio:.2f} ± {spread:.2f}" if spread >= 0.01 else f"{ratio:.3f} ± {spread:.3f}"


def busy_text(spread: float, how: str = "--again") -> str:
    """What to say of prices whose repeats differ by a share of them; nothing where it is small."""
    if spread <= BUSY_SPREAD:
        return ""
    return (
        "prices were measured while the machine was busy: runs of the same operator differ by"
        f" {spread:.0%}, so times may be off; measure again with {how}"
    )


# Guards and calls were seen to take up to 0.15 of steps of 2 ms (`benchmarks/overhead`).
_SHORT_SECONDS = 2e-3


def short_text(plain_seconds: float) -> str:
    """What to say of a step that is so short that its kernels are not most of it; else nothing."""
    if not 0 < plain_seconds < _SHORT_SECONDS:
        return ""
    return (
        f"the operators of a plain step take {format_seconds(plain_seconds)}: in a step that short,"
        " guards and Python calls of a plan can take another 15 % and more, which the predicted"
        " time leaves out"
    )


def plan_line(plan: DevicePlan) -> str:
    order = plan.order
    share = order.peak_bytes / order.plain_peak_bytes if order.plain_peak_bytes else 1.0
    return (
        f"planned peak {format_bytes(order.peak_bytes)} ({share:.0%} of plain)"
        f"{_reserved_text(order)}, planned step"
        f" {format_seconds(plan.predicted_seconds or order.seconds)}"
        f" ({ratio_text(order.time_ratio, order.time_ratio_spread)} x plain);"
        f" {choice_counts(plan.decisions)}"
    )


def _reserved_text(order: StepOrder) -> str:
    if order.reserved_bytes is None:
        return ""
    return f", {format_bytes(order.reserved_bytes)} reserved"


def fit_line(plan: DevicePlan, *, seconds: float, is_kept: bool) -> str:
    """What `fit` did: the limit, what is predicted within it, and how long that took."""
    order = plan.order
    limit = "" if plan.limit_bytes is None else f" {limit_text(plan).removeprefix('limit ')}"
    how = "with a plan of the cache, ready" if is_kept else "planned"
    is_guess = plan.decisions and not order.in_step
    alone = ", by prices of operators alone" if is_guess else ""
    return (
        f"{plan.model} fits{limit}: planned peak {format_bytes(order.peak_bytes)}"
        f" (plain {format_bytes(order.plain_peak_bytes)}){_reserved_text(order)}, planned step"
        f" {ratio_text(order.time_ratio, order.time_ratio_spread)} x plain"
        f"{alone} ({choice_counts(plan.decisions)}); {how} in {format_seconds(seconds)}"
    )


def choice_counts(decisions: Sequence[Decision]) -> str:
    counts = Counter(decision.choice for decision in decisions)
    done = [f"{count} {_VERBS[choice]}" for choice, count in sorted(counts.items())]
    return ", ".join(done) or "everything kept"


def explanation_text(plan: DevicePlan) -> str:
    """What sets the peak, what each choice costs, and what would help."""
    order, moment = plan.order, plan.peak_moment
    lines = [f"{plan.model}: {plan_line(plan)}", f"strategy {order.strategy}, {limit_text(plan)}"]
    if order.gap is not None:
        lines.append(f"takes at most {order.gap:.1%} longer than the best schedule")
    if moment is not None:
        where = " ".join(filter(None, (moment.op, moment.place)))
        rows = [
            ("always there (parameters, batch, optimizer state)", moment.always_bytes),
            ("gradients and other results so far", moment.outputs_bytes),
            ("scratch memory of the kernel", moment.workspace_bytes),
            *((f"{live.value}  {live.place}", live.size_bytes) for live in moment.values),
        ]
        shown = [row for row in rows if row[1]][: _MOST_LISTED + 3]
        lines += ["", f"the peak is at {where}:"]
        lines += [f"  {format_bytes(size):>10}  {name.rstrip()}" for name, size in shown]
    lines += ["", *choice_lines(plan.decisions), "", "what would help:"]
    lines += [f"  {hint}" for hint in _hints(plan)]
    return "\n".join(lines)


def limit_text(plan: Plan) -> str:
    if plan.limit_bytes is None:
        return "no limit"
    counts = plan.limit_counts if isinstance(plan, DevicePlan) else LimitCounts.LIVE
    of = "" if counts is LimitCounts.LIVE else f" of {counts} bytes"
    return f"limit {format_bytes(plan.limit_bytes)}{of}"


def choice_lines(decisions: Sequence[Decision]) -> list[str]:
    """What is not simply kept, and what that costs."""
    if not decisions:
        return ["every activation is kept"]
    dearest = sorted(decisions, key=lambda decision: (-decision.seconds, -decision.size_bytes))
    lines = [f"what is not simply kept ({len(decisions)} in all), the dearest first:"]
    for decision in dearest[:_MOST_LISTED]:
        size = format_bytes(decision.size_bytes) if decision.size_bytes else ""
        cost = f"+{format_seconds(decision.seconds)}" if decision.seconds else "hidden or tiny"
        line = f"  {_VERBS[decision.choice]:<10}  {size:>10}  {cost:>12}"
        lines.append(f"{line}  {decision.value}  {decision.place}".rstrip())
    if len(decisions) > _MOST_LISTED:
        lines.append(f"  ... and {len(decisions) - _MOST_LISTED} more")
    return lines


def _hints(plan: DevicePlan) -> list[str]:
    order, moment = plan.order, plan.peak_moment
    hints: list[str] = []
    recomputed = [
        decision
        for decision in plan.decisions
        if decision.choice is Choice.RECOMPUTE and decision.size_bytes
    ]
    if recomputed:
        best = max(recomputed, key=lambda decision: decision.seconds / decision.size_bytes)
        hints.append(
            f"{format_bytes(best.size_bytes)} more memory: {best.value} {best.place} need not be"
            f" recomputed, {format_seconds(best.seconds)} less per step"
        )
        if not order.swaps:
            hints.append("--swap-dir DIR: activations that can hide behind compute go to disk")
    if moment is not None and order.peak_bytes:
        if 2 * (moment.always_bytes + moment.outputs_bytes) > order.peak_bytes:
            hints.append(
                "parameters, gradients and optimizer state are most of the peak:"
                " --update-in-backward, or --optimizer sgd"
            )
        elif moment.values:
            largest = moment.values[0]
            hints.append(
                f"a smaller --batch: {largest.value} {largest.place} alone takes"
                f" {format_bytes(largest.size_bytes)} at the peak"
            )
    return hints or ["nothing: the step runs as fast as it would without a plan"]


def curve_text(points: Sequence[tuple[int, StepOrder]]) -> str:
    """Memory against time, the most memory first."""
    rows = [
        (
            format_bytes(limit_bytes),
            format_bytes(order.peak_bytes),
            f"{order.peak_bytes / max(order.plain_peak_bytes, 1):.0%}",
            ratio_text(order.time_ratio, order.time_ratio_spread),
            "" if order.gap is None else f"{order.gap:.1%}",
        )
        for limit_bytes, order in sorted(points, key=lambda point: -point[0])
    ]
    return table_text(("limit", "peak", "of plain", "time / plain", "gap"), rows)


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, as plain text wherever it is printed: no colour, nothing wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=_TABLE_WIDTH, color_system=None, markup=False, emoji=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
