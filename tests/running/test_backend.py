"""The backend: it runs what a plan says, and refuses what cannot be run."""

import copy
from contextlib import nullcontext

import pytest
import torch
from msgspec import structs
from torch import nn

import bayplan
from bayplan import torch_compat as torch_compat
from bayplan import torch_joint
from bayplan.costing.pricing import free_prices, measured_prices
from bayplan.data.errors import CaptureError, ForeignPlan, UsageError
from bayplan.data.plan import StepOrder, Swap
from bayplan.planning.memory.orders import as_planned, by_strategy
from bayplan.planning.memory.strategies import keep, swap
from bayplan.rewriting.free import convolution_input_gradient
from bayplan.running.backend import halves_by, steps_of
from bayplan.running.swaps.swapping import SwapKind, SwapStep
from bayplan.simulating.schedule import replay_schedule
from bayplan.simulating.swaps import apply_order, arrangement_of
from bayplan.step import TrainingStep
from bayplan.tracing.joint import LossMemory
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext

pytestmark = pytest.mark.usefixtures("own_planner_cache")
aten = torch.ops.aten
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
    joint = traced.with_packs()
    order = by_strategy("swap", swap())(traced)
    assert order.swaps
    steps = steps_of(arrangement_of(order).apply(joint.program), joint)
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


class Filling(nn.Module):
    """Fills by a tensor that is not trained, behind which tracing once lost all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).masked_fill(x > 0, torch.zeros(())).softmax(-1).square().sum()


def test_gradient_behind_a_fill_by_a_tensor_is_kept():
    x, found = torch.randn(16, 8), []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Filling()
        if is_planned:
            bayplan.fit(model, x, memory="1GiB", progress=False)
        model(x).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_plan_that_would_lose_a_gradient_is_refused(monkeypatch):
    """Whatever torch loses while it traces: the plain step has said who is trained."""

    def fill_detached(operator, tensor, mask, value):
        return torch.where(mask, 0.0, tensor.detach())

    monkeypatch.setattr(torch_joint, "call_without_rules", fill_detached)

    class Beside(Filling):
        def forward(self, x):
            return super().forward(x) + self.layer.bias.sum()

    with pytest.raises(CaptureError, match=r"layer\.weight of Beside gets a gradient in plain"):
        bayplan.fit(Beside(), torch.randn(16, 8), memory="1GiB", progress=False)


def test_gradients_that_only_an_attribute_would_give_are_told():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.gate, self.left = nn.Linear(8, 8), nn.Linear(8, 3), None

        def forward(self, x):
            self.left = self.gate(x).softmax(-1)
            return self.layer(x).square().mean()

    with pytest.warns(UserWarning, match=r"gate\.bias \(and 1 more\) of Leaving gets a gradient"):
        bayplan.fit(Leaving(), torch.randn(16, 8), memory="1GiB", progress=False)


class Spectrum(nn.Module):
    """Multiplies complex numbers, in place or not; the kernels have other last bits."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.weight, self.in_place = nn.Parameter(torch.randn(13, 32, 2)), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum, weight = torch.fft.rfft(x, dim=1), torch.view_as_complex(self.weight)
        if self.in_place:
            spectrum[:, 1:] *= weight[1:]
            spectrum *= 0.5j
        else:
            spectrum = spectrum * weight
        return torch.fft.irfft(spectrum, n=24, dim=1)


@pytest.mark.parametrize("in_place", [True, False])
def test_complex_numbers_are_changed_in_place_where_plain_training_does_so(in_place):
    x, found = torch.randn(16, 24, 32), []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Spectrum(in_place) for _ in range(4)))
        if is_planned:
            bayplan.fit(model, x, lambda y: y.square().mean(), memory="70%", progress=False)
            assert bayplan.plan_of(model).decisions, "else nothing could be changed in place"
        output = model(x)
        output.square().mean().backward()
        found.append([output, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


def convolutions() -> TrainingStep:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 64, 3))
    batch = torch.randn(2, 3, 20, 20, requires_grad=True)
    return TrainingStep(model=model, batch=batch, loss_fn=lambda y: y.square().sum())


@pytest.mark.parametrize(
    ("workspace_bytes", "at_peak"), [(0, 4), (10**9, 8)], ids=["no scratch memory", "much"]
)
def test_gradients_of_a_convolution_are_one_call_where_that_keeps_within_the_peak(
    workspace_bytes, at_peak
):
    """Three pairs, ops 4 to 9: the one where backward is at its peak stays two.

    That is the last convolution's, which makes most; or the first's, if its kernel needs much.
    """
    split = aten.convolution_backward.default

    def price(node):
        is_first = node.target is split and node.args[1].op == "placeholder"
        return 1.0, workspace_bytes if is_first else 0

    traced = trace_step(convolutions(), MemoryContext(prices=lambda _: nullcontext(price)))
    joint = traced.with_packs()
    order, program = by_strategy("keep", keep())(traced), joint.program
    replay = replay_schedule(program, order.schedule)
    joined = [step for step in steps_of(apply_order(order, program), joint) if step.joined]
    assert replay.peak_step in (at_peak, at_peak + 1)
    assert [(each.what, each.joined) for each in joined] == [
        (first, first + 1) for first in (4, 6, 8) if first != at_peak
    ]
    _, backward = halves_by(order, traced, None)
    targets = [node.target for node in backward.graph.nodes]
    assert targets.count(convolution_input_gradient) == 1
    assert targets.count(split) == 3


def test_gradients_of_a_convolution_are_two_calls_where_scratch_memory_is_not_known():
    """A plan of a file ran above its limit: the step is not priced, so its peak looked lower."""
    traced = trace_step(convolutions(), FREE)
    joint = traced.with_packs()
    order = by_strategy("keep", keep())(traced)
    assert not any(step.joined for step in steps_of(apply_order(order, joint.program), joint))
