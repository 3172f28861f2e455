"""The ways known to make a step fit, ours among them, to be run and compared alike."""

from bayplan.planning.strategies.auto import auto
from bayplan.planning.strategies.checkpoint import checkpoint
from bayplan.planning.strategies.keep import Strategy, keep
from bayplan.planning.strategies.ome import ome
from bayplan.planning.strategies.swap import swap

__all__ = ["Strategy", "auto", "checkpoint", "keep", "ome", "swap"]
