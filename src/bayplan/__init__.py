"""bayplan: know whether a training step fits, and how fast it is, before it runs.

The names below are imported on first use, so that `import bayplan.data` and the command line's
`--help` do not wait for torch.
"""

import random
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayplan.api import (
        capture,
        check,
        compare,
        explain,
        fit,
        plan,
        plan_of,
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
    from bayplan.running.ranks.pipelined import bind
    from bayplan.running.tuning.tuned import tune

    __version__: str

__all__ = [
    "BayplanError",
    "Cluster",
    "DoesNotFit",
    "Plan",
    "Profile",
    "RunRecord",
    "StepGraph",
    "Verdict",
    "__version__",
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
    "plan_of",
    "profile",
    "record",
    "report",
    "run",
    "scale",
    "simulate",
    "tune",
]

# Every other name is a verb of `bayplan.api`.
_HOMES = {
    "bayplan.data.cluster": ("Cluster",),
    "bayplan.data.errors": ("BayplanError", "DoesNotFit"),
    "bayplan.data.graph": ("StepGraph",),
    "bayplan.data.plan": ("Plan",),
    "bayplan.data.profile": ("Profile",),
    "bayplan.data.record": ("RunRecord",),
    "bayplan.data.verdict": ("Verdict",),
    "bayplan.running.collectives.data_parallel": ("data_parallel", "exchange_of", "no_sync"),
    "bayplan.running.ranks.pipelined": ("bind",),
    "bayplan.running.tuning.tuned": ("tune",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("bayplan")
    if name not in __all__:
        raise AttributeError(f"module 'bayplan' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "bayplan.api")
    drawn = random.getstate()
    try:
        return getattr(import_module(home), name)
    finally:
        random.setstate(drawn)  # rich draws a number when it is imported


def __dir__() -> list[str]:
    return sorted(__all__)
