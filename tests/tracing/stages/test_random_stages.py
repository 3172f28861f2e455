"""Stages draw what plain training draws, for every sample, in every layout.

Attention is here as well: its values hold samples in all the ways that others do not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayplan.planning.memory.orders import by_strategy

pytestmark = pytest.mark.usefixtures("own_planner_cache")

NUM_SAMPLES, WIDTH, LENGTH = 6, 8, 4
TOLERANCE = 1e-12


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def mean_square(output):
    return output.square().mean()


def dropouts():
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.1),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.7),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(WIDTH, 3),
    )
    return model, numbers(NUM_SAMPLES, WIDTH), mean_square


class Transposed(nn.Module):
    """Samples lie innermost in memory, where dropout draws, and where values are cut."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs):
        value = functional.dropout((self.weight @ inputs.T).T, 0.4)
        return self.head(torch.tanh(value * 2).sin())


def transposed():
    return Transposed(), numbers(NUM_SAMPLES, WIDTH), mean_square


class Attention(nn.Module):
    """Dropout of a value whose samples are not alone in their dimension, of two in turn."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3)  # samples come second
        self.feed = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 2)

    def forward(self, inputs):
        value = inputs.transpose(0, 1)
        value = value + self.attention(value, value, value, need_weights=True)[0]
        # Every sample has every n-th row here.
        value = functional.dropout(value.flatten(0, 1), 0.2).unflatten(0, (LENGTH, -1))
        return self.head(self.feed(value.transpose(0, 1).contiguous()))


def attention():
    return Attention(), numbers(NUM_SAMPLES, LENGTH, WIDTH), mean_square


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs):
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.project(inputs).chunk(3, -1)
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(found.transpose(1, 2).flatten(2))


def fused():
    return Fused(), numbers(NUM_SAMPLES, LENGTH, WIDTH), mean_square


MODELS = {build.__name__: build for build in (dropouts, transposed, attention, fused)}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_three_stages_give_the_bits_of_plain_training(build, check_stages):
    check_stages(build, 0.3, 0.6)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_uneven_pieces_add_up_to_plain_training(build, check_stages):
    check_stages(build, 0.4, 0.8, sizes=(4, 2), tolerance=TOLERANCE)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_pieces_of_one_sample_add_up_to_plain_training(build, check_stages):
    check_stages(build, 0.5, sizes=(1, 4, 1), tolerance=TOLERANCE)


def test_repeats_inside_stages_draw_the_same_again(check_stages, repeat_everything):
    check_stages(dropouts, 0.3, 0.6, decide=by_strategy("all", repeat_everything))


def test_a_second_step_draws_other_numbers(make_step, train_plain, cut_into):
    step = make_step(dropouts)
    first = train_plain(step)
    stages = cut_into(step, 0.5)
    assert torch.equal(stages.run().loss, first.loss)
    torch.set_rng_state(first.random_state)
    second = step()
    torch.set_rng_state(first.random_state)
    assert torch.equal(stages.run(seed=None).loss, second)
    assert not torch.equal(first.loss, second)
