"""`bayplan cluster`: the clusters that are known, one of them, and new ones."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from bayplan.cli import options
from bayplan.data.errors import FileFault, UsageError

if TYPE_CHECKING:
    from bayplan.data.cluster_file import ClusterFile

__all__ = ["app", "cluster"]

app = App(
    name="cluster",
    # One line per paragraph: the terminal's width decides where to break it.
    help_epilogue="""\
Examples:
  bayplan cluster
  bayplan cluster titanv-8
  bayplan cluster 64xdgx-h100
  nvidia-smi topo -m | bayplan cluster --from-topo - --gpu titan-v -o my.yaml
  bayplan cluster --from-topo topo.txt --gpu a100 --hosts 4 -o my.yaml
  bayplan cluster --probe -o here.yaml

"""
    "A topology says which links exist, but not how fast they are; the figures of --from-topo are "
    "guesses by kind, and say so. Edit the file if you know better. --probe measures, and keeps "
    "the result as the cluster this-machine.",
)


ProbedOn = Annotated[
    str | None,
    Parameter(
        help="With --probe: the devices to measure: auto, cpu, cuda, cuda:1, xpu, …. Default: the"
        " accelerators if there are any, else the cores."
    ),
]


@app.default
def cluster(
    name: str | None = None,
    /,
    *,
    from_topo: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    gpu: str | None = None,
    hosts: options.Whole = 1,
    card_gbits: float = 100.0,
    probe: options.Flag = False,
    on: ProbedOn = None,
    output: options.Output = None,
    json: options.Json = False,
) -> None:
    """List the catalogue where no cluster is named, else show one and maybe write it.

    Args:
        name: A name of the catalogue, several as 4xdgx-a100, or a file. Default: list.
        from_topo: Make one from what nvidia-smi topo -m printed: a file, or - for the input.
        gpu: With --from-topo: the GPUs, like titan-v, or a device file (YAML).
        hosts: With --from-topo: how many such hosts.
        card_gbits: With --from-topo: Gbit/s of one network card of a host.
        probe: Measure this machine's devices and links.
        output: Write the cluster to this file (YAML, or JSON).
    """
    ways = [way for way in (name, from_topo, probe or None) if way is not None]
    if len(ways) > 1:
        raise UsageError("a name, --from-topo and --probe each say which cluster; give one of them")
    if from_topo is None and (gpu is not None or hosts != 1 or card_gbits != 100.0):
        raise UsageError("--gpu, --hosts and --card-gbits are for --from-topo")
    if on is not None and not probe:
        raise UsageError("--on says which devices of this machine --probe measures; add --probe")
    if not ways:
        if output is not None:
            raise UsageError(f"which cluster goes to {output}? Name one: bayplan cluster titanv-8")
        return _show_catalogue(json=json)
    options.check_output(output)
    from bayplan.costing.catalogue import expand, read_cluster_file
    from bayplan.data import files
    from bayplan.reporting.clusters import cluster_text

    if from_topo is not None:
        file = _from_topology(from_topo, gpu=gpu, hosts=hosts, card_gbits=card_gbits)
    elif name is not None:
        file = read_cluster_file(name)
    else:
        file = _probed(on)
    whole = expand(file, where=name or file.name)
    if output is not None:
        files.write_by_hand(output, file)
    options.show(whole, cluster_text(whole), json=json)


def _show_catalogue(*, json: bool) -> None:
    from bayplan.costing.catalogue import cluster_names, read_cluster
    from bayplan.reporting.clusters import clusters_text

    clusters = [read_cluster(name) for name in cluster_names()]
    rows = [
        {
            "name": cluster.name,
            "title": cluster.title,
            "num_devices": len(cluster.devices),
            "num_hosts": len(cluster.hosts),
            "kinds": list(cluster.kinds),
            "fingerprint": cluster.fingerprint,
        }
        for cluster in clusters
    ]
    options.show(rows, clusters_text(clusters), json=json)


def _from_topology(source: str, *, gpu: str | None, hosts: int, card_gbits: float) -> "ClusterFile":
    import msgspec

    from bayplan.costing.catalogue import device_names, load_device
    from bayplan.data.cluster import MOST_DEVICES
    from bayplan.data.topology import cluster_file_of, read_topology

    if gpu is None:
        raise UsageError(
            "a topology does not say what its GPUs are; add --gpu, like --gpu titan-v (`bayplan"
            " doctor` lists those that are known)"
        )
    if not 1 <= hosts <= MOST_DEVICES:
        raise UsageError(f"--hosts is {hosts}, must be from 1 to {MOST_DEVICES}")
    if not 0 < card_gbits < 1e6:
        raise UsageError(f"--card-gbits is {card_gbits}, must be more than 0, like 100")
    kind = load_device(gpu)
    is_stdin = source == "-"
    try:
        content = sys.stdin.buffer.read() if is_stdin else Path(source).read_bytes()
    except OSError as fault:
        raise FileFault(f"cannot read {source}: {fault.strerror}") from fault
    text = content.decode("utf-8", errors="replace")
    file = cluster_file_of(
        read_topology(text, name="the input" if is_stdin else source),
        device=kind.name,
        name="topology" if is_stdin else Path(source).stem,
        num_hosts=hosts,
        card_gbits_per_s=card_gbits,
    )
    if kind.name in device_names():
        return file
    return msgspec.structs.replace(file, kinds={kind.name: kind})


def _probed(on: str | None) -> "ClusterFile":
    from tempfile import TemporaryDirectory

    from bayplan.costing.probe import keep, probe_machine
    from bayplan.running.ranks.link_speeds import local_link_speeds

    # Whoever asks for a probe wants to know how it is now, so nothing kept is taken.
    with TemporaryDirectory(prefix="bayplan-") as folder:
        file = probe_machine(lambda: local_link_speeds(Path(folder)), on=on)
    keep(file)
    return file
