"""Gradients reach a planned model as its loss hands them out: to some outputs, in their layouts."""

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


def test_loss_is_asked_for_the_order_of_dimensions():
    x = torch.randn(2, 3, 4, requires_grad=True)
    output = (x * 2, [x + 1, x.detach()])
    asked = output_gradients(output, lambda parts: (parts[0].transpose(1, 2) ** 2).sum())
    assert asked == (
        OutputGradient((2, 3, 4), is_used=True, order=(0, 1, 2)),
        OutputGradient((2, 3, 4)),
    )
    (of_sum,) = output_gradients(x * 2, torch.sum)
    assert of_sum == OutputGradient((2, 3, 4), is_used=True, order=None)
    assert OutputGradient((2, 3), is_used=True, order=(1, 0)).stride((5, 7)) == (1, 5)
