"""Why a plan for a cluster is as it is, as plain text."""

from bayplan.data.judgement import Judgement
from bayplan.data.units import format_bytes, format_seconds
from bayplan.data.why import Gain, Why
from bayplan.reporting.plans import table_text

__all__ = ["why_text"]

_MOST_STAGES = 16  # of which each has a line; of more, the first and the last ones
_ENDS = 6


def why_text(why: Why) -> str:
    """A head, what binds, a line for each stage, where the gain comes from, and alternatives."""
    blocks = [
        "\n".join([_head(why), f"bound by {why.binding}", *why.findings]),
        _stages(why.judgement),
        _gains(why),
        _alternatives(why),
    ]
    return "\n\n".join(block for block in blocks if block)


def _head(why: Why) -> str:
    judgement = why.judgement
    number = len(judgement.stages)
    stages = f"{number} stage{'s' * (number > 1)} on {why.shape} devices"
    count = why.num_micro_batches
    passing = f"{count} micro-batch{'es' * (count > 1)}, {why.schedule}"
    if why.staleness:
        passing += f", weights up to {why.staleness} batch{'es' * (why.staleness > 1)} old"
    spread = (judgement.high_seconds - judgement.low_seconds) / 2
    line = f"{why.name}: {stages}, {passing}\n{format_seconds(judgement.seconds)}"
    if spread:
        low, high = map(format_seconds, (judgement.low_seconds, judgement.high_seconds))
        line += f" (between {low} and {high})"
    return (
        f"{line} for a batch of {judgement.num_samples},"
        f" {judgement.samples_per_second:.4g} samples/s, bubble {judgement.bubble:.0%} (simulated)"
    )


def _stages(judgement: Judgement) -> str:
    """What each stage computes, waits for and holds."""
    rows: list[tuple[str, ...]] = []
    number = len(judgement.stages)
    for at, stage in enumerate(judgement.stages):
        if number > _MOST_STAGES and _ENDS <= at < number - _ENDS:
            if at == _ENDS:
                rows.append(("...", *[""] * 9))
            continue
        memory = stage.memory
        rows.append(
            (
                str(at),
                f"{stage.first}-{stage.last}" + ("r" if stage.is_recomputed else ""),
                str(len(stage.devices)),
                f"{100 * max(stage.busy):.0f}",
                format_seconds(stage.compute_seconds),
                format_seconds(stage.transfer_seconds),
                format_seconds(stage.sum_seconds),
                format_bytes(memory.needed_bytes),
                format_bytes(memory.allocated_bytes),
                format_bytes(memory.total_bytes)
                + (f" of {format_bytes(memory.device_bytes)}" if memory.device_bytes else ""),
            )
        )
    columns = (
        "stage",
        "layers",
        "devices",
        "busy %",
        "computes",
        "sends",
        "sums",
        "needed",
        "allocated",
        "device total",
    )
    text = table_text(columns, rows)
    if any(stage.is_recomputed for stage in judgement.stages):
        text += "\nr: keeps only its input and repeats its forward"
    return text


def _gains(why: Why) -> str:
    """How the difference to data parallel comes about."""
    if not why.gains:
        return ""
    parallel, seconds = why.data_parallel_seconds, why.judgement.seconds
    if parallel is None:
        head = "pure data parallel does not fit; if it did, the difference would be"
    elif abs(parallel - seconds) <= 1e-6 * seconds:
        return f"pure data parallel takes as long: {format_seconds(parallel)}"
    else:
        head = (
            f"pure data parallel takes {format_seconds(parallel)}, {parallel / seconds:.2f} times"
            " as long; of the difference"
        )
    return "\n".join([head, *(_gain(one) for one in why.gains if one.seconds or one.note)])


def _gain(gain: Gain) -> str:
    verb = "saves" if gain.seconds >= 0 else "costs"
    note = f"  ({gain.note})" if gain.note else ""
    return f"  {gain.name:<14} {verb} {format_seconds(abs(gain.seconds)):>8}{note}"


def _alternatives(why: Why) -> str:
    if not why.alternatives:
        return ""
    rows = [
        (
            one.name,
            one.shape,
            "-" if one.seconds is None else format_seconds(one.seconds),
            one.reason + (" (a tie within the figures' spread)" if one.is_tie else ""),
        )
        for one in why.alternatives
    ]
    return table_text(("alternative", "devices", "batch", "why not"), rows)
