"""What a planned model raises: `BayplanError`s that loops catch as what plain training raises."""

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import bayplan
from bayplan.data.errors import CaptureError, DoesNotFit, PlanBroken, UsageError
from bayplan.running.call_faults import also_ours, unchanged

pytestmark = pytest.mark.usefixtures("own_planner_cache")


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


class TooMany(Exception):
    def __init__(self, number: int, *, most: int) -> None:
        super().__init__(f"{number} of {most}")
        self.most = most


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names = nn.Embedding(10, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, names: torch.Tensor | None = None) -> torch.Tensor:
        self.num_calls += 1
        if x.shape[0] > 2000:
            raise TooMany(x.shape[0], most=2000)
        y = self.layers(x)
        return y if names is None else y + self.names(names)


@pytest.fixture
def model() -> nn.Module:
    return bayplan.fit(Net(), torch.ones(64, 16), mean, memory="100%")


def test_a_larger_batch_does_not_fit_the_limit_of_the_fitted_one(model):
    with pytest.raises(
        DoesNotFit, match=r"within the limit .* limit .* Fits with \d+ bytes"
    ) as raised:
        model(torch.ones(256, 16))
    assert raised.value.smallest_bytes is not None
    assert "PlannedBackend" not in str(raised.value)
    model(torch.ones(64, 16)).mean().backward()  # as before


@pytest.mark.parametrize(
    ("inputs", "words"),
    [(torch.ones(64, 16).double(), "dtype"), (torch.ones(64, 8), "shapes cannot be multiplied")],
)
def test_wrong_inputs_raise_what_plain_training_raises(model, inputs, words):
    with pytest.raises(RuntimeError, match=words) as plain:
        Net()(inputs)
    with pytest.raises(bayplan.BayplanError) as planned:
        model(inputs)
    assert isinstance(planned.value, RuntimeError)
    assert str(planned.value) == str(plain.value)
    assert planned.value.__cause__ is not None


def test_wrong_arguments_are_a_type_error(model):
    with pytest.raises(TypeError, match="unexpected keyword argument 'nams'") as raised:
        model(torch.ones(64, 16), nams=torch.ones(64))
    assert isinstance(raised.value, bayplan.BayplanError)


def test_errors_of_the_models_own_stay_what_they_are_and_calls_count_once(model):
    calls, state = float(model.num_calls), torch.get_rng_state()
    with pytest.raises(TooMany, match="3000 of 2000") as raised:
        model(torch.ones(3000, 16))
    assert isinstance(raised.value, bayplan.BayplanError)
    assert raised.value.most == 2000
    assert float(model.num_calls) == calls + 1  # before it failed, as in plain training
    assert torch.equal(torch.get_rng_state(), state)


def test_errors_of_kernels_stay_what_they_are(model):
    names = torch.arange(64) % 10
    model(torch.ones(64, 16), names=names).mean().backward()
    with pytest.raises(IndexError, match="out of range") as raised:
        model(torch.ones(64, 16), names=names + 1)
    assert isinstance(raised.value, bayplan.BayplanError)


def test_out_of_memory_is_a_broken_plan_and_still_torchs_error():
    fault = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
    ours = also_ours(fault)
    assert isinstance(ours, PlanBroken)
    assert isinstance(ours, torch.OutOfMemoryError)
    assert "asked for 20.00 MiB" in str(ours)
    assert ours.__cause__ is fault


@pytest.mark.parametrize("fault", [OSError(2, "gone"), KeyError("x"), StopIteration()], ids=repr)
def test_every_class_can_be_ours_as_well(fault):
    ours = also_ours(fault)
    assert isinstance(ours, CaptureError)
    assert isinstance(ours, type(fault))
    assert ours.args == fault.args


def test_second_derivatives_are_refused_with_a_way_out(model):
    x = torch.ones(64, 16)
    parameters = list(model.layers.parameters())
    with pytest.raises(UsageError, match=r"second derivative.*force_eager"):
        torch.autograd.grad(model(x).mean(), parameters, create_graph=True)
    with pytest.raises(UsageError, match="second derivative"):  # torch would take it for zero
        torch.autograd.functional.hessian(lambda x: model.requires_grad_(False)(x).mean(), x)
    model.requires_grad_(True)
    with torch.compiler.set_stance("force_eager"):
        output = model(x)
    first = torch.autograd.grad(output.mean(), parameters, create_graph=True)
    sum(gradient.square().sum() for gradient in first).backward()


def test_modes_that_see_every_operator_are_named(model):
    with pytest.raises(CaptureError, match="FlopCounterMode"), FlopCounterMode(display=False):
        model(torch.ones(32, 16))


def test_function_transforms_are_named(model):
    with pytest.raises(CaptureError, match=r"torch.func .*deepcopy.*force_eager"):
        torch.func.grad(lambda x: model(x).mean())(torch.ones(32, 16))
    with pytest.raises(CaptureError, match=r"torch.func .*deepcopy.*force_eager"):
        torch.vmap(model)(torch.ones(32, 16))
    x = torch.ones(32, 16)
    with forward_ad.dual_level(), pytest.raises(CaptureError, match=r"forward mode.*deepcopy"):
        model(forward_ad.make_dual(x, x))
    with pytest.raises(CaptureError, match=r"jit.trace.*deepcopy"):
        torch.jit.trace(model, x)


def test_wrong_inputs_leave_no_traceback_of_torchs_in_the_log(model, caplog):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(64, 15))
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": (torch.ones(2, 4), torch.ones(2, 4))}, r"Linear.forward does not take a tuple"),
        ({"batch": {"x": torch.ones(2, 4)}}, r"Linear.forward does not take a dict: .*'input'"),
        ({"batch": torch.ones(2, 4, device="meta")}, "the batch has tensors on meta"),
        ({"loss_fn": nn.MSELoss}, r"got the class MSELoss; make one of it: MSELoss\(\)"),
        ({"loss_fn": lambda y: (y + 1j).sum()}, r"a real loss, got torch.complex64"),
        ({"model": lambda x: x}, r"a model is a torch.nn.Module, got a function"),
        ({"loss_fn": "mse"}, "a loss is a function .* got 'mse'"),
        ({"optimizer": "adamm"}, "no optimizer 'adamm'; did you mean"),
        ({"optimizer": 3}, "an optimizer is .* got 3"),
        ({"optimizer": lambda parameters: 3}, "made a int, which is none"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS runs the step several times"),
        ({"autocast": "bf"}, "no autocast 'bf'"),
        ({"autocast": torch.float32}, "autocast torch.float32"),
        ({"memory": 0.7}, "0.7 is not a limit; .* like '70%'"),
    ],
)
def test_wrong_arguments_are_named_and_not_blamed_on_the_model(options, words):
    given = {"model": nn.Linear(4, 4), "batch": torch.ones(2, 4), "loss_fn": mean}
    with pytest.raises(UsageError, match=words):
        bayplan.fit(**{**given, "memory": "100%", **options})
    if "memory" not in options and "meta" not in words:
        with pytest.raises(UsageError, match=words):
            bayplan.capture(**{**given, **options})


def test_what_was_never_fitted_has_no_plan():
    for other in (nn.Linear(4, 4), "model", None):
        with pytest.raises(UsageError, match="fitted"):
            bayplan.plan_of(other)


def test_precision_and_optimizer_by_name():
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    graph = bayplan.capture(model, batch, mean, optimizer="adamw", autocast="bf16")
    same = bayplan.capture(model, batch, mean, optimizer=torch.optim.AdamW, autocast=torch.bfloat16)
    assert graph.fingerprint == same.fingerprint
    bayplan.fit(model, batch, mean, memory="100%", optimizer="adamw", autocast="bf16")
    bayplan.profile(model, batch, mean, optimizer="sgd", autocast="bf16", repeats=1)


class Observing(nn.Module):
    """Changes everything that a forward can change, and may fail then."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced, self.written = (nn.Parameter(torch.ones(3)) for _ in range(2))
        self.register_buffer("seen", torch.tensor([]))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced.data = self.replaced.data + torch.rand(3)
        self.written.data.mul_(random.random())
        self.seen.resize_(3).copy_(x)
        if self.fails:
            raise ValueError("as asked")
        return self.replaced * self.written


def numbers_of(model: nn.Module) -> list[Any]:
    states = [torch.get_rng_state(), *model.state_dict().values()]
    return [*(each.tolist() for each in states), random.getstate()]


def test_what_a_forward_changes_is_put_back_unless_it_fails_for_real():
    model, x = Observing(), torch.ones(3)
    before = numbers_of(model)
    with unchanged(model) as parameters, parameters:
        model(x)
    assert numbers_of(model) == before
    with unchanged(model, {"written"}):
        model(x)
    assert numbers_of(model) == before
    model.fails = True
    for stays in (False, True):
        with pytest.raises(ValueError, match="as asked"):  # noqa: SIM117
            with unchanged(model, unless_it_fails=stays) as parameters, parameters:
                model(x)
        assert (numbers_of(model) != before) == stays
