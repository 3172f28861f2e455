"""The first promise for recurrent layers: planned training gives the numbers of plain training."""

from functools import partial

import pytest
import torch
from torch import nn

import bayplan
from bayplan.planning.memory.orders import by_strategy
from bayplan.planning.memory.strategies import keep

pytestmark = pytest.mark.usefixtures("own_planner_cache")


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], num_outputs: int, **settings) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.layers = kind(6, 8, **settings)
        self.after = nn.Linear(num_outputs, 3)

    def forward(self, x):
        return self.after(self.layers(self.before(x).relu())[0]).square()


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LSTMCell(6, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 5)

    def forward(self, x):
        state, hidden, last = None, None, None
        for part in x:
            state = self.first(part, state)
            hidden = self.second(state[0], hidden)
            last = self.third(hidden, last)
        return last


RECURRENT = {
    "lstm": (nn.LSTM, 8, {}),
    "lstm both ways, two layers": (nn.LSTM, 16, {"bidirectional": True, "num_layers": 2}),
    "lstm with dropout": (nn.LSTM, 8, {"num_layers": 2, "dropout": 0.3, "batch_first": True}),
    "lstm with projections": (nn.LSTM, 4, {"proj_size": 4}),
    "gru": (nn.GRU, 8, {"bias": False}),
    "gru both ways": (nn.GRU, 16, {"bidirectional": True}),
    "gru with dropout": (nn.GRU, 8, {"num_layers": 2, "dropout": 0.2}),
    "rnn": (nn.RNN, 8, {"nonlinearity": "relu", "num_layers": 2}),
}


def build_recurrent(name: str):
    kind, num_outputs, settings = RECURRENT[name]
    model = _Recurrent(kind, num_outputs, **settings)
    return model, torch.randn(5, 4, 6), lambda y: y.mean()


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_kept_and_repeated(assert_same, repeat_everything, name):
    build = partial(build_recurrent, name)
    assert_same(build, by_strategy("keep", keep()))
    order = assert_same(build, by_strategy("all", repeat_everything))
    assert len(order.schedule) > len(set(order.schedule))


def test_recurrent_cells(assert_same, repeat_everything):
    def build():
        return _Cells(), torch.randn(3, 4, 6), lambda y: y.mean()

    assert_same(build, by_strategy("all", repeat_everything))


def test_recurrent_models_are_checked_profiled_and_fitted(digests):
    model, x, loss_fn = build_recurrent("lstm")
    assert bayplan.check(model, x, loss_fn, memory="1GiB").fits
    assert bayplan.profile(model, x, loss_fn).seconds

    def fit(step):
        bayplan.fit(step.model, step.batch, step.loss_fn, memory="100%", time_limit_seconds=0.5)

    def build():
        return build_recurrent("lstm")

    assert digests(build, prepare=fit) == digests(build)


@pytest.mark.parametrize("name", [*RECURRENT, "cells"])
def test_weights_under_autocast_are_cast_once_for_all_steps_of_a_sequence(name):
    """As plain training casts them: their gradients are then summed in bfloat16."""
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        if name == "cells":
            model, x, loss_fn = _Cells(), torch.randn(12, 4, 6), lambda y: y.mean()
        else:
            model, _, loss_fn = build_recurrent(name)
            x = torch.randn(12, 4, 6)
        if is_planned:
            bayplan.fit(model, x, loss_fn, memory="100%", autocast="bf16", progress=False)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(x))
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))
