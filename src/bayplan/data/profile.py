"""`Profile`: what each node of one step costs on one kind of device, in seconds and bytes."""

import math
from enum import StrEnum

import msgspec

from bayplan.data.errors import ForeignPlan
from bayplan.data.graph import StepGraph

__all__ = ["Clock", "Origin", "Profile"]


class Origin(StrEnum):
    """Where a profile's figures come from."""

    MEASURED = "measured"  # this very step ran on the device
    SCALED = "scaled"  # measured at another batch size and carried over by work done
    DERIVED = "derived"  # a roofline over a device description; nothing ran


class Clock(StrEnum):
    """Which clock the seconds are of."""

    WALL = "wall"
    CPU = "cpu"  # processor time of the calling thread; ignores noisy neighbours


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs per node, in the node order of the graph with this fingerprint.

    Attributes:
        seconds: time of each node; spread_seconds: the gap from its fastest to its median repeat.
        workspace_bytes: memory a node holds only while it runs, beyond its outputs.
        overhead_seconds: time of a whole step that belongs to no node (Python, autograd engine).
        step_spread_seconds: the gap from the fastest to the median whole step.
        repeats: how many steps were timed; 0 where nothing ran.
    """

    schema: str = "bayplan/profile"
    version: int = 1
    model: str
    fingerprint: str
    device: str
    origin: Origin
    clock: Clock = Clock.WALL
    threads: int = 1
    repeats: int = 0
    versions: dict[str, str] = {}
    seconds: tuple[float, ...]
    spread_seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    overhead_seconds: float = 0.0
    step_spread_seconds: float = 0.0

    def __post_init__(self) -> None:
        columns = (self.seconds, self.spread_seconds, self.workspace_bytes)
        lengths = [len(column) for column in columns]
        if len(set(lengths)) != 1:
            raise ValueError(f"columns of different lengths: {lengths}")
        for name, column in zip(("seconds", "spread_seconds"), columns, strict=False):
            for index, figure in enumerate(column):
                if not (math.isfinite(figure) and figure >= 0):
                    raise ValueError(f"{name}[{index}] is {figure}, must be 0 or more")
        if any(figure < 0 for figure in self.workspace_bytes):
            raise ValueError("workspace_bytes has a negative entry")
        for name in ("overhead_seconds", "step_spread_seconds"):
            figure = getattr(self, name)
            if not (math.isfinite(figure) and figure >= 0):
                raise ValueError(f"{name} is {figure}, must be 0 or more")

    @property
    def step_seconds(self) -> float:
        """Predicted time of one whole step."""
        return math.fsum(self.seconds) + self.overhead_seconds

    def check_belongs_to(self, graph: StepGraph) -> None:
        """Refuse to price a graph with the profile of another one."""
        if self.fingerprint != graph.fingerprint or len(self.seconds) != len(graph.nodes):
            raise ForeignPlan(
                f"the profile is of {self.model!r} ({len(self.seconds)} nodes, fingerprint"
                f" {self.fingerprint}), the step is {graph.model!r} ({len(graph.nodes)} nodes,"
                f" fingerprint {graph.fingerprint}); make a new one with `bayplan profile`"
            )
