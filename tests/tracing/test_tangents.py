"""Gradients reach a planned model as its loss hands them out: to some outputs, in their layouts."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayplan
from bayplan.tracing.tangents import OutputGradient, output_gradients

pytestmark = pytest.mark.usefixtures("own_planner_cache")


class Tagger(nn.Module):
    """Returns a transposed view, whose gradient comes in the layout of the view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 24), nn.Linear(24, 37)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(x))).transpose(1, 2)


class Pairs(nn.Module):
    """Returns its loss, and scores that no loss uses, one a view of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 16), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.normalize(self.layer(x), dim=-1)
        scores = y @ y.t() * self.scale.exp()
        picked = torch.arange(len(x)).roll(1)
        loss = F.cross_entropy(scores, picked) + F.cross_entropy(scores.t(), picked)
        return {"scores": scores, "by column": scores.t(), "loss": loss}


def gradients(model: nn.Module, batch: Any, loss_fn: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = batch[0] if isinstance(batch, tuple) else batch
    output = model(inputs)
    loss = output["loss"] if loss_fn is None else loss_fn(output, *batch[1:])
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("num_samples", [6, 9], ids=["as fitted", "another batch"])
@pytest.mark.parametrize("build", [Tagger, Pairs])
def test_gradients_are_those_of_plain_training(build, num_samples):
    is_tagger = build is Tagger
    loss_fn = F.cross_entropy if is_tagger else None

    def batch(size: int) -> Any:
        torch.manual_seed(1)
        x = torch.randn(size, 29, 8) if is_tagger else torch.randn(size, 8)
        return (x, torch.randint(37, (size, 29))) if is_tagger else x

    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = build()
        if is_planned:
            bayplan.fit(model, batch(6), loss_fn, memory="1GiB", progress=False)
        found.append(gradients(model, batch(num_samples), loss_fn))
    assert all(map(torch.equal, *found))


def test_output_that_was_planned_without_a_gradient_refuses_one():
    model, x = Pairs(), torch.randn(6, 8)
    bayplan.fit(model, x, memory="1GiB", progress=False)
    output = model(x)
    assert output["scores"].requires_grad
    with pytest.raises(bayplan.BayplanError, match=r"shape \(6, 6\).*Plan the model with the loss"):
        (output["loss"] + output["scores"].mean()).backward()
    with torch.no_grad():
        assert not model(x)["scores"].requires_grad


@dataclass
class Features:
    """What torch does not know as a container: it holds tensors, itself and a plain object."""

    last: torch.Tensor
    cache: Any
    whole: Any = None


class Cache:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Caching(nn.Module):
    """Returns what no loss uses in objects of classes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(24, 24) for _ in range(3)), nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> Features:
        cache = Cache()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            keys = self.norm(x.view(len(x), -1, 3, 8)).transpose(1, 2)
            cache.keys.append(keys)
            x = x + F.scaled_dot_product_attention(keys, keys, keys).transpose(1, 2).flatten(2)
        features = Features(x, cache)
        features.whole = features
        return features


class Storing(nn.Module):
    """Leaves a second loss in an attribute, and returns the same scores twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate, self.idle = nn.Linear(8, 16), nn.Linear(8, 3), nn.Linear(8, 5)
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.balance = self.gate(x).softmax(-1).mean(0).square().sum()
        y, idle = self.layer(x), self.idle(x)
        return {"loss": y.square().mean(), "scores": idle, "again": idle}


def test_second_loss_in_an_attribute_trains_as_it_does_plainly():
    """What only outputs without a gradient are computed from has none, not one of zeros."""
    x, found = torch.randn(6, 8), []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Storing()
        if is_planned:
            with pytest.warns(UserWarning, match="gate.bias .and 1 more. of Storing"):
                bayplan.fit(model, x, memory="1GiB", progress=False)
        (model(x)["loss"] + model.balance).backward()
        assert model.idle.weight.grad is None
        found.append([model.layer.weight.grad, model.gate.weight.grad])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda features: features.last.square().mean(),
        lambda features: features.last.sum() + features.whole.cache.keys[1].square().mean(),
    ],
    ids=["last", "last and keys"],
)
def test_outputs_in_objects_of_any_class_get_the_gradients_of_plain_training(loss_fn):
    x = torch.randn(6, 29, 24)
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = Caching()
        if is_planned:
            bayplan.fit(model, x, loss_fn, memory="1GiB", progress=False)
        loss_fn(model(x)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_tensors_in_objects_of_any_class_are_asked_about():
    x, cache = torch.randn(2, 3, requires_grad=True), Cache()
    cache.keys.append(x + 1)
    output = Features(x * 2, cache)
    output.whole = output
    asked = output_gradients(output, lambda features: features.whole.cache.keys[0].square().sum())
    assert [each.is_used for each in asked] == [False, True]
    assert output.last.grad_fn is not None  # only a copy is changed


def test_loss_is_asked_for_the_order_of_dimensions():
    x = torch.randn(2, 3, 4, requires_grad=True)
    output = (x * 2, [x + 1, x.detach()])
    asked = output_gradients(output, lambda parts: (parts[0].transpose(1, 2) ** 2).sum())
    assert asked == (
        OutputGradient((2, 3, 4), is_used=True, order=(0, 1, 2)),
        OutputGradient((2, 3, 4)),
    )
    (of_sum,) = output_gradients(x * 2, torch.sum)
    assert of_sum == OutputGradient((2, 3, 4), is_used=True, order=None, expanded=(0, 1, 2))
    (of_rows,) = output_gradients(x * 2, lambda y: y.sum(1).square().sum())
    assert of_rows == OutputGradient((2, 3, 4), is_used=True, order=None, expanded=(1,))
    assert OutputGradient((2, 3), is_used=True, order=(1, 0)).stride((5, 7)) == (1, 5)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_gradient_of_a_sum_is_expanded_as_in_plain_training(dim):
    """A sum over numbers that are one in memory adds up in another order."""

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.sum() * 0.3 if dim is None else output.sum(dim).square().mean()

    x, found = torch.randn(100, 32), []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 100), nn.GELU(), nn.Linear(100, 100))
        if is_planned:
            bayplan.fit(model, x, loss_fn, memory="1GiB", progress=False)
        loss_fn(model(x)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_model_that_was_planned_with_a_sum_refuses_other_gradients():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    bayplan.fit(model, x, lambda y: y.sum(), memory="1GiB", progress=False)
    with pytest.raises(bayplan.BayplanError, match=r"shape \(4, 8\).* same, as a sum does"):
        model(x).square().mean().backward()
