"""Stages give the numbers of plain training, whatever the model does across a cut.

One piece gives the same bits, several pieces the same to rounding, for their sums have another
order. All in float64, so that nothing hides behind rounding.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayplan.training import TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SAMPLES, WIDTH, LENGTH, VOCABULARY = 6, 8, 4, 11
TOLERANCE = 1e-12
WAYS = {"one-piece": (), "even": (3, 3), "uneven": (3, 2, 1)}


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def words():
    return torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH))


def mean_square(output):
    return output.square().mean()


def mlp():
    model = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    batch = numbers(NUM_SAMPLES, WIDTH), torch.randint(3, (NUM_SAMPLES,))
    return model, batch, nn.CrossEntropyLoss()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.first = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        stem = self.stem(images)
        middle = (stem + self.first(stem)).relu_()
        last = (middle + self.second(middle)).relu()
        return self.head(last.mean((2, 3)))


def frozen_statistics():
    model = Residual()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
            part.eval()
    return model, (numbers(NUM_SAMPLES, 3, 6, 6), torch.randint(3, (NUM_SAMPLES,))), cross_entropy


def cross_entropy(output, target):
    return functional.cross_entropy(output, target)


class Skips(nn.Module):
    """What the first layer makes is read by each later one, and so is a sum of two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, inputs):
        first = self.layers[0](inputs)
        value = both = first
        for layer in self.layers[1:]:
            value = layer(torch.tanh(value)) * first + both
            both = both + value
        return both


def skips():
    return Skips(), numbers(NUM_SAMPLES, WIDTH), mean_square


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embedding(ids)))).flatten(0, 1)


def tied():
    return Tied(), (words(), torch.randint(VOCABULARY, (NUM_SAMPLES * LENGTH,)).view(
        NUM_SAMPLES, LENGTH)), lambda output, target: cross_entropy(output, target.flatten())


class Shared(nn.Module):
    """One weight in three layers, each time in another form."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(WIDTH, WIDTH))
        self.scale = nn.Parameter(numbers(WIDTH))

    def forward(self, inputs):
        value = torch.tanh(inputs @ self.weight * self.scale)
        value = torch.tanh(value @ self.weight.T * self.scale.exp())
        return (value @ self.weight) * self.scale


def shared():
    return Shared(), numbers(NUM_SAMPLES, WIDTH), mean_square


class Named(nn.Module):
    """Several inputs by name, one of them whole numbers, one true or false; its own loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("shift", numbers(WIDTH))

    def forward(self, ids, features, mask, labels):
        value = torch.tanh(self.embedding(ids) + self.dense(features)[:, None] + self.shift)
        value = value.masked_fill(~mask[..., None], 0.0)
        output = self.head(value * self.shift).sum((1, 2))
        return {"loss": (output - labels).square().mean(), "logits": output}


def named():
    batch = {
        "ids": words(),
        "features": numbers(NUM_SAMPLES, WIDTH),
        "mask": torch.rand(NUM_SAMPLES, LENGTH) > 0.3,
        "labels": numbers(NUM_SAMPLES),
    }
    return Named(), batch, None


class Biased(nn.Module):
    """A bias that is the same for all samples, from a parameter, is read in every layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2 * LENGTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs):
        places = torch.arange(LENGTH)
        distance = (places[:, None] - places).abs()
        bias = torch.tanh(self.mix(self.table(distance))).sum(-1)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        value = inputs
        for layer in self.layers:
            scores = value @ value.mT + bias
            scores = scores.masked_fill(~causal, float("-inf"))
            value = torch.tanh(layer(scores.softmax(-1) @ value))
        return value


def biased():
    return Biased(), numbers(NUM_SAMPLES, LENGTH, WIDTH), mean_square


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.Hardtanh(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, inputs):
        value = self.layers(inputs)
        value += inputs
        value[:, 0].mul_(2)
        return value


def in_place():
    return InPlace(), numbers(NUM_SAMPLES, WIDTH), mean_square


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
    return model, (numbers(NUM_SAMPLES, WIDTH), torch.randint(3, (NUM_SAMPLES,))), cross_entropy


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
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.project(inputs).chunk(3, -1)
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(found.transpose(1, 2).flatten(2))


def fused():
    return Fused(), numbers(NUM_SAMPLES, LENGTH, WIDTH), mean_square


class Frozen(nn.Module):
    """Some parameters are not trained, at the beginning, in the middle, and inside a layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for part in (self.layers[0], self.layers[2]):
            part.requires_grad_(False)
        self.layers[3].bias.requires_grad_(False)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


def frozen():
    return Frozen(), numbers(NUM_SAMPLES, WIDTH), mean_square


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs):
        state = torch.zeros_like(inputs[:, 0])
        for at in range(LENGTH):
            state = self.cell(inputs[:, at], state)
        return self.head(state)


def recurrent():
    return Recurrent(), numbers(NUM_SAMPLES, LENGTH, WIDTH), mean_square


class Several(nn.Module):
    """Operators with several outputs, each read in another place; one output is never read."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs):
        value, _ = self.layer(inputs).sort(-1)
        low, middle, high = value.split([2, 3, WIDTH - 5], -1)
        best, place = middle.max(-1, keepdim=True)
        joined = torch.cat([high, low * best, middle.gather(-1, place).expand(-1, -1, 3)], -1)
        return self.head(joined.transpose(0, 1).contiguous())


def several():
    return Several(), numbers(NUM_SAMPLES, LENGTH, WIDTH), mean_square


MODELS = {
    build.__name__: build
    for build in (
        mlp, frozen_statistics, skips, tied, shared, named, biased, in_place, dropouts,
        attention, fused, frozen, recurrent, several,
    )
}


def step_of(build):
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    return TrainingStep(model=model.double(), batch=batch, loss_fn=loss_fn)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_three_stages_give_the_numbers_of_plain_training(build, way, train_plain, cut_into, compare):
    step = step_of(build)
    plain = train_plain(step)
    staged = cut_into(step, 0.3, 0.6, sizes=WAYS[way]).run()
    compare(plain, staged, tolerance=0.0 if way == "one-piece" else TOLERANCE)
