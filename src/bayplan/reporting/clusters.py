"""Clusters as plain text: what is there, what joins it, and where each figure comes from."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from bayplan.data.cluster import Cluster, Host, Joint
from bayplan.data.joins import join_text, numbers_text
from bayplan.data.joint import Link, given_figures
from bayplan.data.units import format_bytes, format_count, format_rate, format_seconds
from bayplan.data.wiring import Wiring

__all__ = ["cluster_text", "clusters_text"]

_MOST_DEVICES = 16  # of a matrix that fits into a terminal
_MOST_JOINS = 4
_WIDTH = 100
_COLUMN = 10


def clusters_text(clusters: Sequence[Cluster]) -> str:
    """A line for each of several."""
    width = max(len(cluster.name) for cluster in clusters)
    lines = [f"{cluster.name:<{width}}  {cluster.title}" for cluster in clusters]
    return "\n".join(lines)


def cluster_text(cluster: Cluster) -> str:
    """One of them with all its figures."""
    lines = [f"{cluster.name}: {cluster.title}" if cluster.title else cluster.name]
    lines += _device_lines(cluster)
    lines += _host_lines(cluster)
    for label, joint in _joints(cluster):
        lines += ["", f"{label:<{_COLUMN}}{_places(joint)}"]
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
    before: Host | None = None
    for host, devices in zip(cluster.hosts, cluster.devices_of_hosts, strict=True):
        figures = {name: getattr(host, name) for name in host.__struct_fields__[1:]}
        if before is not None and all(
            getattr(before, name) == figure for name, figure in figures.items()
        ):
            continue  # alike: said once, with their number
        before = host
        alike = sum(
            all(getattr(other, name) == figure for name, figure in figures.items())
            for other in cluster.hosts
        )
        several = f", and {alike - 1} more like it" if alike > 1 else ""
        yield ""
        yield f"{'host':<{_COLUMN}}{host.name}: devices {numbers_text(devices)}{several}"
        yield from _figure_lines(host)


def _joints(cluster: Cluster) -> Iterator[tuple[str, Joint | Link]]:
    for joint in (*cluster.joints, *cluster.links):
        yield str(joint.kind), joint


def _places(joint: Joint | Link) -> str:
    if isinstance(joint, Link):
        shared = f", shared with all links of {joint.shared!r}" if joint.shared else ""
        return join_text(((joint.ends[0],), (joint.ends[1],))) + shared
    shown = [_short(join_text(join)) for join in joint.joins[:_MOST_JOINS]]
    more = len(joint.joins) - len(shown)
    if more:
        shown.append(f"and {more} more")
    return "  ".join(shown) + ("" if joint.is_duplex else ", one direction at a time")


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:28]}…{text[-8:]}"


def _figure_lines(struct: Host | Joint | Link) -> Iterator[str]:
    for name, figure in given_figures(struct):
        words = name.removesuffix("_bytes_per_s").removesuffix("_per_s")
        words = words.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")
        head = f"  {words:<18}{_shown(name, figure.value):>11}  "
        first, *rest = wrap(figure.source, _WIDTH - len(head)) or [""]
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
        ["X" if one == other else str(wiring.route(one, other).kind) for other in numbers]
        for one in numbers
    ]
    width = 2 + max(len(entry) for row in rows for entry in row)
    yield "links".ljust(_COLUMN) + "".join(f"{number:>{width}}" for number in numbers)
    for one, row in zip(numbers, rows, strict=True):
        yield f"{one:<{_COLUMN}}" + "".join(f"{entry:>{width}}" for entry in row)
