"""Stages give the numbers of plain training, whatever the model does across a cut.

One piece gives the same bits, several pieces the same to rounding, for their sums have another
order. All in float64, so that nothing hides behind rounding.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayplan.data.errors import UsageError
from bayplan.planning.memory.orders import by_strategy
from bayplan.step import TrainingStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")

NUM_SAMPLES, WIDTH, LENGTH, VOCABULARY = 6, 8, 4, 11
TOLERANCE = 1e-12
PIECES = (4, 2)


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


def residual():
    return (
        Residual(),
        (numbers(NUM_SAMPLES, 3, 6, 6), torch.randint(3, (NUM_SAMPLES,))),
        cross_entropy,
    )


def frozen_statistics():
    model, batch, loss_fn = residual()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
            part.eval()
    return model, batch, loss_fn


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
    return (
        Tied(),
        (words(), torch.randint(VOCABULARY, (NUM_SAMPLES * LENGTH,)).view(NUM_SAMPLES, LENGTH)),
        lambda output, target: cross_entropy(output, target.flatten()),
    )


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
        mlp,
        frozen_statistics,
        skips,
        tied,
        shared,
        named,
        biased,
        in_place,
        frozen,
        recurrent,
        several,
    )
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_three_stages_give_the_bits_of_plain_training(build, check_stages):
    # Traced, GRUCell's sums are not the bits of its one kernel, with stages or without.
    check_stages(build, 0.3, 0.6, tolerance=TOLERANCE if build is recurrent else 0.0)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_uneven_pieces_add_up_to_plain_training(build, check_stages):
    check_stages(build, 0.4, 0.8, sizes=PIECES, tolerance=TOLERANCE)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_pieces_of_one_sample_add_up_to_plain_training(build, check_stages):
    check_stages(build, 0.5, sizes=(1, 4, 1), tolerance=TOLERANCE)


def test_training_statistics_of_one_piece_are_those_of_plain_training(check_stages):
    outcome = check_stages(residual, 0.3, 0.6)
    assert outcome.buffers["first.1.num_batches_tracked"] == 1


@pytest.mark.parametrize("build", [mlp, skips, shared, biased])
def test_repeats_inside_stages_change_nothing(build, check_stages, repeat_everything):
    check_stages(build, 0.3, 0.6, decide=by_strategy("all", repeat_everything))


def test_mixed_precision_gives_the_bits_of_plain_training(train_plain, cut_into, compare):
    torch.manual_seed(0)
    model, (inputs, target), loss_fn = mlp()
    step = TrainingStep(
        model=model,
        batch=(inputs.float(), target),
        loss_fn=loss_fn,
        autocast=torch.bfloat16,
    )
    plain = train_plain(step)
    compare(plain, cut_into(step, 0.3, 0.6).run())


def test_a_model_of_transformers_gives_the_numbers_of_plain_training(check_stages):
    transformers = pytest.importorskip("transformers")

    def gpt2():
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        )
        ids = words()
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}, None

    check_stages(gpt2, 0.3, 0.6)
    # Its loss is computed in float32, whatever the model's dtype.
    check_stages(gpt2, 0.5, sizes=PIECES, tolerance=1e-6)


@pytest.mark.parametrize("build", [skips, tied, biased, several], ids=lambda build: build.__name__)
def test_a_cut_anywhere_gives_the_bits_of_plain_training(
    build, make_step, train_plain, cut_into, compare
):
    step = make_step(build)
    plain = train_plain(step)
    stages = cut_into(step)
    refused = []
    for cut in range(1, stages.num_ops):
        try:
            stages.cut_at(cut)
        except UsageError:
            refused.append(cut)  # nothing but positions and masks before it
        else:
            compare(plain, stages.run())
    assert len(refused) <= stages.num_ops // 5
    assert refused == list(range(1, len(refused) + 1))
