"""Plans for whole clusters: which layers on which devices, and how a batch passes them."""

from bayplan.planning.clusters.split import Split

__all__ = ["Split"]
