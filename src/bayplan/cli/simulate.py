"""`bayplan simulate`: replay a plan on a cluster, or a captured graph on a device."""

from pathlib import Path

from cyclopts import App

from bayplan.cli import options
from bayplan.cli.report_options import NO_REPORT, ReportOptions
from bayplan.data.errors import FileFault, UsageError

__all__ = ["app", "simulate"]

app = App(
    name="simulate",
    help_epilogue=options.unbroken("""\
Examples:
  bayplan simulate vgg16.plan.json --cluster dgx-a100 -o vgg16.record.json
  bayplan simulate vgg16.plan.json --cluster my.yaml --report vgg16.html
  bayplan simulate resnet50.graph.json --device h100 -o resnet50.record.json
  bayplan simulate resnet50.graph.json --profile resnet50.profile.json

A plan is replayed action by action on the devices and links of a cluster, which you need not have.
Its times are derived from their figures, and come with their uncertainty. `bayplan cluster` lists
the known clusters.

Exit code 0 if it fits, 3 if a device has too little memory, 5 if the cluster has too few devices or
the plan is for another step."""),
)


@app.default
def simulate(
    file: Path,
    /,
    *,
    cluster: str | None = None,
    target: str | None = None,
    profile: Path | None = None,
    device: str | None = None,
    output: options.Output = None,
    pictures: ReportOptions = NO_REPORT,
    json: options.Json = False,
) -> None:
    """Read a plan where a cluster is named, else a graph.

    Args:
        file: A plan by `bayplan plan`, or a graph by `bayplan capture`.
        cluster: For a plan: a cluster of the catalogue (dgx-a100, …), or its file (YAML).
        target: What a plan trains, if it names your own code.
        profile: For a graph: what its operators cost, by `bayplan profile`.
        device: For a graph without a profile: a device (h100, titan-v, …), or its file (YAML).
        output: Also write the result to this file.
    """
    from bayplan.data import files

    pictures.check()
    if cluster is None:
        if target is not None:
            raise UsageError("--target is about a plan; say where it would run with --cluster")
        from bayplan.data.graph import StepGraph
        from bayplan.data.profile import Profile

        graph = files.read(file, StepGraph)
        if not graph.nodes:
            raise FileFault(f"{file}: nodes is empty; there is no step to simulate")
        costs = None if profile is None else files.read(profile, Profile)
        from bayplan import api
        from bayplan.reporting.text import record_text

        record = pictures.told(api.simulate(graph, costs, device=device))
        return options.show(record, record_text(record), json=json, output=output)
    for name, given in (("--profile", profile), ("--device", device)):
        if given is not None:
            raise UsageError(f"{name} is about a graph on one device; leave it, or --cluster, out")
    from bayplan.costing.catalogue import read_cluster
    from bayplan.data.plan import Plan

    plan, described = files.read(file, Plan), read_cluster(cluster)
    options.check_output(output)
    from bayplan import api
    from bayplan.reporting.differences import simulation_text
    from bayplan.reporting.progress import ProgressBar

    with ProgressBar() as bar:
        record = api.simulate(plan, cluster=described, target=target, on_progress=bar)
    record = pictures.told(record)
    text = simulation_text(record, cluster=described.title or described.name)
    options.show(record, text, json=json, output=output)
