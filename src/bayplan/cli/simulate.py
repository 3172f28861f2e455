"""`bayplan simulate`: replay a plan on a cluster, or a captured graph on a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.cli.options import Json, Output, as_json, check_output
from bayplan.data import files
from bayplan.data.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from bayplan.data.record import RunRecord

__all__ = ["simulate"]


@app.command(
    sort_key=4,
    help_epilogue="""\
Examples:
  bayplan simulate vgg16.plan.json --cluster dgx-a100 -o vgg16.record.json
  bayplan simulate vgg16.plan.json --cluster my.yaml
  bayplan simulate resnet50.graph.json --device h100 -o resnet50.record.json
  bayplan simulate resnet50.graph.json --profile resnet50.profile.json

A plan is replayed action by action on the devices and links of a cluster, which need not be here:
its times are derived from their figures, and come with how far they may be off. `bayplan cluster`
lists the clusters that are known.

Exit code 0 if it fits, 3 if a device has too little memory, 5 if the cluster has too few devices or
the plan is for another step.""",
)
def simulate(
    file: Annotated[
        Path, Parameter(help="A plan by `bayplan plan`, or a graph by `bayplan capture`.")
    ],
    /,
    *,
    cluster: Annotated[
        str | None,
        Parameter(help="For a plan: a cluster of the catalogue (dgx-a100, …), or its file (YAML)."),
    ] = None,
    target: Annotated[
        str | None, Parameter(help="What a plan trains, where it names code of your own.")
    ] = None,
    profile: Annotated[
        Path | None, Parameter(help="For a graph: what its operators cost, by `bayplan profile`.")
    ] = None,
    device: Annotated[
        str | None,
        Parameter(
            help="For a graph without a profile: a device of the catalogue (h100, titan-v, …) or a"
            " device file (YAML)."
        ),
    ] = None,
    output: Output = None,
    json: Json = False,
) -> int:
    """Replay a plan on a cluster, or a captured graph with a profile or on a device."""
    if cluster is None:
        if target is not None:
            raise UsageError("--target is about a plan; say where it would run with --cluster")
        return _simulate_graph(file, profile=profile, device=device, output=output, json=json)
    for name, given in (("--profile", profile), ("--device", device)):
        if given is not None:
            raise UsageError(f"{name} is about a graph on one device; leave it, or --cluster, out")
    from bayplan.costing.catalogue import read_cluster
    from bayplan.data.plan import Plan

    plan, described = files.read(file, Plan), read_cluster(cluster)
    check_output(output)
    from bayplan import api
    from bayplan.reporting.differences import simulation_text
    from bayplan.reporting.progress import ProgressBar

    with ProgressBar() as bar:
        record = api.simulate(plan, cluster=described, target=target, on_progress=bar)
    text = simulation_text(record, cluster=described.title or described.name)
    _tell(record, text, output=output, json=json)
    return ExitCode.DONE


def _simulate_graph(
    graph: Path, *, profile: Path | None, device: str | None, output: Path | None, json: bool
) -> int:
    from bayplan.data.errors import FileFault
    from bayplan.data.graph import StepGraph
    from bayplan.data.profile import Profile

    step = files.read(graph, StepGraph)
    if not step.nodes:
        raise FileFault(f"{graph}: nodes is empty; there is no step to simulate")
    costs = None if profile is None else files.read(profile, Profile)
    from bayplan.api import simulate as replay
    from bayplan.reporting.text import record_text

    record = replay(step, costs, device=device)
    _tell(record, record_text(record), output=output, json=json)
    return ExitCode.DONE


def _tell(record: "RunRecord", text: str, *, output: Path | None, json: bool) -> None:
    if output is not None:
        files.write(output, record)
    print(as_json(record) if json else text)
