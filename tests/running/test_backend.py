"""The backend: it runs what a plan says, and refuses what cannot be run."""

import copy

import pytest
import torch
from msgspec import structs
from torch import nn

from bayplan import torch_compat as torch_compat
from bayplan.costing.pricing import free_prices, measured_prices
from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.plan import StepOrder, Swap
from bayplan.planning.memory.orders import as_planned, by_strategy
from bayplan.planning.memory.strategies import keep, swap
from bayplan.running.backend import steps_of
from bayplan.running.swaps.swapping import SwapKind, SwapStep
from bayplan.simulating.swaps import arrangement_of
from bayplan.step import TrainingStep
from bayplan.tracing.joint import LossMemory
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext

pytestmark = pytest.mark.usefixtures("own_planner_cache")
FREE = MemoryContext(prices=free_prices)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def step_of(model: nn.Module | None = None, num_samples: int = 4) -> TrainingStep:
    return TrainingStep(
        model=model or Net(), batch=torch.randn(num_samples, 8), loss_fn=lambda y: y.sum()
    )


@pytest.fixture
def order() -> StepOrder:
    return by_strategy("keep", keep())(trace_step(step_of(), FREE))


def test_plan_of_a_trace_runs(order, bind_to):
    backend = bind_to(step_of(), as_planned(order))
    assert backend.orders == [order]


@pytest.mark.parametrize(
    "other", [step_of(Net(width=9)), step_of(num_samples=5)], ids=["model", "batch size"]
)
def test_plan_of_another_step_is_refused(order, bind_to, other):
    with pytest.raises(ForeignPlan, match="for another step") as fault:
        bind_to(other, as_planned(order))
    assert order.program_fingerprint in str(fault.value)
    assert other.model._compiled_call_impl is None


EDITS = {
    "an op is missing": lambda order: {"schedule": order.schedule[:-1]},
    "wrong order": lambda order: {"schedule": order.schedule[::-1]},
    "an op that does not exist": lambda order: {"schedule": (*order.schedule, 999)},
    "a loss that runs twice": lambda order: {"schedule": (*order.schedule, 3)},
    "a swap of nothing": lambda order: {
        "swaps": (Swap(buffer=999, away_before=1, backs_before=(5,)),)
    },
    "a swap of an input": lambda order: {
        "swaps": (Swap(buffer=0, away_before=1, backs_before=(5,)),)
    },
    "an unknown pack": lambda order: {"packs": ("no_such_value",)},
}


@pytest.mark.parametrize("edit", EDITS)
def test_plan_edited_into_nonsense_is_refused(order, bind_to, edit):
    broken = structs.replace(order, **EDITS[edit](order))
    with pytest.raises(ForeignPlan, match="Plan this step anew"):
        bind_to(step_of(), as_planned(broken))


def test_loss_is_what_the_edit_above_repeats(order):
    program = trace_step(step_of(), FREE).with_packs().program
    assert program.ops[3].name == "loss"


def test_swaps_without_a_place_are_refused(bind_to):
    with pytest.raises(UsageError, match="say where to"):
        bind_to(step_of(), by_strategy("swap", swap()))


def test_steps_of_a_swap_come_in_order():
    traced = trace_step(step_of(), FREE)
    program = traced.with_packs().program
    order = by_strategy("swap", swap())(traced)
    assert order.swaps
    steps = steps_of(arrangement_of(order).apply(program))
    kinds = [step.what.kind for step in steps if isinstance(step.what, SwapStep)]
    assert kinds.count(SwapKind.OUT) == kinds.count(SwapKind.AWAY) == len(order.swaps)
    assert kinds.count(SwapKind.BACK) == kinds.count(SwapKind.HERE) >= len(order.swaps)
    ops = [step.what for step in steps if not isinstance(step.what, SwapStep)]
    assert ops == list(order.schedule)


def test_packed_variants_leave_the_graph_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    step = TrainingStep(
        model=model, batch=torch.randn(8, 3, 66, 66), loss_fn=lambda y: y.square().sum()
    )
    traced = trace_step(step, FREE)
    plain = traced.with_packs()
    before = copy.copy(plain.program)
    packed = traced.with_packs([pack.name for pack in traced.packs])
    assert packed.program.fingerprint != plain.program.fingerprint
    assert traced.with_packs() is plain
    assert traced.with_packs().program == before
    names = [pack.name for pack in traced.packs]
    assert traced.with_packs(reversed(names)) is packed


def test_memory_beside_the_graph_counts():
    context = MemoryContext(
        prices=free_prices,
        resident_bytes=1000,
        loss=LossMemory(peak_bytes=10_000),
        granularity_bytes=64,
    )
    program = trace_step(step_of(), context).with_packs().program
    assert program.resident_bytes == 1000
    assert program.ops[3].workspace_bytes == 10_000 - 4 * 8 * 4
    assert all(size % 64 == 0 for size in program.buffers)


def test_operators_are_priced_where_the_step_runs(planner_cache):
    seen = []

    def prices(device):
        seen.append(device)
        return measured_prices(device, cache=planner_cache)

    traced = trace_step(step_of(), MemoryContext(prices=prices))
    assert all(op.seconds > 0 for op in traced.with_packs().program.ops if op.name != "loss")
    assert seen == [torch.device("cpu")]


def test_trace_and_run_see_the_same_program(bind_to):
    """Else no plan made ahead could ever be run."""
    model = Net()
    traced = trace_step(step_of(model), FREE)
    backend = bind_to(step_of(model), by_strategy("keep", keep()))
    assert backend.orders[0].program_fingerprint == traced.with_packs().program.fingerprint


def test_backend_may_be_given_to_torch_compile(context):
    from bayplan.running.backend import PlannedBackend

    backend = PlannedBackend(by_strategy("keep", keep()), context)
    model = Net()
    x = torch.randn(4, 8)
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(x), model(x))
    assert len(backend.orders) == 1
    assert torch_compat.uncompiled(compiled) is model
