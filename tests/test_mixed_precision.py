"""The first promise in mixed precision: planned training has the bits of plain training.

Recipes as people write them: autocast in both half precisions around every norm, convolution and
attention of torch, with everything kept and with everything made again in backward.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bayplan
from bayplan.devices.machine import machine_key
from bayplan.planning.memory.orders import by_strategy
from bayplan.planning.memory.strategies import keep
from bayplan.step import TrainingStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")

BUILT = tuple[nn.Module, Any, Any]


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, num_features: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(num_features, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).flatten(1))


CONVOLUTIONS: dict[int, tuple[Any, tuple[int, ...]]] = {
    1: (nn.Conv1d, (4, 3, 16)),
    2: (nn.Conv2d, (4, 3, 8, 8)),
    3: (nn.Conv3d, (2, 3, 4, 4, 4)),
}


def convolutional(norm: Callable[[], nn.Module], num_dimensions: int = 2) -> BUILT:
    convolution, shape = CONVOLUTIONS[num_dimensions]
    layers = [convolution(3, 8, 3, padding=1), norm(), nn.ReLU()]
    layers += [convolution(8, 8, 3, padding=1), norm(), nn.GELU()]
    model = Classifier(nn.Sequential(*layers), 8 * torch.Size(shape[2:]).numel())
    return model, (torch.randn(shape), torch.randint(5, shape[:1])), nn.CrossEntropyLoss()


def perceptron(norm: Callable[[], nn.Module]) -> BUILT:
    layers = [nn.Linear(16, 8), norm(), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.1), norm()]
    model = Classifier(nn.Sequential(*layers), 8)
    return model, (torch.randn(8, 16), torch.randint(5, (8,))), nn.CrossEntropyLoss()


class Attention(nn.Module):
    """Embedding, attention with a mask and dropout, and a head."""

    def __init__(self, dropout: float, mask: str) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.inner, self.outer, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 20)
        self.dropout, self.mask = dropout, mask

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        parts = self.inner(self.norm(hidden)).chunk(3, -1)
        queries, keys, values = (part.view(*tokens.shape, 2, 8).transpose(1, 2) for part in parts)
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        masks = {
            "bool": seen,
            "float": torch.zeros(seen.shape, dtype=queries.dtype).masked_fill(~seen, -1e4),
        }
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=masks.get(self.mask),
            dropout_p=self.dropout,
            is_causal=self.mask == "causal",
        )
        return self.head(hidden + self.outer(mixed.transpose(1, 2).flatten(2))).flatten(0, 1)


def attention(dropout: float, mask: str) -> BUILT:
    tokens = torch.randint(20, (3, 8))
    return Attention(dropout, mask), (tokens, tokens.flatten()), nn.CrossEntropyLoss()


def encoder_layer() -> BUILT:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    batch = torch.randn(3, 4, 8), torch.randint(5, (3,))
    return Classifier(layer, 32), batch, nn.CrossEntropyLoss()


RECIPES: dict[str, Callable[[], BUILT]] = {"encoder layer": encoder_layer}
for dims, batch_norm, instance_norm in (
    (1, nn.BatchNorm1d, nn.InstanceNorm1d),
    (2, nn.BatchNorm2d, nn.InstanceNorm2d),
    (3, nn.BatchNorm3d, nn.InstanceNorm3d),
):
    for is_affine in (True, False):
        for is_tracked in (True, False):
            for kind in (batch_norm, instance_norm):
                norm = partial(kind, 8, affine=is_affine, track_running_stats=is_tracked)
                told = f"{kind.__name__}, {is_affine=}, {is_tracked=}"
                RECIPES[told] = partial(convolutional, norm, dims)
for is_affine in (True, False):
    group_norm = partial(nn.GroupNorm, 2, 8, affine=is_affine)
    RECIPES[f"GroupNorm, {is_affine=}"] = partial(convolutional, group_norm)
    for kind in (nn.LayerNorm, nn.RMSNorm):
        norm = partial(kind, 8, elementwise_affine=is_affine)
        RECIPES[f"{kind.__name__}, {is_affine=}"] = partial(perceptron, norm)
        RECIPES[f"{kind.__name__} of images, {is_affine=}"] = partial(convolutional, norm)
for dropout in (0.0, 0.1):
    for mask in ("none", "bool", "float", "causal"):
        RECIPES[f"attention, {dropout=}, {mask=}"] = partial(attention, dropout, mask)

# One of every kind; the cross product is slow.
QUICK = {
    "encoder layer",
    "BatchNorm2d, is_affine=True, is_tracked=True",
    "BatchNorm2d, is_affine=False, is_tracked=True",
    "BatchNorm2d, is_affine=False, is_tracked=False",
    "InstanceNorm2d, is_affine=True, is_tracked=True",
    "GroupNorm, is_affine=True",
    "LayerNorm, is_affine=True",
    "RMSNorm, is_affine=True",
    "attention, dropout=0.0, mask='causal'",
    "attention, dropout=0.1, mask='bool'",
}
HALVES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in RECIPES]
)
def test_autocast_with_everything_kept_and_everything_repeated(
    assert_same, repeat_everything, name, dtype
):
    for strategy in (keep(), repeat_everything):
        torch.compiler.reset()
        assert_same(RECIPES[name], by_strategy("tried", strategy), autocast=dtype)


# Recipes of a loop: what is around the calls of the model.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.body(x)))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(x))


def data(number: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(8, 12), torch.randint(5, (8,))) for _ in range(number)]


def compared(bind_to, strategy, train) -> None:
    """Run a training plainly and as decided, and compare all that it yields."""

    def fit(model: nn.Module, batch: Any, autocast: torch.dtype | None = None) -> None:
        step = TrainingStep(model=model, batch=batch, loss_fn=F.cross_entropy, autocast=autocast)
        bind_to(step, by_strategy("tried", strategy))

    results = []
    for each in (lambda *_: None, fit):
        torch.manual_seed(0)
        told = [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in train(each)]
        results.append([*told, torch.get_rng_state()])
    for number, (planned, plain) in enumerate(zip(results[1], results[0], strict=True)):
        is_same = planned.equal(plain) if isinstance(planned, torch.Tensor) else planned == plain
        assert is_same, f"result {number}"


def under_autocast(model: nn.Module, fit: Any, dtype: torch.dtype, **how: Any) -> Any:
    """Losses, gradients and parameters of a training with autocast around each forward."""
    batches = data()
    fit(model, batches[0], dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        with torch.autocast("cpu", dtype, **how):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield from (loss, *(p.grad for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    yield from (*model.parameters(), *model.buffers())


class Twice(Net):
    """Autocast casts its weight once, and gradients are summed in half precision."""

    def inner(self, x):
        return self.middle(torch.tanh(self.middle(torch.tanh(self.middle(x)))))


class TwiceByMethods(Net):
    def inner(self, x):
        weight = self.middle.weight
        return (torch.tanh(x.matmul(weight)) @ weight).mm(weight)


class TwiceAndOnceInFloat(Net):
    def inner(self, x):
        x = self.middle(x)
        with torch.autocast("cpu", enabled=False):
            x = self.middle(x.float())
        return self.middle(x)


class TwiceWithoutCache(Net):
    def inner(self, x):
        x = self.middle(self.middle(x))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return self.middle(torch.tanh(self.middle(x)))


class TwiceInCheckpoint(Net):
    def inner(self, x):
        return self.middle(
            checkpoint(lambda y: self.middle(self.middle(y)), x, use_reentrant=False)
        )


class Views(Net):
    def inner(self, x):
        weight = self.middle.weight[:]
        return F.linear(torch.tanh(F.linear(x, weight)), weight)


class TiedLayers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 16)
        self.other.weight = self.middle.weight

    def inner(self, x):
        return self.other(torch.tanh(self.middle(x)))


class TiedEmbedding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 16)
        self.head.weight = self.embedding.weight

    def inner(self, x):
        return self.middle(x) + self.embedding(x.argmax(1) % 5)


class AttentionTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def inner(self, x):
        x = torch.stack([x, x + 1], 1)
        x, _ = self.attention(x, x, x)
        x, _ = self.attention(x, x, x)
        return self.attention(x, x * 2, x)[0].mean(1)


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class ProductInFloat(Product):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight


class WithProduct(Net):
    function: type[torch.autograd.Function] = Product

    def inner(self, x):
        return self.function.apply(x, self.middle.weight)


class WithProductInFloat(WithProduct):
    function = ProductInFloat


AROUND: dict[str, type[Net]] = {
    each.__name__: each
    for each in (
        *(Twice, TwiceByMethods, TwiceAndOnceInFloat, TwiceWithoutCache, TwiceInCheckpoint, Views),
        *(TiedLayers, TiedEmbedding, AttentionTwice, WithProduct, WithProductInFloat),
    )
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", AROUND)
def test_weights_that_are_read_several_times_or_by_functions(
    bind_to, repeat_everything, name, dtype
):
    if name == "TwiceWithoutCache" and dtype == torch.float16:
        pytest.skip("its blocks are in bfloat16")
    compared(bind_to, repeat_everything, lambda fit: under_autocast(AROUND[name](), fit, dtype))


def test_autocast_without_its_cache_and_with_it_again(bind_to):
    def train(fit):
        model, batches = Twice(), data(4)
        fit(model, batches[0], torch.bfloat16)
        for number, (x, y) in enumerate(batches):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=number % 2 == 0):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
        yield from (loss, *(p.grad for p in model.parameters()))

    compared(bind_to, keep(), train)


class InsideForward(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.middle(self.middle(self.body(x)))
        with torch.autocast("cpu", torch.bfloat16):  # casts anew
            x = self.middle(x)
        return self.head(x.float())


def test_autocast_inside_the_forward(bind_to, repeat_everything):
    def train(fit):
        model, batches = InsideForward(), data()
        fit(model, batches[0])
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            yield loss
        yield from (p.grad for p in model.parameters())

    for strategy in (keep(), repeat_everything):
        compared(bind_to, strategy, train)
    model, batches = InsideForward(), data()
    bayplan.fit(model, batches[0], F.cross_entropy, memory="1GiB", time_limit_seconds=0.1)
    with (
        torch.autocast("cpu", enabled=False),
        pytest.raises(bayplan.BayplanError, match="enters autocast itself"),
    ):
        model(batches[0][0])


def test_gradient_scaler_that_skips_a_step(bind_to, repeat_everything):
    def train(fit):
        model, batches = Net(), data(6)
        fit(model, batches[0], torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        for x, y in batches:
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield from (loss, bool(norm.isfinite()), scaler.get_scale())
        yield from model.parameters()

    torch.manual_seed(0)
    assert False in list(train(lambda *_: None)), "no step is skipped"
    for strategy in (keep(), repeat_everything):
        compared(bind_to, strategy, train)


def test_model_in_half_precision_with_weights_in_float(bind_to, repeat_everything):
    def train(fit):
        model, batches = Net().bfloat16(), [(x.bfloat16(), y) for x, y in data()]
        fit(model, batches[0])
        weights = [parameter.detach().float() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=0.01)
        for x, y in batches:
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            for weight, parameter in zip(weights, model.parameters(), strict=True):
                weight.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for weight, parameter in zip(weights, model.parameters(), strict=True):
                    parameter.copy_(weight)
            yield loss
        yield from weights

    for strategy in (keep(), repeat_everything):
        compared(bind_to, strategy, train)


@pytest.fixture
def _matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_matmul_precision")
def test_precision_of_products_is_obeyed_and_known_to_the_cache(bind_to):
    def train(fit):
        torch.set_float32_matmul_precision("high")
        model, batches = Net(), data()
        fit(model, batches[0])
        for precision, (x, y) in zip(("medium", "highest", "high"), batches, strict=True):
            torch.set_float32_matmul_precision(precision)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            yield from (loss, *(p.grad.clone() for p in model.parameters()))

    compared(bind_to, keep(), train)
    keys = set()
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        keys.add(machine_key())
    assert len(keys) == 3


def test_second_call_under_one_autocast_is_refused(bind_to):
    def train(fit, *, is_shared: bool, **how):
        model, batches = Net(), data(2)
        fit(model, batches[0], torch.bfloat16)
        around = [nullcontext(), nullcontext()]
        with torch.autocast("cpu", torch.bfloat16, **how) if is_shared else nullcontext():
            if not is_shared:
                around = [torch.autocast("cpu", torch.bfloat16, **how) for _ in around]
            losses = []
            for context, (x, y) in zip(around, batches, strict=True):
                with context:
                    losses.append(F.cross_entropy(model(x), y))
                    with torch.no_grad():
                        model(x)
        sum(losses).backward()
        yield from (*losses, *(p.grad for p in model.parameters()))

    with pytest.raises(bayplan.BayplanError, match="second time under one autocast"):
        compared(bind_to, keep(), partial(train, is_shared=True))
    compared(bind_to, keep(), partial(train, is_shared=False))
    compared(bind_to, keep(), partial(train, is_shared=True, cache_enabled=False))
