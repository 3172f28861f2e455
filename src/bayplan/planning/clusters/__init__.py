"""Plans for whole clusters: which layers on which devices, and how a batch passes them."""

from bayplan.planning.clusters.judging import judge, split_memory
from bayplan.planning.clusters.planner import Candidate, ClusterPlan, plan_cluster, plan_on
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.training import DeviceMemory, Training
from bayplan.planning.clusters.why import explain

__all__ = [
    "Candidate",
    "ClusterPlan",
    "DeviceMemory",
    "Split",
    "Training",
    "explain",
    "judge",
    "plan_cluster",
    "plan_on",
    "split_memory",
]
