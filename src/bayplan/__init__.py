"""bayplan: know whether a training step fits, and how fast it is, before it runs.

The names below are imported on first use, so that `import bayplan.data` and the command line's
`--help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayplan.api import capture, profile, record, scale, simulate
    from bayplan.data.cluster import Cluster
    from bayplan.data.errors import BayplanError, DoesNotFit
    from bayplan.data.graph import StepGraph
    from bayplan.data.plan import Plan
    from bayplan.data.profile import Profile
    from bayplan.data.record import RunRecord
    from bayplan.fitted import fit
    from bayplan.pipelined import bind
    from bayplan.replicated import data_parallel, exchange_of, no_sync
    from bayplan.tuned import tune

__all__ = [
    "BayplanError",
    "Cluster",
    "DoesNotFit",
    "Plan",
    "Profile",
    "RunRecord",
    "StepGraph",
    "bind",
    "capture",
    "data_parallel",
    "exchange_of",
    "fit",
    "no_sync",
    "profile",
    "record",
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
    "bind": "bayplan.pipelined",
    "capture": "bayplan.api",
    "data_parallel": "bayplan.replicated",
    "exchange_of": "bayplan.replicated",
    "no_sync": "bayplan.replicated",
    "fit": "bayplan.fitted",
    "profile": "bayplan.api",
    "record": "bayplan.api",
    "scale": "bayplan.api",
    "simulate": "bayplan.api",
    "tune": "bayplan.tuned",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'bayplan' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
