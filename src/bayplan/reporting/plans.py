"""Plans as plain text: what they cost, what sets their peak, and what would help."""

from collections import Counter
from collections.abc import Sequence

from bayplan.data.order import StepOrder
from bayplan.data.plan import Choice, Decision, Plan
from bayplan.data.units import format_bytes, format_seconds

__all__ = [
    "choice_counts",
    "choice_lines",
    "curve_text",
    "explanation_text",
    "order_line",
    "plan_line",
    "table_text",
]

_MOST_LISTED = 10
_VERBS = {Choice.RECOMPUTE: "recomputed", Choice.SWAP: "swapped", Choice.PACK: "packed"}


def order_line(order: StepOrder) -> str:
    """A plan's price in one line."""
    share = order.peak_bytes / order.plain_peak_bytes if order.plain_peak_bytes else 1.0
    return (
        f"peak {format_bytes(order.peak_bytes)} ({share:.0%} of plain), step"
        f" {format_seconds(order.seconds)} ({order.time_ratio:.3f} x plain)"
    )


def plan_line(plan: Plan) -> str:
    """A plan in one line: what it does and what that costs."""
    assert plan.order is not None, "plans of one device have an order"
    return f"{order_line(plan.order)}; {choice_counts(plan.decisions)}"


def choice_counts(decisions: Sequence[Decision]) -> str:
    """How much is not simply kept."""
    counts = Counter(decision.choice for decision in decisions)
    done = [f"{count} {_VERBS[choice]}" for choice, count in sorted(counts.items())]
    return ", ".join(done) or "everything kept"


def explanation_text(plan: Plan) -> str:
    """What sets the peak, what each choice costs, and what would help."""
    order, moment = plan.order, plan.peak_moment
    assert order is not None, "plans of one device have an order"
    limit = "no limit" if plan.limit_bytes is None else f"limit {format_bytes(plan.limit_bytes)}"
    lines = [f"{plan.model}: {plan_line(plan)}", f"strategy {order.strategy}, {limit}"]
    if order.gap is not None:
        lines.append(f"takes at most {order.gap:.1%} longer than the best schedule")
    if moment is not None:
        where = " ".join(filter(None, (moment.op, moment.place)))
        rows = [
            ("always there (parameters, batch, optimizer state)", moment.always_bytes),
            ("gradients and other results so far", moment.outputs_bytes),
            ("scratch memory of the kernel", moment.workspace_bytes),
            *((f"{one.value}  {one.place}", one.size_bytes) for one in moment.values),
        ]
        lines += ["", f"the peak is at {where}:", *_rows(rows)]
    lines += ["", *choice_lines(plan.decisions), "", "what would help:"]
    lines += [f"  {hint}" for hint in _hints(plan)]
    return "\n".join(lines)


def _rows(rows: Sequence[tuple[str, int]]) -> list[str]:
    shown = [row for row in rows if row[1]][: _MOST_LISTED + 3]
    return [f"  {format_bytes(size):>10}  {name.rstrip()}" for name, size in shown]


def choice_lines(decisions: Sequence[Decision]) -> list[str]:
    """What is not simply kept, and what that costs."""
    if not decisions:
        return ["every activation is kept"]
    dearest = sorted(decisions, key=lambda one: (-one.seconds, -one.size_bytes))
    lines = [f"what is not simply kept ({len(decisions)} in all), the dearest first:"]
    for one in dearest[:_MOST_LISTED]:
        size = format_bytes(one.size_bytes) if one.size_bytes else ""
        cost = f"+{format_seconds(one.seconds)}" if one.seconds else "hidden or tiny"
        lines.append(
            f"  {_VERBS[one.choice]:<10}  {size:>10}  {cost:>12}  {one.value}  {one.place}".rstrip()
        )
    if len(decisions) > _MOST_LISTED:
        lines.append(f"  ... and {len(decisions) - _MOST_LISTED} more")
    return lines


def _hints(plan: Plan) -> list[str]:
    order, moment = plan.order, plan.peak_moment
    assert order is not None, "plans of one device have an order"
    hints: list[str] = []
    repeats = [one for one in plan.decisions if one.choice is Choice.RECOMPUTE and one.size_bytes]
    if repeats:
        best = max(repeats, key=lambda one: one.seconds / one.size_bytes)
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
            first = moment.values[0]
            hints.append(
                f"a smaller --batch: {first.value} {first.place} alone takes"
                f" {format_bytes(first.size_bytes)} at the peak"
            )
    return hints or ["nothing: the step runs as fast as it would without a plan"]


def curve_text(points: Sequence[tuple[int, StepOrder]]) -> str:
    """Memory against time, the most memory first."""
    rows = [
        (
            format_bytes(limit_bytes),
            format_bytes(order.peak_bytes),
            f"{order.peak_bytes / max(order.plain_peak_bytes, 1):.0%}",
            f"{order.time_ratio:.3f}",
            "" if order.gap is None else f"{order.gap:.1%}",
        )
        for limit_bytes, order in sorted(points, key=lambda point: -point[0])
    ]
    return table_text(("limit", "peak", "of plain", "time / plain", "gap"), rows)


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of words, right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (columns, *rows)
    )
