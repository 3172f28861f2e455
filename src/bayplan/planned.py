"""A `torch.compile` backend that runs each training step as planned.

torch traces forward and backward into one graph; the backend rewrites it where that is free, prices
its operators, chooses a schedule, and cuts it into the two graphs that torch then runs for forward
and backward. Everything else (guards, buffers, autograd, autocast, evaluation) stays torch's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from bayplan import torch_private
from bayplan.data.limit import Limit
from bayplan.data.profile import Clock
from bayplan.data.program import Program
from bayplan.devices.meters import open_meter
from bayplan.planning.schedule import Replay, check_schedule, plain_schedule, replay_schedule
from bayplan.planning.search import Planned, plan_schedule
from bayplan.profiling.measure import clock_function
from bayplan.profiling.signatures import OperatorCosts
from bayplan.running.executor import compile_graph
from bayplan.running.joint import JointStep, analyse_joint
from bayplan.running.partition import cut
from bayplan.running.rewrites import free_rewrites

__all__ = ["GraphPlan", "PlannedBackend", "Strategy", "within"]

Strategy = Callable[[Program], Sequence[int]]  # from a step to the order of its operators


@dataclass(frozen=True)
class GraphPlan:
    """What was decided for one traced graph."""

    program: Program
    schedule: tuple[int, ...]
    replay: Replay
    plain: Replay


def within(
    limit: Limit,
    *,
    cache: Path | None = None,
    time_limit_seconds: float = 10.0,
    plain_peak_bytes: int | None = None,
    on_planned: Callable[[Planned], None] = lambda planned: None,
) -> Strategy:
    """Our own strategy: the fastest schedule found within a memory limit.

    Args:
        limit: bytes, or a share of the plain step's peak.
        cache: where the planner's compiled inner loop is kept.
        time_limit_seconds: for the search.
        plain_peak_bytes: what a share is taken of; the peak of the rewritten step by default.
        on_planned: hears of the plan found.
    """

    def choose(program: Program) -> Sequence[int]:
        plain = replay_schedule(program, plain_schedule(program))
        limit_bytes = limit.of(plain_peak_bytes or plain.peak_bytes)
        if plain.peak_bytes <= limit_bytes:
            return plain_schedule(program)
        planned = plan_schedule(
            program, limit_bytes, time_limit_seconds=time_limit_seconds, cache_dir=cache
        )
        on_planned(planned)
        return planned.schedule

    return choose


@dataclass
class PlannedBackend:
    """The backend: give it to `torch.compile`, or to a module's own `compile`.

    Attributes:
        strategy: chooses each graph's schedule.
        cache: where compiled helpers are kept.
        resident_bytes: memory beside the graph's inputs, such as the optimizer's state.
        clock: for pricing operators.
        plans: one for each graph planned so far; a changed batch size makes a new one.
    """

    strategy: Strategy
    cache: Path
    resident_bytes: int = 0
    clock: Clock = Clock.WALL
    plans: list[GraphPlan] = field(default_factory=list)
    _costs: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph, as torch asks a backend to."""
        return torch_private.compile_joint(
            module, inputs, partition=self._partition, compile_graph=_compile
        )

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Torch's question which part of a joint graph is forward and what it hands on."""
        step = self._analyse(joint, num_fwd_outputs)
        schedule = tuple(self.strategy(step.program))
        check_schedule(step.program, schedule)
        replay = replay_schedule(step.program, schedule)
        plain = replay_schedule(step.program, plain_schedule(step.program))
        self.plans.append(GraphPlan(step.program, schedule, replay, plain))
        return cut(step, schedule, replay.taken_over, joint)

    def _analyse(self, joint: fx.GraphModule, num_forward_outputs: int) -> JointStep:
        free_rewrites(joint.graph)
        device = _device_of(joint)
        with torch_private.outside_tracing(), open_meter(device, self.cache) as meter:
            costs = OperatorCosts(meter, clock_function(self.clock, device), self._costs)
            return analyse_joint(
                joint,
                num_forward_outputs=num_forward_outputs,
                cost_of=costs,
                resident_bytes=self.resident_bytes,
            )


def _compile(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return compile_graph(module)


def _device_of(joint: fx.GraphModule) -> torch.device:
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")
