"""Steps of many kinds, and loops around them, on the test accelerator: the bits of plain training.

Each test runs in a process that has the device registered (`own_process.py`), most of them while
kernels and copies are late there.
"""

import bay
import pytest
import torch
from device_here import KIND
from planned_steps import DECISIONS, are_same, made, planned, step_of, trained
from torch import nn

import bayplan

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well


class Noisy(nn.Module):
    """Draws numbers on the device twice, each of them needed in backward."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.last = nn.Linear(48, 64), nn.Linear(64, 10)
        self.draw = draw

    def forward(self, x):
        for layer in (self.first, self.last):
            x = layer(x).sin()
            x = x * self.draw(x)
        return x


DRAWS = {
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, device=x.device),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(3, x.shape, device=x.device),
    "normal": lambda x: torch.normal(0.0, 1.0, x.shape, device=x.device),
    "bernoulli": lambda x: torch.bernoulli(x.square().clamp(max=1)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.7),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "randperm": lambda x: torch.randperm(x.shape[1], device=x.device),
    "dropout1d": lambda x: nn.functional.dropout1d(x, 0.4),
    "of the host": lambda x: torch.rand(x.shape).to(x.device),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_drawn_on_the_device_are_drawn_again(name):
    """Those of an operator without a tensor among its arguments came from the CPU's generator."""
    steps = [step_of(lambda: Noisy(DRAWS[name]), (32, 48)) for _ in range(2)]
    bound = planned(steps[1], DECISIONS["all again"])
    assert are_same(trained(steps[1]), trained(steps[0]))
    (order,) = bound.orders
    assert len(order.schedule) > 2 * len(set(order.schedule))


class OwnNoise(nn.Module):
    """Draws from a generator of its own, which torch does not trace."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 256), nn.Sigmoid(), nn.Linear(256, 10))
        self.own = torch.Generator(KIND).manual_seed(3)

    def forward(self, x):
        x = self.layers(x)
        return x * torch.rand(x.shape, device=x.device, generator=self.own)


@pytest.mark.gpu
def test_a_generator_of_a_modules_own_draws_between_pieces():
    steps = [step_of(OwnNoise, (64, 48)) for _ in range(2)]
    torch.compiler.reset()
    fitted = steps[1].model, steps[1].batch, steps[1].loss_fn
    with pytest.warns(UserWarning, match=r"not one graph.*generator=self.own"):
        bayplan.fit(*fitted, memory="400KiB", time_limit_seconds=1)
    assert are_same(trained(steps[1], is_slow=True), trained(steps[0]))
    states = [step.model.own.get_state() for step in steps]
    assert states[0].equal(states[1])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x).mean(1)


MODELS = {"lstm": (Recurrent, (4, 5, 12)), "attention": (Attention, (4, 6, 16))}


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["checkpoint", "swap"])
@pytest.mark.parametrize("model", MODELS)
def test_models_have_the_bits_of_plain_training(model, way):
    steps = [step_of(*MODELS[model]) for _ in range(2)]
    planned(steps[1], DECISIONS[way])
    assert are_same(trained(steps[1], is_slow=True), trained(steps[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["all again", "pack", "swap"])
@pytest.mark.parametrize("loop", [{"num_forwards": 2}, {"num_accumulated": 2}])
def test_loops_have_the_bits_of_plain_training(loop, way):
    plain, step = trained(made(0.3), **loop), made(0.3)
    planned(step, DECISIONS[way])
    assert are_same(trained(step, is_slow=True, **loop), plain)


@pytest.mark.parametrize("way", DECISIONS)
def test_a_planned_step_waits_for_the_device_no_more_often_than_a_plain_one(way):
    """Weights of bits were copied to the device for every chunk that was packed."""

    def waited(step):
        before = bay.num_synchronisations()
        step.loss_fn(step.model(step.batch[0]), step.batch[1]).backward()
        return bay.num_synchronisations() - before

    steps = made(0.3), made(0.3)
    planned(steps[1], DECISIONS[way])
    for step in steps:
        waited(step)
    plainly = waited(steps[0])
    assert waited(steps[1]) <= plainly
    step, after = steps[1], bay.num_synchronisations()
    step.model(step.batch[0]).sum().item()
    assert bay.num_synchronisations() > after, "the counter counts"
