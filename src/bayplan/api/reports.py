"""Verbs that show: `report`, `explain`, and plans for ranks as records."""

from pathlib import Path

import msgspec

from bayplan.api.steps import simulate
from bayplan.data.cluster import Cluster
from bayplan.data.judgement import Why
from bayplan.data.placement import Placement
from bayplan.data.plan import DevicePlan, Plan, RankPlan
from bayplan.data.record import RunRecord
from bayplan.planning.pipelines.rank_records import predicted_on_ranks as replay_on_ranks
from bayplan.preparing.sources import step_of_plan
from bayplan.preparing.stages import PreparedStages
from bayplan.reporting.html import Report
from bayplan.reporting.plans import explanation_text
from bayplan.reporting.ranks import whole_pipeline_text
from bayplan.reporting.tables import alternatives_table
from bayplan.reporting.text import report_text
from bayplan.reporting.trace import write_trace
from bayplan.reporting.writing import write_report
from bayplan.running.ranks.link_speeds import local_link_speeds
from bayplan.simulating.checking import check_rank_plan
from bayplan.simulating.network import SpeedsNetwork

__all__ = ["explain", "predicted_on_ranks", "report", "report_of_rank_plan"]


def report(
    record: RunRecord,
    *,
    against: RunRecord | None = None,
    trace: Path | str | None = None,
    path: Path | str | None = None,
    svg: Path | str | None = None,
    csv: Path | str | None = None,
) -> str:
    """A record as text; with another one beside it, and how far they differ.

    Args:
        record: simulated or measured.
        against: another record of the same step.
        trace: a file for the timeline of the record's last step, which Chrome and Perfetto draw.
        path: a page with pictures: one HTML file that opens offline.
        svg: a folder for each picture as SVG.
        csv: a folder for each table as CSV.
    """
    if trace is not None:
        write_trace(trace, record)
    write_report(
        Report.of(record, *([] if against is None else [against])),
        page=None if path is None else Path(path),
        svg=None if svg is None else Path(svg),
        csv=None if csv is None else Path(csv),
    )
    return report_text(record, against)


def explain(plan: Plan) -> str:
    """What sets a plan's peak, what each of its choices costs, and what would help.

    Of a plan for many ranks: where each is, what it needs, and all it does.
    """
    if isinstance(plan, DevicePlan):
        return explanation_text(plan)
    return whole_pipeline_text(check_rank_plan(plan))


def predicted_on_ranks(made: RankPlan, target: str | None = None) -> RunRecord:
    """What a plan for ranks of this machine promises, moment by moment, by prices of here."""
    nodes = Placement.parse(made.placement).devices_per_node if made.placement else (1,)
    links = local_link_speeds() if len(nodes) == 1 else None
    network = None if links is None else SpeedsNetwork(links)
    return replay_on_ranks(made, PreparedStages.of(step_of_plan(made, target=target)), network)


def report_of_rank_plan(
    made: RankPlan,
    why: Why | None,
    *,
    cluster: str | Cluster | None = None,
    target: str | None = None,
    command: str = "",
) -> Report:
    """What a page about a plan for ranks is made of, here or on a cluster."""
    if cluster is None:
        record = predicted_on_ranks(made, target)
    else:
        record = simulate(made, cluster=cluster, target=target)
    tables = () if why is None else (alternatives_table(why),)
    return Report.of(msgspec.structs.replace(record, command=command), why=why, tables=tables)
