"""One parameter at a time by the user's optimizer: the same bits, and what is refused."""

import copy

import pytest
import torch
from torch import fx, nn

from bayplan import torch_compat
from bayplan.costing.catalogue import load_device
from bayplan.costing.pricing import derived_prices
from bayplan.data.errors import UsageError
from bayplan.rewriting.updates import AppliedGradient, ParameterUpdates

BY_PARAMETER = [
    *(("SGD", options) for options in ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True})),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    *(("Adam", options) for options in ({}, {"amsgrad": True}, {"foreach": True})),
    *(("AdamW", options) for options in ({}, {"fused": True})),
    *((name, {}) for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD")),
    *((name, {}) for name in ("Muon", "NAdam", "RAdam", "RMSprop", "Rprop")),
]


def trained(
    name: str, options: dict, *, one_by_one: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    updates = ParameterUpdates.of(model, optimizer)
    for _ in range(3):
        gradients = [torch.randn(8, 8) for _ in model]
        if one_by_one:
            for index in (2, 0, 1):
                parameter = updates.members[index].parameter
                updates.function(index, gradients[index], parameter)
                assert isinstance(parameter.grad, AppliedGradient)
        else:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(("name", "options"), BY_PARAMETER)
def test_one_by_one_gives_the_same_bits(name, options):
    model, optimizer = trained(name, options, one_by_one=True)
    other, all_at_once = trained(name, options, one_by_one=False)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    found, wanted = optimizer.state_dict(), all_at_once.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        for key, value in state.items():
            assert torch.equal(
                torch.as_tensor(found["state"][index][key]), torch.as_tensor(value)
            ), key


def test_state_that_was_loaded_is_the_one_that_is_used():
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    updates = ParameterUpdates.of(model, optimizer)
    updates.function(0, torch.ones(4, 4), model.weight)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"].fill_(10.0)
    saved["param_groups"][0]["lr"] = 0.1
    optimizer.step()
    optimizer.load_state_dict(saved)
    before = model.weight.detach().clone()
    updates.function(0, torch.ones(4, 4), model.weight)
    torch.testing.assert_close(before - model.weight, torch.full((4, 4), 0.6))


def test_gradient_of_another_layout_is_laid_out_as_its_parameter():
    model = nn.Linear(4, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    updates = ParameterUpdates.of(model, optimizer)
    updates.function(0, torch.ones(4, 8).t(), model.weight)
    assert optimizer.state[model.weight]["momentum_buffer"].stride() == model.weight.stride()


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class OwnName(torch.optim.SGD):
    pass


def test_optimizers_that_may_look_at_all_gradients_are_refused():
    model = nn.Linear(2, 2)
    refused = {
        "LBFGS needs all gradients": torch.optim.LBFGS(model.parameters()),
        "SparseAdam needs all gradients": torch.optim.SparseAdam(model.parameters()),
        r"OwnStep has a step\(\) of its own": OwnStep(model.parameters(), lr=0.1),
        "differentiable=True": torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True),
        "got function": lambda parameters: None,
        "got none": None,
    }
    for reason, optimizer in refused.items():
        with pytest.raises(UsageError, match=reason):
            ParameterUpdates.of(model, optimizer)
    assert len(ParameterUpdates.of(model, OwnName(model.parameters(), lr=0.1)).members) == 2


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused(register):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    getattr(model.bias, register)(lambda _: None)
    with pytest.raises(UsageError, match="bias has a hook on its gradient"):
        ParameterUpdates.of(model, optimizer)


def test_only_trained_parameters_of_the_optimizer_are_members():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(nn.Sequential(model[0], model[1]).parameters(), lr=0.1)
    updates = ParameterUpdates.of(model, optimizer)
    assert [member.name for member in updates.members] == ["0.weight", "0.bias"]
    assert updates.among([torch.ones(2), model[0].bias, model[2].weight, 3]) == {1: 1}


def test_update_is_priced_for_a_device_elsewhere():
    model = nn.Linear(64, 64, bias=False)
    updates = ParameterUpdates.of(model, torch.optim.AdamW(model.parameters()))
    graph = fx.Graph()
    with torch_compat.FakeTensorMode():
        fakes = [torch.empty(64, 64), torch.empty(64, 64)]
    sources = [graph.placeholder(name) for name in ("gradient", "parameter")]
    for source, fake in zip(sources, fakes, strict=True):
        source.meta["val"] = fake
    node = graph.call_function(updates.function, (0, *sources))
    with derived_prices(load_device("a100")) as price:
        seconds, workspace_bytes, *_ = updates.cost_of(node, price=price)
    assert 0 < seconds < 1e-2
    assert workspace_bytes == 0
    assert fakes[1].grad is None
