"""Models as people write them themselves, with plain torch: beyond what transformers has."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["WRITTEN"]

Built = tuple[nn.Module, Any, Any]
Tensor = torch.Tensor


def conv(inner: int, outer: int, dims: int = 2) -> nn.Sequential:
    kinds: dict[int, tuple[Any, Any]] = {
        2: (nn.Conv2d, nn.BatchNorm2d),
        3: (nn.Conv3d, nn.BatchNorm3d),
    }
    layer, norm = kinds[dims]
    return nn.Sequential(layer(inner, outer, 3, padding=1), norm(outer), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips across, and upsampling by interpolation."""

    def __init__(self, mode: str, dims: int = 2, width: int = 12) -> None:
        super().__init__()
        self.mode, self.dims = mode, dims
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            conv(a, b, dims) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            conv(a + b, b, dims) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.last = (nn.Conv2d, nn.Conv3d)[dims - 2](width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        pool = F.max_pool2d if self.dims == 2 else F.max_pool3d
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else pool(x, 2))
            skips.append(x)
        skips.pop()
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:], mode=self.mode, align_corners=False)
            x = block(torch.cat([x, skip], 1))
        return self.last(x)


def unet(batch_size: int = 4) -> Built:
    x = torch.randn(batch_size, 3, 64, 64)
    return UNet("bilinear"), (x, torch.randn(batch_size, 3, 64, 64)), F.mse_loss


def unet_bicubic(batch_size: int = 4) -> Built:
    x = torch.randn(batch_size, 3, 48, 48)
    return UNet("bicubic"), (x, torch.rand(batch_size, 3, 48, 48)), nn.SmoothL1Loss()


def unet_3d(batch_size: int = 2) -> Built:
    x = torch.randn(batch_size, 3, 16, 16, 16)
    return UNet("trilinear", 3, 8), (x, torch.randint(3, (batch_size, 16, 16, 16))), F.cross_entropy


class SelfAttention2d(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, width), nn.Conv2d(width, 3 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + mixed.transpose(1, 2).reshape(x.shape)


class Diffusion(nn.Module):
    """Draws times and noise in its forward, as training of diffusion models does."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(4)
        )
        self.mix = SelfAttention2d(width)
        self.register_buffer("rates", torch.linspace(0.99, 0.01, 100))

    def forward(self, x: Tensor) -> Tensor:
        noise, times = torch.randn_like(x), torch.randint(0, 100, (x.shape[0],))
        rate = self.rates[times][:, None, None, None]
        angles = times[:, None] * torch.exp(-torch.arange(8) * math.log(1e4) / 8)
        told = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        y = self.first(rate.sqrt() * x + (1 - rate).sqrt() * noise)
        for block in self.blocks:
            y = y + block(y + told[:, :, None, None])
        return F.mse_loss(self.last(self.mix(y)), noise)


def diffusion(batch_size: int = 8) -> Built:
    return Diffusion(), torch.randn(batch_size, 3, 32, 32), None


def generator(batch_size: int = 16) -> Built:
    """The generator of a GAN against a frozen critic, its loss outside."""
    layers: list[nn.Module] = [nn.Unflatten(1, (32, 4, 4))]
    for a, b in ((32, 32), (32, 24), (24, 16)):
        layers += [nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU(True)]
    model = nn.Sequential(*layers, nn.Conv2d(16, 3, 3, padding=1), nn.Tanh())
    critic = discriminator(batch_size)[0].requires_grad_(False)
    return model, torch.randn(batch_size, 512), lambda images: F.softplus(-critic(images)).mean()


def discriminator(batch_size: int = 16) -> Built:
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 32)):
        layers += [
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 3, padding=1)),
            nn.LeakyReLU(0.2),
            nn.AvgPool2d(2),
        ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 1))
    batch = torch.randn(batch_size, 3, 32, 32), torch.ones(batch_size, 1)
    return model, batch, F.binary_cross_entropy_with_logits


class Autoencoder(nn.Module):
    """Variational: noise in the middle, and a loss of its own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ELU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ELU()
        )
        self.head = nn.Conv2d(2 * width, 2 * width, 1)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.ELU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.ELU(),
            nn.Conv2d(width, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.head(self.encoder(x)).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        return F.mse_loss(self.decoder(code), x) + 0.1 * divergence


def autoencoder(batch_size: int = 8) -> Built:
    return Autoencoder(), torch.rand(batch_size, 3, 48, 48), None


def denoiser(batch_size: int = 8) -> Built:
    layers = [m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.PReLU(16))]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Conv2d(16, 3, 3, padding=1))
    x = torch.rand(batch_size, 3, 48, 48)
    return model, (x, torch.rand(batch_size, 3, 48, 48)), F.l1_loss


def super_resolution(batch_size: int = 4) -> Built:
    layers = [m for _ in range(4) for m in (nn.Conv2d(24, 24, 3, padding=1), nn.GELU())]
    model = nn.Sequential(
        nn.Conv2d(3, 24, 5, padding=2), *layers, nn.Conv2d(24, 12, 3, padding=1), nn.PixelShuffle(2)
    )
    x = torch.rand(batch_size, 3, 40, 40)
    return model, (x, torch.rand(batch_size, 3, 80, 80)), F.mse_loss


class Recurrent(nn.Module):
    """Tokens through a recurrent network to tokens."""

    def __init__(self, kind: Callable[..., nn.Module], **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 48)
        self.core = kind(48, 64, batch_first=True, **settings)
        sides = 2 if settings.get("bidirectional") else 1
        self.head = nn.Linear(64 * sides, 200)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.core(self.words(tokens))[0]).transpose(1, 2)


def _recurrent(kind: Callable[..., nn.Module], **settings: Any) -> Callable[..., Built]:
    def build(batch_size: int = 16) -> Built:
        tokens = torch.randint(200, (batch_size, 48))
        return Recurrent(kind, **settings), (tokens, tokens.roll(-1, 1)), F.cross_entropy

    return build


class Unrolled(nn.Module):
    """An LSTM cell in a loop of Python's, with attention over what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(32, 64), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 64)
        seen = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            seen.append(h)
        memory = torch.stack(seen, 1)
        weights = (memory @ h[:, :, None]).softmax(1)
        return self.head(torch.cat([h, (weights * memory).sum(1)], -1))


def lstm_cell(batch_size: int = 64) -> Built:
    batch = torch.randn(batch_size, 24, 32), torch.randint(10, (batch_size,))
    return Unrolled(), batch, F.cross_entropy


class GraphNetwork(nn.Module):
    """Messages along edges, summed by `index_add`; attention by a softmax over incoming edges."""

    def __init__(self, has_attention: bool, width: int = 48) -> None:
        super().__init__()
        self.has_attention = has_attention
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        x = self.first(nodes)
        for layer, score in zip(self.layers, self.scores, strict=True):
            both = torch.cat([x[source], x[target]], -1)
            messages = F.relu(layer(both))
            if self.has_attention:
                weight = F.leaky_relu(score(both)).exp()
                total = torch.zeros(x.shape[0], 1).index_add(0, target, weight)
                messages = messages * weight / total[target]
            x = x + torch.zeros_like(x).scatter_add(
                0, target[:, None].expand_as(messages), messages
            )
        return self.last(F.dropout(x, 0.1, self.training))


def _graph(has_attention: bool) -> Callable[..., Built]:
    def build(batch_size: int = 2000) -> Built:
        inputs = torch.randn(batch_size, 16), torch.randint(batch_size, (2, 4 * batch_size))
        return (
            GraphNetwork(has_attention),
            (inputs, torch.randint(5, (batch_size,))),
            F.cross_entropy,
        )

    return build


class SpectralLayer(nn.Module):
    """A Fourier neural operator's: complex weights on low frequencies."""

    def __init__(self, width: int, modes: int = 8) -> None:
        super().__init__()
        self.modes, self.plain = modes, nn.Conv2d(width, width, 1)
        self.weight = nn.Parameter(
            0.05 * torch.randn(width, width, modes, modes, dtype=torch.cfloat)
        )

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", waves[:, :, : self.modes, : self.modes], self.weight)
        mixed = torch.zeros_like(waves)
        mixed[:, :, : self.modes, : self.modes] = low
        return F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.plain(x))


def fourier_operator(batch_size: int = 8) -> Built:
    layers = [SpectralLayer(12) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(1, 12, 1), *layers, nn.Conv2d(12, 1, 1))
    x = torch.randn(batch_size, 1, 48, 48)
    return model, (x, torch.randn(batch_size, 1, 48, 48)), F.mse_loss


class ComplexLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(32, 64), (64, 64), (64, 8)]
        self.weights = nn.ParameterList(0.1 * torch.randn(s, dtype=torch.cfloat) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
            x = x * torch.sigmoid(x.abs())
        return x.abs()


def complex_layers(batch_size: int = 1024) -> Built:
    x = torch.randn(batch_size, 32, dtype=torch.cfloat)
    return ComplexLayers(), (x, torch.rand(batch_size, 8)), F.mse_loss


class Flow(nn.Module):
    """Coupling layers, and the logarithm of a determinant in the loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(width // 2, 64), nn.Tanh(), nn.Linear(64, width))
            for _ in range(4)
        )
        self.mix = nn.Parameter(torch.eye(width) + 0.1 * torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for net in self.nets:
            a, b = (x @ self.mix).chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            x = torch.cat([b * scale.tanh().exp() + shift, a], -1)
            total = total + scale.tanh().sum(-1) + torch.linalg.slogdet(self.mix)[1]
        return (0.5 * x.square().sum(-1) - total).mean()


def flow(batch_size: int = 1024) -> Built:
    return Flow(), torch.randn(batch_size, 8), None


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32), (32, 64), (64, 128)]
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in sizes)
        )
        self.head = nn.Sequential(nn.Linear(128, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.layers(points).amax(-1))


def point_cloud(batch_size: int = 8) -> Built:
    batch = torch.randn(batch_size, 3, 256), torch.randint(10, (batch_size,))
    return PointNet(), batch, nn.CrossEntropyLoss(label_smoothing=0.1)


class Recommender(nn.Module):
    """Bags of items and dense numbers, multiplied with each other."""

    def __init__(self, tables: int = 4, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(500, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.rows, self.columns = torch.tril_indices(tables + 1, tables + 1, -1)

    def forward(self, dense: Tensor, items: Tensor) -> Tensor:
        first = self.dense(dense)
        bags = [table(items[:, index]) for index, table in enumerate(self.tables)]
        all_of = torch.stack([first, *bags], 1)
        products = (all_of @ all_of.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([first, products], -1))[:, 0]


def recommender(batch_size: int = 2048) -> Built:
    inputs = torch.randn(batch_size, 13), torch.randint(500, (batch_size, 4, 6))
    return (
        Recommender(),
        (inputs, torch.rand(batch_size).round()),
        F.binary_cross_entropy_with_logits,
    )


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return gradient


class Quantized(nn.Module):
    """A codebook in the middle, as in vector-quantized autoencoders, and rounded activations."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder, self.decoder = conv(3, width), nn.Conv2d(width, 3, 3, padding=1)
        self.codes = nn.Embedding(32, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x).permute(0, 2, 3, 1)
        nearest = torch.cdist(y.flatten(0, 2), self.codes.weight).argmin(-1)
        code = self.codes(nearest).view_as(y)
        kept = F.mse_loss(code, y.detach()) + 0.25 * F.mse_loss(y, code.detach())
        out = self.decoder((y + (code - y).detach()).permute(0, 3, 1, 2))
        return F.mse_loss(out + 0.01 * Straight.apply(out), x) + kept


def quantized(batch_size: int = 8) -> Built:
    return Quantized(), torch.rand(batch_size, 3, 40, 40), None


class Translator(nn.Module):
    """torch's own encoder and decoder, with masks."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(200, width)
        self.core = nn.Transformer(width, 4, 2, 2, 128, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 200)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.core(self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(out).transpose(1, 2)


def torch_transformer(batch_size: int = 8) -> Built:
    source, target = torch.randint(200, (batch_size, 64)), torch.randint(200, (batch_size, 48))
    return Translator(), ((source, target), target.roll(-1, 1)), F.cross_entropy


def torch_encoder(batch_size: int = 16) -> Built:
    layer = nn.TransformerEncoderLayer(48, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(48 * 48, 10))
    batch = torch.randn(batch_size, 48, 48), torch.randint(10, (batch_size,))
    return model, batch, nn.CrossEntropyLoss()


class Mixer(nn.Module):
    def __init__(self, width: int = 48, patches: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, 4)
        self.across = nn.ModuleList(nn.Linear(patches, patches) for _ in range(4))
        self.along = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(8))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(2).transpose(1, 2)
        for index, (across, along) in enumerate(zip(self.across, self.along, strict=True)):
            mixed = across(self.norms[2 * index](x).transpose(1, 2))
            x = x + F.gelu(mixed).transpose(1, 2)
            x = x + F.gelu(along(self.norms[2 * index + 1](x)))
        return self.head(x.mean(1))


def mixer(batch_size: int = 32) -> Built:
    batch = torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    return Mixer(), batch, nn.CrossEntropyLoss()


class TwoViews(nn.Module):
    """Two augmented views of a picture, drawn to each other: the module is called twice inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            conv(3, 24),
            nn.MaxPool2d(2),
            conv(24, 32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        first = F.normalize(self.net(x + 0.1 * torch.randn_like(x)), dim=-1)
        second = F.normalize(self.net(x.flip(-1)), dim=-1)
        return F.cross_entropy(first @ second.t() / 0.1, torch.arange(x.shape[0]))


def contrastive(batch_size: int = 16) -> Built:
    return TwoViews(), torch.randn(batch_size, 3, 32, 32), None


WRITTEN: dict[str, dict[str, Callable[..., Built]]] = {
    "U-Net": {"unet": unet, "unet-bicubic": unet_bicubic, "unet-3d": unet_3d},
    "diffusion": {"diffusion": diffusion},
    "adversarial": {"generator": generator, "discriminator": discriminator},
    "autoencoder": {"autoencoder": autoencoder, "denoiser": denoiser, "quantized": quantized},
    "super-resolution": {"super-resolution": super_resolution},
    "recurrent": {
        "lstm": _recurrent(nn.LSTM, num_layers=2),
        "lstm-both-ways": _recurrent(nn.LSTM, bidirectional=True),
        "gru": _recurrent(nn.GRU, num_layers=2, dropout=0.1),
        "rnn": _recurrent(nn.RNN),
        "lstm-cell": lstm_cell,
    },
    "graph": {"graph-convolution": _graph(False), "graph-attention": _graph(True)},
    "complex numbers": {"fourier-operator": fourier_operator, "complex-layers": complex_layers},
    "flow": {"flow": flow},
    "point cloud": {"point-cloud": point_cloud},
    "recommender": {"recommender": recommender},
    "torch's own": {
        "torch-transformer": torch_transformer,
        "torch-encoder": torch_encoder,
        "mixer": mixer,
    },
    "contrastive": {"contrastive": contrastive},
}
