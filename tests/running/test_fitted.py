"""`bayplan.fit`: the same module in every loop people write, and clear words where it cannot be."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing.loss_memory import loss_memory
from bayplan.data.errors import CaptureError, DoesNotFit, UsageError
from bayplan.data.units import Limit
from bayplan.devices.device import HOST
from bayplan.devices.meters import resident_tensor_bytes
from bayplan.models.gpt import GptConfig
from bayplan.models.llama import LlamaConfig
from bayplan.models.registry import load
from bayplan.planning.memory.orders import FastestWithin, by_strategy
from bayplan.planning.memory.strategies import keep, swap
from bayplan.running.fitted import bind
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.swaps import Tier
from bayplan.step import TrainingStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + x


def total(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.fixture
def assert_same_loop(bind_to, repeat_everything, model_state) -> Callable[..., Any]:
    """A loop over a model leaves the same numbers, plain and with everything repeated."""

    def check(
        loop: Callable[[nn.Module], Any], build: Callable[[], nn.Module] = Net, batch: Any = None
    ):
        found, backends = [], []
        for is_planned in (False, True):
            torch.manual_seed(0)
            model = build()
            if is_planned:
                step = TrainingStep(
                    model=model,
                    batch=torch.ones(8, 16) if batch is None else batch,
                    loss_fn=lambda output: total(output),
                )
                backends.append(bind_to(step, by_strategy("all", repeat_everything)))
            torch.manual_seed(1)
            found.append((loop(model), model_state(model)))
        (plain, plain_state), (planned, planned_state) = found
        assert plain_state == planned_state
        assert plain == planned
        return backends[0]

    return check


def inputs(num_samples: int = 8) -> torch.Tensor:
    return torch.randn(num_samples, 16)


def test_gradients_accumulate(assert_same_loop):
    def loop(model):
        for _ in range(3):
            (total(model(inputs())) / 3).backward()

    assert_same_loop(loop)


def test_evaluation_between_steps(assert_same_loop):
    def loop(model):
        seen = []
        for _ in range(2):
            total(model(inputs())).backward()
            with torch.no_grad():
                seen.append(model(inputs()).sum().item())  # in training mode
                model.eval()
                seen.append(model(inputs()).sum().item())
                model.train()
        return seen

    assert_same_loop(loop)


def test_training_in_evaluation_mode(assert_same_loop):
    def loop(model):
        model.eval()
        total(model(inputs())).backward()
        return bool(model.layers[1].num_batches_tracked)

    assert len(assert_same_loop(loop).orders) == 2


def test_other_batch_sizes_are_planned_when_they_come(assert_same_loop):
    def loop(model):
        for num_samples in (8, 5, 8, 5):
            total(model(inputs(num_samples))).backward()

    assert len(assert_same_loop(loop).orders) == 2


def test_many_batch_sizes(bind_to):
    model = nn.Linear(4, 4)
    step = TrainingStep(model=model, batch=torch.ones(2, 4), loss_fn=lambda y: total(y))
    backend = bind_to(step, by_strategy("keep", keep()))
    for num_samples in range(3, 14):  # torch itself stops at the ninth
        model(torch.ones(num_samples, 4)).sum().backward()
    assert len(backend.orders) == 12


def test_two_forwards_before_their_backwards(assert_same_loop):
    def loop(model):
        first, second = model(inputs()), model(inputs())
        (total(first) + total(second)).backward()

    assert_same_loop(loop)


def test_second_backward_through_the_same_forward(assert_same_loop):
    def loop(model):
        loss = total(model(inputs()))
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same_loop(loop)


def test_frozen_parameters_stay(assert_same_loop):
    def build():
        model = Net()
        model.layers[0].requires_grad_(False)
        return model

    def loop(model):
        total(model(inputs())).backward()
        return model.layers[0].weight.grad is None

    assert_same_loop(loop, build)


def test_buffers_that_forward_reads_and_changes(assert_same_loop):
    """Power iteration goes on with every forward, and backward must not see the new vectors."""

    def loop(model):
        for _ in range(3):
            total(model(inputs())).backward()

    def build():
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.GELU(), Net()
        )

    assert_same_loop(loop, build)


class Branching(nn.Module):
    """Forward depends on a number of the model's, as a schedule of the user's may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.epoch = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).tanh() if self.epoch < 1 else self.other(self.one(x).tanh()).tanh()


def test_forward_that_changes_is_planned_anew(assert_same_loop):
    def loop(model):
        for model.epoch in range(2):
            total(model(inputs())).backward()

    first, second = assert_same_loop(loop, Branching).orders
    assert len(second.schedule) > len(first.schedule)


class Several(nn.Module):
    """Several inputs and outputs, by name, with weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = (self.table(tokens) * scale).tanh()
        return {"hidden": hidden, "logits": self.head(hidden)}


def test_several_inputs_and_outputs_by_name(bind_to, repeat_everything, model_state):
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Several()
        batch = {"tokens": torch.randint(11, (4, 5)), "scale": torch.rand(1)}

        def loss_fn(output):
            return output["logits"].square().mean() + output["hidden"].sum()

        if is_planned:
            step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn)
            bind_to(step, by_strategy("all", repeat_everything))
        for _ in range(2):
            loss_fn(model(**batch)).backward()
        found.append(model_state(model))
    assert found[0] == found[1]


def test_model_stays_the_same_module():
    model = Net()
    before = [*model.state_dict()]
    assert bayplan.fit(model, inputs(), total, memory="100%") is model
    assert [*model.state_dict()] == before


def test_planning_leaves_buffers_and_random_numbers(model_state):
    torch.manual_seed(0)
    model, batch = Net(), inputs()
    before = model_state(model)
    bayplan.fit(model, batch, total, memory="100%")
    assert model_state(model) == before


@pytest.mark.parametrize("build", [lambda: nn.Sequential(Net(), Net()), lambda: nn.Linear(16, 16)])
def test_torchs_own_modules_are_planned_as_one(bind_to, build):
    """torch compiles the children of an `nn.Sequential` one by one, if left to itself."""
    step = TrainingStep(model=build(), batch=inputs(), loss_fn=total)
    backend = bind_to(step, by_strategy("keep", keep()))
    assert len(backend.orders) == 1


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))


def test_models_that_torch_compiled_in_part_or_wrote_itself(model_state):
    def trained(has_plan, make):
        torch.manual_seed(0)
        model, batch = (
            make(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))),
            inputs(),
        )
        if has_plan:
            bayplan.fit(model, batch, total, memory="100%", time_limit_seconds=0.1)
        total(model(batch)).backward()
        return model_state(model)

    def compiled_in_part(model):
        model[0] = torch.compile(model[0], backend="eager")
        return model

    for make in (compiled_in_part, torch.fx.symbolic_trace):
        assert trained(True, make) == trained(False, make)


def test_limit_below_the_smallest_possible_names_what_works():
    model, batch = deep(), torch.randn(512, 64)
    with pytest.raises(DoesNotFit, match=r"Fits with \d+ bytes") as fault:
        bayplan.fit(model, batch, total, memory="600KiB", time_limit_seconds=1)
    assert "limit 600.0 KiB" in str(fault.value)
    least_bytes = int(str(fault.value).split("Fits with ")[1].split(" ")[0])
    bayplan.fit(model, batch, total, memory=least_bytes, time_limit_seconds=1)


def test_limit_below_the_parameters_alone_names_what_works():
    with pytest.raises(DoesNotFit, match=r"limit 1.0 KiB.*Fits with \d+ bytes"):
        bayplan.fit(deep(), torch.randn(8, 64), total, memory="1KiB", time_limit_seconds=1)


def test_failed_fit_leaves_the_model_as_it_was():
    model = deep()
    with pytest.raises(DoesNotFit):
        bayplan.fit(model, torch.randn(8, 64), total, memory="1KiB", time_limit_seconds=1)
    assert model._compiled_call_impl is None
    assert model(torch.randn(3, 64)).shape == (3, 64)


def test_limit_that_cannot_be_read_is_refused_before_anything_runs():
    with pytest.raises(UsageError, match="lots"):
        bayplan.fit(nn.Linear(1, 1), torch.ones(1, 1), total, memory="lots")


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        torch._dynamo.graph_break()
        return y.tanh()


def test_graph_break_is_named_with_its_line():
    model = Breaking()
    with pytest.raises(CaptureError, match="as one graph") as fault:
        bayplan.fit(model, inputs(), total, memory="100%", fullgraph=True)
    assert "test_fitted.py" in str(fault.value)
    assert "graph_break()" in str(fault.value)
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_swap_directory_must_be_one(tmp_path, kind):
    directory = tmp_path / "swap"
    if kind == "a file":
        directory.touch()
    with pytest.raises((UsageError, bayplan.BayplanError), match="swap"):
        bayplan.fit(Net(), inputs(), total, memory="100%", swap=directory)


def test_swap_file_that_fails_falls_back_with_one_warning(
    bind_to, digests, tmp_path, monkeypatch, recwarn
):
    tier = Tier(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
    space = SwapSpace(torch.device("cpu"), tmp_path, tier)
    decide = by_strategy("swap", swap(), tier=tier)
    plain = digests(lambda: (Net(), inputs(), total), num_steps=3)

    def prepare(step):
        # A disk that is too small: the file holds one page of all that is swapped.
        monkeypatch.setattr(
            SwapSpace, "open", lambda self, _, plain_open=SwapSpace.open: plain_open(self, 4096)
        )
        bind_to(step, decide, space=space)

    assert digests(lambda: (Net(), inputs(), total), prepare=prepare, num_steps=3) == plain
    told = [one for one in recwarn.list if "could not be swapped" in str(one.message)]
    assert len(told) == 1


SIZES: dict[str, Any] = {
    "num_layers": 4,
    "num_heads": 4,
    "width": 128,
    "context": 256,
    "vocabulary": 512,
}
LARGE = {  # so that tens of MB are planned, and what Python itself allocates does not show
    "resnet18": partial(load("resnet18"), 8, image_size=96),
    "gpt": partial(load("gpt"), 8, config=GptConfig(**SIZES)),
    "llama": partial(
        load("llama-7b"), 8, config=LlamaConfig(**SIZES, hidden=384, dtype=torch.float32)
    ),
}
TOLERANCE = 0.005


@pytest.mark.parametrize(
    ("name", "share"),
    [("resnet18", 1.0), ("gpt", 0.8), ("gpt", 0.6), ("llama", 1.0), ("llama", 0.6)],
)
def test_peak_is_as_predicted_and_within_the_limit(context, planner_cache, name, share):
    model, batch, loss_fn = LARGE[name]()
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn)
    context = replace(context, loss=loss_memory(step), granularity_bytes=HOST.granularity_bytes)
    decide = FastestWithin(
        Limit(share=share), planner_cache, time_limit_seconds=1.5, may_pack=False
    )
    (order,) = bind(step, decide, context).orders
    step = replace(step, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    step()
    model.zero_grad()
    gc.collect()
    own = [*model.parameters(), *model.buffers(), *batch]
    others = resident_tensor_bytes(torch.device("cpu")) - sum(one.nbytes for one in own)
    with bayplan.record() as recording:
        for _ in range(2):
            step()
    measured_bytes = recording.result.devices[0].step_peak_bytes[-1] - others
    assert measured_bytes == pytest.approx(order.peak_bytes, rel=TOLERANCE)
    assert measured_bytes <= share * order.plain_peak_bytes * (1 + TOLERANCE)


class Pairs(nn.Module):
    """Reads two inputs that lie in one storage, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rows, self.columns = torch.tril_indices(4, 4, -1)

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        return (y[:, :, None] * y[:, None, :])[:, self.rows, self.columns]


def test_inputs_that_are_views_of_one_storage_reach_backward(assert_same, planner_cache):
    def build():
        torch.manual_seed(0)
        return Pairs(), torch.randn(8, 4), lambda y: y.square().sum()

    assert_same(build, FastestWithin(Limit(share=1.0), planner_cache))
