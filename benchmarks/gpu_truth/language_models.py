"""The decoder-only language models behind the traces, one allocation for one of theirs.

Pre-norm, no biases, no dropout, embedding and head not tied. The authors wrote the same course
assignment, so their models differ only in how they spell a few operators; each such spelling is a
field of `Dialect`. A row names its dialect in `config.model`, and its sizes beside it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayplan.data.errors import UsageError

__all__ = [
    "DIALECTS",
    "CourseAdamW",
    "InPlaceAdamW",
    "LanguageModel",
    "LeanAdamW",
    "RebindingAdam",
    "Sizes",
    "language_model",
    "optimizer_of",
    "plain_attention",
]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one author wrote the model.

    Attributes:
        norm: how RMSNorm is spelled.
        rope: how pairs of features are turned.
        mask: how the causal mask is made and applied.
        softmax_twice: the exponential is computed once for each side of the division.
        feed_forward: whether its parts have names, which keep them alive, and in which order.
        block: whether the results of a block's parts have names.
        norms_first: a block registers its norms before the rest.
        owns_rope: every layer has cosines and sines of its own.
        positions: who makes the position ids: each layer, or the model once.
    """

    norm: str = "rsqrt"
    rope: str = "sliced"
    mask: str = "compared"
    softmax_twice: bool = False
    feed_forward: str = "nameless"
    block: str = "sum"
    norms_first: bool = False
    owns_rope: bool = False
    positions: str = "layer"


DIALECTS = {
    "cs336-staff-26": Dialect(block="attention, sum"),
    "cs336-staff-25": Dialect(block="attention, sum", rope="gathered"),
    "cs336-student-kk": Dialect(
        norm="vector_norm", rope="zeros", mask="triu", feed_forward="both first", owns_rope=True
    ),
    "cs336-student-qr": Dialect(
        norm="sqrt", rope="stacked", mask="tril", positions="model", feed_forward="named"
    ),
    "cs336-student-niu": Dialect(
        norm="sqrt",
        rope="copied",
        mask="copied",
        softmax_twice=True,
        norms_first=True,
        block="attention, sum",
    ),
    "cs336-student-hanmin": Dialect(
        norm="sqrt", rope="built", mask="tril first", feed_forward="both first"
    ),
    "cs336-student-silmont": Dialect(
        norm="dot",
        rope="rotated",
        mask="tril == 0",
        positions="model",
        feed_forward="both first",
        block="norm, attention, sum",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int
    sequence: int
    max_sequence: int

    @property
    def head(self) -> int:
        return self.d_model // self.num_heads


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class _Norm(nn.Module):
    def __init__(self, width: int, spelling: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._width, self._spelling = width, spelling

    def forward(self, x: Tensor) -> Tensor:
        match self._spelling:
            case "rsqrt":
                dtype = x.dtype
                x = x.to(torch.float32)
                rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
                x = x * rms
                return (self.weight * x).to(dtype)
            case "vector_norm":
                rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / self._width
                normed = torch.einsum("...d,d->...d", x / torch.sqrt(rms + 1e-5), self.weight)
                return normed.to(x.dtype)
            case "dot":
                squares = torch.einsum("...d,...d->...", x, x).unsqueeze(-1)
                return x / torch.sqrt(squares / self._width + 1e-5) * self.weight
            case _:
                rms = torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)
                return x / rms * self.weight


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes, dialect: Dialect) -> None:
        super().__init__()
        width = sizes.d_model
        self.q, self.k, self.v, self.out = (_Linear(width, width) for _ in range(4))
        self._sizes, self._dialect = sizes, dialect
        shape = sizes.max_sequence, sizes.head // 2, 2
        self.register_buffer("turns", torch.empty(shape) if dialect.owns_rope else None)

    def forward(self, x: Tensor, turns: Any, positions: Any) -> Tensor:
        turns = turns if self.turns is None else self.turns
        q, k, v = (self._heads(part(x)) for part in (self.q, self.k, self.v))
        if positions is None and self._dialect.rope not in ("sliced", "copied"):
            positions = torch.arange(x.shape[-2])
        if self._dialect.rope == "built":
            turns = _built_turns(self._sizes)
        if self._dialect.rope == "copied":  # what was not turned yet has no other name
            q = self._turned(q, turns, positions)
            k = self._turned(k, turns, positions)
        else:
            q, k = self._turned(q, turns, positions), self._turned(k, turns, positions)
        x = self._attended(q, k, v)
        if self._dialect.rope != "copied":
            return self.out(x.transpose(1, 2).reshape(*x.shape[::2][:1], x.shape[2], -1))
        x = x.transpose(1, 2).reshape(*x.shape[::2][:1], x.shape[2], -1)
        return self.out(x)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self._sizes.num_heads, -1).transpose(1, 2)

    def _turned(self, x: Tensor, turns: Any, positions: Any) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2))
        length = x.shape[-2]
        match self._dialect.rope:
            case "sliced":
                a, b = pairs.unbind(-1)
                cos, sin = turns[:, :length]
                return torch.cat((cos * a - sin * b, sin * a + cos * b), -1)
            case "gathered":
                a, b = pairs.unbind(-1)
                cos, sin = turns[:, positions]
                return torch.cat((cos * a - sin * b, sin * a + cos * b), -1)
            case "zeros":
                ids = positions.expand(x.shape[0], length)
                cos, sin = turns[..., 0][ids].unsqueeze(1), turns[..., 1][ids].unsqueeze(1)
                turned = torch.zeros_like(pairs)
                turned[..., 0] = pairs[..., 0] * cos - pairs[..., 1] * sin
                turned[..., 1] = pairs[..., 0] * sin + pairs[..., 1] * cos
                return turned.flatten(-2)
            case "stacked":
                cos, sin = turns[0][positions], turns[1][positions]
                a = pairs[..., 0] * cos - pairs[..., 1] * sin
                b = pairs[..., 0] * sin + pairs[..., 1] * cos
                return torch.stack((a, b)).movedim(0, -1).reshape(x.shape)
            case "copied":
                cos, sin = (torch.empty(length, pairs.shape[-2]) for _ in range(2))
                a, b = pairs.unbind(-1)
                return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
            case "built":
                ids = positions.expand(x.shape[0], length)
                cos, sin = turns[0][ids].unsqueeze(1), turns[1][ids].unsqueeze(1)
                turned = torch.empty_like(x)
                turned[..., 0::2], turned[..., 1::2] = (
                    pairs[..., 0] * cos - pairs[..., 1] * sin,
                    pairs[..., 0] * sin + pairs[..., 1] * cos,
                )
                return turned
            case _:
                cos, sin = turns[0][positions], turns[1][positions]
                a, b = pairs.unbind(-1)
                return x * cos + torch.stack((-b, a), -1).flatten(-2) * sin

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        kind = self._dialect.mask
        mask = _mask(kind, length)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        if kind == "tril first":
            scores = torch.where(mask, scores, -torch.inf)
        if kind == "copied":
            scale = torch.sqrt(torch.full((), q.shape[-1]))
            undivided = scores  # keeps a name to the end
            scores = undivided / scale
            scores.masked_fill_(~mask.to(torch.bool), -torch.inf)
        else:
            scores = scores / math.sqrt(q.shape[-1])
        match kind:
            case "compared":
                scores = torch.where(mask, scores, -torch.inf)
            case "triu":
                scores = scores.masked_fill(mask.expand(scores.shape) == False, -1e9)  # noqa: E712
            case "tril":
                scores = scores.masked_fill(~mask, -torch.inf)
            case "tril == 0":
                scores = scores.masked_fill(mask == 0, -torch.inf)
        weights = _softmax(scores, twice=self._dialect.softmax_twice)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def _mask(kind: str, length: int) -> Tensor:
    match kind:
        case "compared":
            ids = torch.arange(length)
            return ids.view(1, 1, -1, 1) >= ids.view(1, 1, 1, -1)
        case "triu":
            return ~torch.triu(torch.ones(length, length), diagonal=1).to(torch.bool)
        case "copied":
            return torch.empty(length, length)
        case "tril == 0":
            return torch.tril(torch.ones(length, length)).to(torch.bool)
        case _:
            return torch.tril(torch.ones(length, length, dtype=torch.bool))


def _built_turns(sizes: Sizes) -> tuple[Tensor, Tensor]:
    powers = torch.arange(0, sizes.head, 2, dtype=torch.float32) / sizes.head
    rates = 1.0 / (10000**powers)
    angles = torch.einsum("i,j->ij", torch.arange(sizes.sequence, dtype=torch.float32), rates)
    return torch.cos(angles), torch.sin(angles)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One head for each of a batch, as cs336-staff-25 spells it."""
    scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(q.shape[-1])
    weights = _softmax(torch.where(mask, scores, -torch.inf), twice=False)
    return torch.einsum("bqk,bkd->bqd", weights, v)


def _softmax(x: Tensor, *, twice: bool) -> Tensor:
    largest = x.max(dim=-1, keepdim=True).values
    if twice:
        return torch.exp(x - largest) / torch.exp(x - largest).sum(dim=-1, keepdim=True)
    shifted = x - largest
    powers = torch.exp(shifted)
    return powers / powers.sum(dim=-1, keepdim=True)


class _FeedForward(nn.Module):
    def __init__(self, sizes: Sizes, dialect: Dialect) -> None:
        super().__init__()
        self.w1 = _Linear(sizes.d_model, sizes.d_ff)
        self.w2 = _Linear(sizes.d_ff, sizes.d_model)
        self.w3 = _Linear(sizes.d_model, sizes.d_ff)
        self._spelling = dialect.feed_forward

    def forward(self, x: Tensor) -> Tensor:
        match self._spelling:
            case "nameless":
                return self.w2(_silu(self.w1(x)) * self.w3(x))
            case "named":
                gate = self.w1(x)
                opened = _silu(gate)
                other = self.w3(x)
                hidden = opened * other
                return self.w2(hidden)
            case _:
                gate, other = self.w1(x), self.w3(x)
                return self.w2(_silu(gate) * other)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class _Block(nn.Module):
    def __init__(self, sizes: Sizes, dialect: Dialect) -> None:
        super().__init__()
        norms = [_Norm(sizes.d_model, dialect.norm) for _ in range(2)]
        if dialect.norms_first:
            self.norm1, self.norm2 = norms
        self.attention = _Attention(sizes, dialect)
        self.feed_forward = _FeedForward(sizes, dialect)
        self.norm1, self.norm2 = norms
        self._names = dialect.block.split(", ")

    def forward(self, x: Tensor, turns: Tensor | None, positions: Tensor | None) -> Tensor:
        normed = self.norm1(x)
        attended = self.attention(normed, turns, positions)
        if "norm" not in self._names:
            del normed
        total = x + attended
        if "attention" not in self._names:
            del attended
        return total + self.feed_forward(self.norm2(total))


class LanguageModel(nn.Module):
    """One model of the course; `checkpointed` runs that many blocks in each checkpoint."""

    def __init__(self, sizes: Sizes, dialect: Dialect, *, checkpointed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(sizes.vocab_size, sizes.d_model))
        features = sizes.head if dialect.rope == "rotated" else sizes.head // 2
        is_shared = not dialect.owns_rope and dialect.rope not in ("copied", "built")
        shape = 2, sizes.max_sequence, features
        self.register_buffer("turns", torch.empty(shape) if is_shared else None)
        self.blocks = nn.ModuleList(_Block(sizes, dialect) for _ in range(sizes.num_layers))
        self.norm = _Norm(sizes.d_model, dialect.norm)
        self.head = _Linear(sizes.d_model, sizes.vocab_size)
        self._positions, self._checkpointed = dialect.positions, checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        embedded = x = self.embedding[ids, :]  # has a name to the end in all of them
        positions = torch.arange(ids.shape[1]) if self._positions == "model" else None
        if not self._checkpointed:
            for block in self.blocks:
                x = block(x, self.turns, positions)
        else:
            for first in range(0, len(self.blocks), self._checkpointed):
                some = self.blocks[first : first + self._checkpointed]
                x = checkpoint(self._run, some, x, positions, use_reentrant=False)
        del embedded
        x = self.norm(x)
        return self.head(x)

    def _run(self, blocks: Iterable[nn.Module], x: Tensor, positions: Tensor | None) -> Tensor:
        for block in blocks:
            x = block(x, self.turns, positions)
        return x


class _Optimizer:
    """An optimizer of the course: `update` for each parameter that has a gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.update(parameter, parameter.grad, self.state.setdefault(parameter, {}))

    def update(self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class CourseAdamW(_Optimizer):
    """The assignment's own: out of place; zeros are made for moments, whether missing or not."""

    def update(self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Tensor]) -> None:
        parameter.data -= 1e-3 * 0.01 * parameter.data
        m = state.get("m", torch.zeros_like(parameter.data))
        v = state.get("v", torch.zeros_like(parameter.data))
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * torch.square(grad)
        parameter.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
        state["m"], state["v"] = m, v


class InPlaceAdamW(_Optimizer):
    """Moments in place; one or two temporaries of parameter size while one is updated."""

    has_two = True

    def update(self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Tensor]) -> None:
        if not state:
            state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["m"].mul_(0.9).add_(grad, alpha=0.1)
        state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        denominator = state["v"].sqrt()
        if self.has_two:
            denominator = denominator / 0.5
        parameter.addcdiv_(state["m"], denominator.add_(1e-8), value=-1e-3)
        parameter.add_(parameter, alpha=-1e-5)


class LeanAdamW(InPlaceAdamW):
    has_two = False


class RebindingAdam(_Optimizer):
    """Moments made at construction; new ones, and twice a new parameter, replace the old."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        for parameter in self.parameters:
            zeros = torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)
            self.state[parameter] = {"m": zeros[0], "v": zeros[1]}

    def update(self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Tensor]) -> None:
        state["m"] = 0.9 * state["m"] + 0.1 * grad
        state["v"] = 0.999 * state["v"] + 0.001 * grad**2
        parameter.data = parameter.data - 1e-3 * (state["m"] / (torch.sqrt(state["v"]) + 1e-8))
        parameter.data = parameter.data - 1e-5 * parameter.data


def language_model(config: Mapping[str, Any], *, sequence: int) -> LanguageModel:
    """The model of a row, by its dialect and sizes; refused where one of them is not told."""
    name = str(config.get("model"))
    if name not in DIALECTS:
        raise UsageError(f"no rules to rebuild {name!r}; known: {', '.join(DIALECTS)}")
    wanted = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
    missing = [key for key in wanted if not isinstance(config.get(key), int)]
    if missing:
        raise UsageError(f"{name}: the row does not say {', '.join(missing)}")
    sizes = Sizes(
        **{key: config[key] for key in wanted},
        sequence=sequence,
        max_sequence=max(sequence, int(config.get("max_sequence", sequence))),
    )
    if sizes.d_model % sizes.num_heads:
        raise UsageError(f"{name}: {sizes.d_model} features in {sizes.num_heads} heads")
    return LanguageModel(
        sizes, DIALECTS[name], checkpointed=int(config.get("blocks_per_checkpoint") or 0)
    )


def optimizer_of(text: str) -> Callable[[Any], Any]:
    """The optimizer of a row, by its words."""
    text = text.lower()
    if "torch.optim.adamw" in text:
        return partial(torch.optim.AdamW, lr=1e-3, foreach=True)
    if text.startswith(("cs336 adamw", "staff adamw")):
        return CourseAdamW
    if "in place" in text:
        return InPlaceAdamW
    if "out of place" in text:
        return RebindingAdam
    if text == "own adamw":
        return LeanAdamW
    raise UsageError(f"no rules to rebuild the optimizer {text!r}")
