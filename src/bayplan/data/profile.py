"""`Profile`: what each node of one step costs on one kind of device, in seconds and bytes."""

import math
from enum import StrEnum

from bayplan.data.errors import CheckedStruct, ForeignPlan, UsageError, did_you_mean
from bayplan.data.graph import StepGraph

__all__ = ["BUSY_SPREAD", "Clock", "Origin", "Profile"]

# Times whose repeats differ by more, as a share of them all, were measured on a busy machine.
BUSY_SPREAD = 0.1


class Origin(StrEnum):
    """Where a profile's figures come from."""

    MEASURED = "measured"  # this very step ran on the device
    SCALED = "scaled"  # measured at another batch size and carried over by work done
    DERIVED = "derived"  # a roofline over a device description; nothing ran


class Clock(StrEnum):
    """Which clock the seconds are of."""

    WALL = "wall"
    CPU = "cpu"  # processor time of the calling thread; ignores noisy neighbours

    @classmethod
    def parse(cls, text: "str | Clock") -> "Clock":
        names = [str(clock) for clock in cls]
        if text not in names:
            raise UsageError(f"no clock {str(text)!r}; {did_you_mean(str(text), names)}")
        return cls(text)


class Profile(CheckedStruct, frozen=True, kw_only=True):
    """Costs per node, in the node order of the graph with this fingerprint.

    Attributes:
        model: the graph's model.
        fingerprint: the graph's; a profile of another step is refused (exit code 5).
        device: `cpu`, a CUDA device's name, or the name in a device file.
        origin: `measured`, `scaled` (from another batch size) or `derived` (from a device file).
        clock: `wall`, or `cpu`: processor time of one thread.
        threads: torch's threads.
        repeats: steps timed; 0 if nothing ran.
        versions: bayplan, torch, python, system, processor, cores, threads.
        seconds: s, per node.
        spread_seconds: s, per node: median less fastest repeat; derived: 30 %.
        workspace_bytes: bytes, per node: scratch memory while it runs.
        method: how workspace was measured: `malloc`, `cuda-allocator`, or `storages`, which misses
            it; empty if nothing ran.
        overhead_seconds: s per step that belongs to no node.
        step_spread_seconds: s: uncertainty of the whole step.
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
    method: str = ""
    overhead_seconds: float = 0.0
    step_spread_seconds: float = 0.0

    def __post_init__(self) -> None:
        lengths = [*map(len, (self.seconds, self.spread_seconds, self.workspace_bytes))]
        if len(set(lengths)) != 1:
            raise ValueError(f"columns of different lengths: {lengths}")
        super().__post_init__()

    @property
    def spread_share(self) -> float:
        """How far nodes' repeats differ, as a share of their time."""
        total = math.fsum(self.seconds)
        return math.fsum(self.spread_seconds) / total if total else 0.0

    @property
    def step_seconds(self) -> float:
        return math.fsum(self.seconds) + self.overhead_seconds

    def check_belongs_to(self, graph: StepGraph) -> None:
        if self.fingerprint != graph.fingerprint or len(self.seconds) != len(graph.nodes):
            raise ForeignPlan(
                f"the profile is of {self.model!r} ({len(self.seconds)} nodes, fingerprint"
                f" {self.fingerprint}), the step is {graph.model!r} ({len(graph.nodes)} nodes,"
                f" fingerprint {graph.fingerprint}); make a new one with `bayplan profile`"
            )
