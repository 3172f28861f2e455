"""Every verb, as `import bayplan` offers it and as the command line calls it."""

from bayplan.api.plans import (
    check,
    judged,
    plan,
    plan_for_ranks,
    planned_step,
    planner_of,
    swap_space,
)
from bayplan.api.reports import explain, predicted_on_ranks, report, report_of_rank_plan
from bayplan.api.steps import capture, profile, scale, simulate
from bayplan.api.training import check_rank_run, fit, plan_of, record, run
from bayplan.reporting.differences import compare

__all__ = [
    "capture",
    "check",
    "check_rank_run",
    "compare",
    "explain",
    "fit",
    "judged",
    "plan",
    "plan_for_ranks",
    "plan_of",
    "planned_step",
    "planner_of",
    "predicted_on_ranks",
    "profile",
    "record",
    "report",
    "report_of_rank_plan",
    "run",
    "scale",
    "simulate",
    "swap_space",
]
