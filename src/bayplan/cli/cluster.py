"""The command about clusters: those that are known, one of them, and new ones."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.cli.options import Json, as_json, check_output
from bayplan.data import files
from bayplan.data.errors import ExitCode, FileFault, UsageError

if TYPE_CHECKING:
    from bayplan.data.cluster_file import ClusterFile

__all__ = ["cluster"]


# One line per paragraph: the terminal's width decides where to break it.
_ABOUT = (
    "A topology says which links there are and not how fast; the figures of --from-topo are guesses"
    " by kind, and say so. Edit the file where you know better. --probe measures; what it found is"
    " kept and is a cluster of its own, this-machine."
)


@app.command(
    sort_key=8.5,
    help_epilogue=f"""\
Examples:
  bayplan cluster
  bayplan cluster titanv-8
  bayplan cluster 64xdgx-h100
  nvidia-smi topo -m | bayplan cluster --from-topo - --gpu titan-v -o my.yaml
  bayplan cluster --from-topo topo.txt --gpu a100 --hosts 4 -o my.yaml
  bayplan cluster --probe -o here.yaml

{_ABOUT}""",
)
def cluster(
    name: Annotated[
        str | None,
        Parameter(help="A name of the catalogue, several as 4xdgx-a100, or a file. Default: list."),
    ] = None,
    /,
    *,
    from_topo: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,
            help="Make one from what nvidia-smi topo -m printed: a file, or - for the input.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        Parameter(help="With --from-topo: the GPUs, like titan-v, or a device file (YAML)."),
    ] = None,
    hosts: Annotated[int, Parameter(help="With --from-topo: how many such hosts.")] = 1,
    card_gbits: Annotated[
        float, Parameter(help="With --from-topo: Gbit/s of one network card of a host.")
    ] = 100.0,
    probe: Annotated[
        bool, Parameter(negative="", help="Measure this machine's devices and links.")
    ] = False,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="Write the cluster to this file (YAML, or JSON)."),
    ] = None,
    json: Json = False,
) -> int:
    """List the clusters that are known, show one, or make one from this machine or a topology."""
    ways = [way for way in (name, from_topo, probe or None) if way is not None]
    if len(ways) > 1:
        raise UsageError("a name, --from-topo and --probe each say which cluster; give one of them")
    if from_topo is None and (gpu is not None or hosts != 1 or card_gbits != 100.0):
        raise UsageError("--gpu, --hosts and --card-gbits are for --from-topo")
    if not ways:
        if output is not None:
            raise UsageError(f"which cluster goes to {output}? Name one: bayplan cluster titanv-8")
        _print_catalogue(json=json)
        return ExitCode.DONE
    check_output(output)
    from bayplan.costing.catalogue import expand, read_cluster_file

    if from_topo is not None:
        file = _from_topology(from_topo, gpu=gpu, hosts=hosts, card_gbits=card_gbits)
    elif probe:
        file = _probed()
    else:
        assert name is not None, "one way is given"
        file = read_cluster_file(name)
    whole = expand(file, where=name or file.name)
    if output is not None:
        files.write_by_hand(output, file)
    if json:
        print(as_json(whole))
    else:
        from bayplan.reporting.clusters import cluster_text

        print(cluster_text(whole))
    return ExitCode.DONE


def _print_catalogue(*, json: bool) -> None:
    from bayplan.costing.catalogue import cluster_names, read_cluster
    from bayplan.reporting.clusters import clusters_text

    clusters = [read_cluster(name) for name in cluster_names()]
    if not json:
        print(clusters_text(clusters))
        return
    rows = [
        {
            "name": one.name,
            "title": one.title,
            "num_devices": len(one.devices),
            "num_hosts": len(one.hosts),
            "kinds": list(one.kinds),
            "fingerprint": one.fingerprint,
        }
        for one in clusters
    ]
    print(as_json(rows))


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
    text, where = _text_of(source)
    name = "topology" if source == "-" else Path(source).stem
    file = cluster_file_of(
        read_topology(text, name=where),
        device=kind.name,
        name=name,
        num_hosts=hosts,
        card_gbits_per_s=card_gbits,
    )
    if kind.name in device_names():
        return file
    return msgspec.structs.replace(file, kinds={kind.name: kind})


def _text_of(source: str) -> tuple[str, str]:
    """The text, and what an error calls it."""
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as fault:
        raise FileFault(f"cannot read {source}: {fault.strerror}") from fault
    return content.decode("utf-8", errors="replace"), "the input" if source == "-" else source


def _probed() -> "ClusterFile":
    from bayplan.costing.probe import keep, probe_machine
    from bayplan.running.ranks.link_speeds import local_link_speeds

    # Whoever asks for a probe wants to know how it is now, so nothing kept is taken.
    with TemporaryDirectory(prefix="bayplan-") as folder:
        file = probe_machine(lambda: local_link_speeds(Path(folder)))
    keep(file)
    return file
