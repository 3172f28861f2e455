"""Models that return views, planned by `torch.compile(backend="bayplan")`, which knows no loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayplan
from bayplan import torch_compat
from bayplan.data.errors import UsageError
from bayplan.planning.memory.orders import FastestWithin
from bayplan.running import backend
from bayplan.tracing.tangents import OutputGradient

pytestmark = pytest.mark.usefixtures("own_planner_cache")


@pytest.fixture(autouse=True)
def _short_search(monkeypatch):
    monkeypatch.setattr(backend, "FastestWithin", partial(FastestWithin, time_limit_seconds=0.2))


class Returning(nn.Module):
    def __init__(self, outputs: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 40))
        self.weight = nn.Parameter(torch.randn(40, 31))
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> Any:
        return self.outputs(x, self.layers(x), self.weight)


def planned(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="bayplan", options={"memory": "1GiB"})


def trained(model: nn.Module, call: Callable[..., Any], loss_of: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(3):
        loss = loss_of(call(torch.randn(29, 13)))
        loss.backward()
        gradients = (parameter.grad for parameter in model.parameters())
        found += [torch.zeros(()) if each is None else each.clone() for each in gradients]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *model.parameters()]


def distances(outputs: Any) -> torch.Tensor:
    """From zeros: this loss hands out gradients without gaps, whatever the outputs are."""
    losses = [F.mse_loss(each, torch.zeros_like(each)) for each in outputs if each.requires_grad]
    return torch.stack(losses).sum()


def by_columns(output: torch.Tensor) -> torch.Tensor:
    """A gradient that is laid out like a transposed output."""
    return (torch.arange(29.0)[:, None].expand(29, 40).clone().t() * output).sum()


# The third gradient of `y` came last where plain training adds it up second: torch adds up the
# gradients of views outside the graph, and the graph adds its own before.
@pytest.mark.parametrize(
    "outputs",
    [
        lambda x, y, w: (y.t(), torch.sigmoid(y) @ w, y[:, 3:9]),
        lambda x, y, w: (y, y.view(-1, 4, 10), y.t()),
        lambda x, y, w: (y.chunk(3, 1)[0], y.chunk(3, 1)[2], y[:, :1].expand(-1, 6)),
        lambda x, y, w: (x.view(-1), y, y),
        lambda x, y, w: (w.t(), y @ w, x),
    ],
    ids=["views and a use", "view of an output", "parts", "of the input, and twice", "of a weight"],
)
def test_views_train_as_plainly(outputs):
    plain, model = Returning(outputs), Returning(outputs)
    ours, theirs = trained(model, planned(model), distances), trained(plain, plain, distances)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    "loss_of", [by_columns, lambda y: 0.3 * y.sum()], ids=["by columns", "of a sum"]
)
def test_gradient_in_another_layout_is_told(loss_of):
    """torch copies it into the layout that it was traced with, where sums have other last bits."""
    compiled = planned(Returning(lambda x, y, w: y.t()))
    with pytest.warns(UserWarning, match=r"shape \(40, 29\).*planned for \(29, 1\).*bayplan.fit"):
        loss_of(compiled(torch.randn(29, 13))).backward()


def test_output_without_a_gradient_is_told():
    """A sum with zeros has another layout, and parameters had zeros for no gradient, unsaid."""
    call = planned(Returning(lambda x, y, w: (y, y @ w)))
    with pytest.warns(UserWarning, match=r"shape \(29, 31\).*gets no gradient.*bayplan.fit"):
        call(torch.randn(29, 13))[0].square().mean().backward()


def test_layouts_of_another_loss_than_the_planned_one_are_told():
    model, x = Returning(lambda x, y, w: y.t()), torch.randn(29, 13)
    bayplan.fit(model, x, lambda y: y.square().mean(), memory="1GiB", progress=False)
    model(x).square().mean().backward()
    with pytest.warns(UserWarning, match=r"strides \(1, 40\).*planned for \(29, 1\)"):
        by_columns(model(x)).backward()


@pytest.mark.parametrize("is_fitted", [True, False])
def test_changes_in_place_of_views_are_refused(is_fitted):
    """Autograd would change what else lies there: gradients were wrong where nobody told."""

    def loss_of(outputs: Any) -> torch.Tensor:
        outputs[0].mul_(2)
        return distances(outputs)

    model, x = Returning(lambda x, y, w: (y.t(), y)), torch.randn(29, 13)
    if is_fitted:
        bayplan.fit(model, x, loss_of, memory="1GiB", progress=False)
    call = model if is_fitted else planned(model)
    with pytest.raises(UsageError, match=r"changed in place.*output\.clone\(\)"):
        loss_of(call(x)).backward()


def test_dimension_of_one_element_may_have_any_stride():
    of_sum = OutputGradient((8, 4), is_used=True, expanded=(0, 1))
    assert of_sum.fits(torch.ones(1).expand(8, 1))
    assert not of_sum.fits(torch.ones(8, 4))
    by_rows = OutputGradient((8, 4), is_used=True, order=(0, 1))
    assert by_rows.fits(torch.ones(8, 4))
    assert by_rows.fits(torch.ones(4, 1).t())
    assert not by_rows.fits(torch.ones(4, 8).t())
    assert not by_rows.fits(torch.ones(4).expand(8, 4))


def test_versions_are_watched_without_memory():
    output = torch.ones(1000)
    watch = torch_compat.ChangesInPlace(output)
    assert not watch.were_made()
    output.mul_(2)
    assert watch.were_made()
    assert watch.sharing.untyped_storage().nbytes() == 0
