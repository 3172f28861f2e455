"""Clusters, and why a plan for one is as it is, as text."""

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

import msgspec

from bayplan.data.cluster import Cluster, Host, Joint, Link, given_figures, join_text, numbers_text
from bayplan.data.judgement import Judgement, Why
from bayplan.data.units import format_bytes, format_count, format_rate, format_seconds
from bayplan.reporting.plans import count_text, table_text
from bayplan.simulating.wiring import Wiring

__all__ = ["cluster_text", "clusters_text", "why_text"]

_MOST_DEVICES = 16  # of a matrix that fits into a terminal
_MOST_JOINS = 4
_WIDTH = 100
_COLUMN = 10


def clusters_text(clusters: Sequence[Cluster]) -> str:
    width = max(len(cluster.name) for cluster in clusters)
    return "\n".join(f"{cluster.name:<{width}}  {cluster.title}" for cluster in clusters)


def cluster_text(cluster: Cluster) -> str:
    lines = [f"{cluster.name}: {cluster.title}" if cluster.title else cluster.name]
    lines += _device_lines(cluster)
    lines += _host_lines(cluster)
    for joint in (*cluster.joints, *cluster.links):
        lines += ["", f"{joint.kind:<{_COLUMN}}{_places(joint)}"]
        lines += _figure_lines(joint)
    if 1 < len(cluster.devices) <= _MOST_DEVICES and (cluster.links or cluster.joints):
        lines += ["", *_matrix_lines(cluster)]
    lines += ["", f"fingerprint {cluster.fingerprint}"]
    return "\n".join(lines)


def _device_lines(cluster: Cluster) -> Iterator[str]:
    numbers: dict[str, list[int]] = {}
    for number, device in enumerate(cluster.devices):
        numbers.setdefault(device.kind, []).append(number)
    for name, of_kind in numbers.items():
        kind = cluster.kinds[name]
        flops = kind.flops_per_s["float32"].value
        yield (
            f"{'devices':<{_COLUMN}}{numbers_text(of_kind)}: {kind.title or kind.name},"
            f" {format_bytes(kind.memory_bytes.value)}, {format_count(flops)}FLOPS float32"
        )


def _host_lines(cluster: Cluster) -> Iterator[str]:
    figures = [msgspec.structs.replace(host, name="") for host in cluster.hosts]
    for index, (host, devices) in enumerate(
        zip(cluster.hosts, cluster.devices_of_hosts, strict=True)
    ):
        if index and figures[index] == figures[index - 1]:
            continue  # alike: said once, with their number
        alike = figures.count(figures[index])
        several = f", and {alike - 1} more like it" if alike > 1 else ""
        yield ""
        yield f"{'host':<{_COLUMN}}{host.name}: devices {numbers_text(devices)}{several}"
        yield from _figure_lines(host)


def _places(joint: Joint | Link) -> str:
    if isinstance(joint, Link):
        shared = f", shared with all links of {joint.shared!r}" if joint.shared else ""
        return join_text(((joint.ends[0],), (joint.ends[1],))) + shared
    texts = map(join_text, joint.joins[:_MOST_JOINS])
    shown = [text if len(text) <= 40 else f"{text[:28]}…{text[-8:]}" for text in texts]
    if more := len(joint.joins) - len(shown):
        shown.append(f"and {more} more")
    return "  ".join(shown) + ("" if joint.is_duplex else ", one direction at a time")


def _figure_lines(struct: Host | Joint | Link) -> Iterator[str]:
    for name, figure in given_figures(struct):
        words = re.sub("(_bytes)?_per_s$|_bytes$|_seconds$", "", name).replace("_", " ")
        head = f"  {words:<18}{_shown(name, figure.value):>11}  "
        first, *rest = wrap(figure.source, max(20, _WIDTH - len(head))) or [""]
        yield head + first
        yield from (" " * len(head) + line for line in rest)


def _shown(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return format_rate(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_seconds"):
        return format_seconds(value)
    return f"{value:g}/s"


def _matrix_lines(cluster: Cluster) -> Iterator[str]:
    """As `nvidia-smi topo -m` has it: the way a message takes."""
    wiring = Wiring(cluster)
    numbers = range(len(cluster.devices))
    rows = [
        ["X" if source == target else str(wiring.route(source, target).kind) for target in numbers]
        for source in numbers
    ]
    width = 2 + max(len(entry) for row in rows for entry in row)
    for head, row in (("links", numbers), *enumerate(rows)):
        yield f"{head:<{_COLUMN}}" + "".join(f"{entry:>{width}}" for entry in row)


_MOST_STAGES = 16  # of which each has a line; of more, the first and the last ones
_ENDS = 6
_STAGE_COLUMNS = (
    *("stage", "layers", "devices", "busy %", "computes", "sends", "sums"),
    *("needed", "allocated", "device total"),
)


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
    line = (
        f"{why.name}: {count_text(len(judgement.stages), 'stage')} on {why.shape} devices,"
        f" {count_text(why.num_micro_batches, 'micro-batch', 'es')}, {why.schedule}"
    )
    if why.staleness:
        line += f", weights up to {count_text(why.staleness, 'batch', 'es')} old"
    line += f"\n{format_seconds(judgement.seconds)}"
    if judgement.high_seconds != judgement.low_seconds:
        low, high = map(format_seconds, (judgement.low_seconds, judgement.high_seconds))
        line += f" (between {low} and {high})"
    return (
        f"{line} for a batch of {judgement.num_samples},"
        f" {judgement.samples_per_second:.4g} samples/s, bubble {judgement.bubble:.0%} (simulated)"
    )


def _stages(judgement: Judgement) -> str:
    rows: list[tuple[str, ...]] = []
    for index, stage in enumerate(judgement.stages):
        memory = stage.memory
        seconds = (stage.compute_seconds, stage.transfer_seconds, stage.sum_seconds)
        of_device = f" of {format_bytes(memory.device_bytes)}" if memory.device_bytes else ""
        rows.append(
            (
                str(index),
                f"{stage.first}-{stage.last}" + ("r" if stage.is_recomputed else ""),
                str(len(stage.devices)),
                f"{100 * max(stage.busy):.0f}",
                *map(format_seconds, seconds),
                *map(format_bytes, (memory.needed_bytes, memory.allocated_bytes)),
                format_bytes(memory.total_bytes) + of_device,
            )
        )
    if len(rows) > _MOST_STAGES:
        rows[_ENDS:-_ENDS] = [("...",)]
    text = table_text(_STAGE_COLUMNS, rows)
    if any(stage.is_recomputed for stage in judgement.stages):
        text += "\nr: keeps only its input and repeats its forward"
    return text


def _gains(why: Why) -> str:
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
    lines = [head]
    for gain in why.gains:
        if gain.seconds or gain.note:
            verb = "saves" if gain.seconds >= 0 else "costs"
            note = f"  ({gain.note})" if gain.note else ""
            lines.append(f"  {gain.name:<14} {verb} {format_seconds(abs(gain.seconds)):>8}{note}")
    return "\n".join(lines)


def _alternatives(why: Why) -> str:
    if not why.alternatives:
        return ""
    rows = [
        (
            alternative.name,
            alternative.shape,
            "-" if alternative.seconds is None else format_seconds(alternative.seconds),
            alternative.reason
            + (" (a tie within the figures' spread)" if alternative.is_tie else ""),
        )
        for alternative in why.alternatives
    ]
    text = table_text(("alternative", "devices", "batch", "why not"), rows)
    if why.estimate_factor != 1.0:
        text += (
            "\nalternatives are estimated layer by layer; estimates are multiplied by"
            f" {why.estimate_factor:.3f}, the plan's replayed time over its own estimate"
        )
    return text
