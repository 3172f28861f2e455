"""bayplan: know whether a training step fits, and how fast it is, before it runs.

The names below are imported on first use, so that `import bayplan.data` and the command line's
`--help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayplan.api import (
        capture,
        check,
        compare,
        explain,
        plan,
        profile,
        record,
        report,
        run,
        scale,
        simulate,
    )
    from bayplan.data.cluster import Cluster
    from bayplan.data.errors import BayplanError, DoesNotFit
    from bayplan.data.graph import StepGraph
    from bayplan.data.plan import Plan
    from bayplan.data.profile import Profile
    from bayplan.data.record import RunRecord
    from bayplan.data.verdict import Verdict
    from bayplan.running.collectives.data_parallel import data_parallel, exchange_of, no_sync
    from bayplan.running.fitted import fit
    from bayplan.running.ranks.pipelined import bind
    from bayplan.running.tuning.tuned import tune

__all__ = [
    "BayplanError",
    "Cluster",
    "DoesNotFit",
    "Plan",
    "Profile",
    "RunRecord",
    "StepGraph",
    "Verdict",
    "bind",
    "capture",
    "check",
    "compare",
    "data_parallel",
    "exchange_of",
    "explain",
    "fit",
    "no_sync",
    "plan",
    "profile",
    "record",
    "report",
    "run",
    "scale",
    "simulate",
    "tune",
]

_HOME_OF = {
    "BayplanError": "bayplan.data.errors",
    "Cluster": "bayplan.data.cluster",
    "DoesNotFit": "bayplan.data.errors",
    "Plan": "bayplan.data.plan",
    "Profile": "bayplan.data.profile",
    "RunRecord": "bayplan.data.record",
    "StepGraph": "bayplan.data.graph",
    "Verdict": "bayplan.data.verdict",
    "bind": "bayplan.running.ranks.pipelined",
    "capture": "bayplan.api",
    "check": "bayplan.api",
    "compare": "bayplan.api",
    "data_parallel": "bayplan.running.collectives.data_parallel",
    "exchange_of": "bayplan.running.collectives.data_parallel",
    "explain": "bayplan.api",
    "fit": "bayplan.running.fitted",
    "no_sync": "bayplan.running.collectives.data_parallel",
    "plan": "bayplan.api",
    "profile": "bayplan.api",
    "record": "bayplan.api",
    "report": "bayplan.api",
    "run": "bayplan.api",
    "scale": "bayplan.api",
    "simulate": "bayplan.api",
    "tune": "bayplan.running.tuning.tuned",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'bayplan' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
