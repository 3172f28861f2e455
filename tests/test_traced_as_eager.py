"""What tracing would compute otherwise than plain training, in models as people write them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayplan
from bayplan.planning.memory.orders import by_strategy

pytestmark = pytest.mark.usefixtures("own_planner_cache")


class Upsampling(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.before, self.after, self.mode = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), mode

    def forward(self, x):
        return self.after(F.interpolate(self.before(x).relu(), scale_factor=1.7, mode=self.mode))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_upsampling(assert_same, repeat_everything, mode):
    def build():
        return Upsampling(mode), torch.randn(2, 3, 9, 9), lambda y: y.square().mean()

    assert_same(build, by_strategy("all", repeat_everything))


class Spectrogram(nn.Module):
    """Masks the spectrogram of a sound, as separation of speech does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(33, 33, 3, padding=1)
        self.register_buffer("window", torch.hann_window(64))

    def forward(self, x):
        waves = torch.stft(x, 64, 16, window=self.window, return_complex=True)
        mask = self.layer(waves.abs()).sigmoid()
        return torch.istft(waves * mask, 64, 16, window=self.window, length=x.shape[-1])


def test_inverse_fourier_transform_of_windows(assert_same, repeat_everything):
    """Tracing had an implementation of its own, which laid gradients out otherwise."""

    def build():
        return Spectrogram(), torch.randn(4, 1024), lambda y: y.square().mean()

    assert_same(build, by_strategy("all", repeat_everything))


class SlicesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 22)

    def forward(self, x):
        rows, columns, chunks = (self.layer(x) * scale for scale in (1, 2, 3))
        rows[:, :9].sigmoid_()
        columns[:, ::2].tanh_()
        first, second = chunks.unsafe_chunk(2, 1)
        return (first.exp_() * second).sum() + (rows * columns).square().mean()


def test_slices_changed_in_place(assert_same, repeat_everything):
    def build():
        return SlicesInPlace(), torch.randn(5, 7), lambda y: y

    assert_same(build, by_strategy("all", repeat_everything))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 9)

    def forward(self, x, targets, lengths, target_lengths):
        scores = self.layer(x).log_softmax(-1)
        smallest = scores.amin(-1).min() + scores.exp().prod(-1).sum() + scores.median()
        return F.ctc_loss(scores, targets, lengths, target_lengths) + smallest


def test_losses_and_gradients_that_look_at_values(digests):
    def build():
        targets, lengths = torch.randint(1, 9, (3, 4)), torch.tensor([12, 9, 10])
        return Speech(), (torch.randn(12, 3, 6), targets, lengths, torch.tensor([4, 2, 3])), None

    def fit(step):
        bayplan.fit(step.model, step.batch, memory="1GiB", time_limit_seconds=0.5)

    assert digests(build, prepare=fit) == digests(build)


class Permuting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(37, 53)

    def forward(self, x):
        return self.layer(x).permute(2, 0, 1)


def test_gradients_that_arrive_in_another_layout_than_the_output(digests):
    """They were copied into the output's layout, and the bias had another gradient."""

    def build():
        weights = torch.arange(95.0).view(1, 5, 19)

        def loss_fn(y):
            return (y * weights).square().mean() + y.contiguous().exp().mean()

        return Permuting(), torch.randn(5, 19, 37), loss_fn

    def fit(step):
        bayplan.fit(step.model, step.batch, step.loss_fn, memory="1GiB", time_limit_seconds=0.5)

    assert digests(build, prepare=fit) == digests(build)


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 48)

    def forward(self, x):
        return self.layer(x).unfold(1, 6, 3)


@pytest.mark.parametrize("knows_loss", [True, False])
def test_gradients_of_outputs_that_overlap_themselves(digests, knows_loss):
    """torch lays gradients out like outputs: one number was copied over another."""

    def build():
        return Overlapping(), torch.randn(5, 7), lambda y: (y * y.detach().roll(1, 2)).mean()

    def fit(step):
        if knows_loss:
            bayplan.fit(step.model, step.batch, step.loss_fn, memory="1GiB", time_limit_seconds=0.5)
        else:
            step.model.compile(backend="bayplan", options={"memory": "1GiB"})

    assert digests(build, prepare=fit) == digests(build)


class Spectra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x):
        values = []
        for y in (x, self.layer(x)):
            both = torch.linalg.svdvals(y), torch.linalg.eigvalsh(y @ y.mT)
            values += [*both, torch.linalg.eigvals(y).abs(), torch.linalg.cond(y)[:, None]]
        return torch.cat(values, 1)


def test_values_are_computed_without_vectors_where_nobody_trains_with_them():
    torch.manual_seed(0)
    model, x = Spectra(), torch.randn(5, 7, 7)

    def outputs():
        kept = [model(x)]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                kept.append(model(x).clone())
        return kept

    plain = outputs()
    bayplan.fit(model, x, lambda y: y.sum(), memory="1GiB", time_limit_seconds=0.5)
    assert all(one.equal(other) for one, other in zip(outputs(), plain, strict=True))


def test_evaluation_runs_torchs_own_shortcuts():
    """Without gradients torch's encoder leaves padding out, and its attention is one kernel."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(4, 6, 8)
    padding = torch.arange(6).expand(4, 6) > torch.tensor([[5], [3], [2], [1]])
    batch = {"src": x, "src_key_padding_mask": padding}

    def outputs():
        kept = []
        for mode in (torch.no_grad, torch.inference_mode):
            for is_training in (False, True):
                model.train(is_training)
                torch.manual_seed(1)
                with mode():
                    kept.append(model(**batch).clone())
        return kept

    plain = outputs()
    bayplan.fit(model, batch, lambda y: y.sum(), memory="1GiB", time_limit_seconds=0.5)
    assert not plain[0][3, 2:].any()
    assert all(one.equal(other) for one, other in zip(outputs(), plain, strict=True))


class FrozenAttention(nn.Module):
    """A pretrained layer that only makes features: torch then computes it by one fused kernel."""

    def __init__(self, needs_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True).requires_grad_(False)
        self.head, self.needs_weights = nn.Linear(16, 8), needs_weights

    def forward(self, x):
        self.attention.eval()
        features, weights = self.attention(x, x, x, need_weights=self.needs_weights)
        total = self.head(features).relu().square().mean()
        return total if weights is None else total * weights.max()


@pytest.mark.parametrize("needs_weights", [False, True])
def test_frozen_attention_runs_torchs_fused_kernel(assert_same, repeat_everything, needs_weights):
    """Dynamo says that torch traces, which kept the layer off that kernel: other last bits."""

    def build():
        return FrozenAttention(needs_weights), torch.randn(6, 12, 16), None

    order = assert_same(build, by_strategy("all", repeat_everything))
    assert order.schedule


def test_frozen_attention_is_fitted():
    """What is known of its values: the fused kernel makes one tensor where a fake one has two."""
    torch.manual_seed(0)
    model, x = FrozenAttention(False), torch.randn(6, 12, 16)
    plain = model(x).item()
    bayplan.fit(model, x, memory="100%", time_limit_seconds=0.5, progress=False)
    assert model(x).item() == plain


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        points = self.layer(x)
        distances = torch.cdist(points, points)  # of more than 25 points, by matrix products
        return (distances.mT.sin() * torch.arange(48.0)).sum()


def test_a_change_in_place_keeps_its_layout(assert_same, repeat_everything):
    # The gradient of distances masks a transposed tensor in place. `masked_fill` returns it in rows
    # instead, and sums went in another order: a Gaussian process had other gradients, unsaid.
    def build():
        return Distances(), torch.randn(48, 4), None

    assert_same(build, by_strategy("all", repeat_everything))
