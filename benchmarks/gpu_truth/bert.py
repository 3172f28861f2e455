"""BERT for classification as it was written in 2022, and the optimizers that trained it.

Attention is spelled with its probabilities: there was no fused attention. Checkpointing wraps each
layer. The optimizers are those of the tables: what they allocate is theirs, not their arithmetic.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["Adafactor", "AdamW", "Bert", "BertSizes", "EightBitAdam", "PretrainedBert"]


@dataclass(frozen=True, kw_only=True)
class BertSizes:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    positions: int = 512
    num_labels: int = 2
    dropout: float = 0.1


class _Softmax(torch.autograd.Function):
    """As torch had it before 1.11: its input is kept for backward beside its output.

    `_softmax_backward_data` took the input itself where later it takes its dtype.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = functional.softmax(scores, dim=-1)
        ctx.save_for_backward(scores, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        scores, weights = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grads[0], weights, -1, scores.dtype)


class _Attention(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(sizes.hidden, sizes.hidden) for _ in range(3))
        self._heads, self._dropout = sizes.heads, sizes.dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part(x).view(*x.shape[:2], self._heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2)
        scores = scores / math.sqrt(query.shape[-1])
        scores = scores + mask
        weights = _Softmax.apply(scores)
        weights = functional.dropout(weights, self._dropout)
        x = weights @ value
        return x.transpose(1, 2).contiguous().flatten(2)


class _Added(nn.Module):
    """A projection, dropout, and the norm of its sum with what went in before."""

    def __init__(self, inputs: int, sizes: BertSizes) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.dropout(x)
        return self.norm(x + before)


class _Layer(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.attention = _Attention(sizes)
        self.attended = _Added(sizes.hidden, sizes)
        self.inner = nn.Linear(sizes.hidden, sizes.intermediate)
        self.outer = _Added(sizes.intermediate, sizes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = self.attended(self.attention(x, mask), x)
        inner = functional.gelu(self.inner(attended))
        return self.outer(inner, attended)


class Bert(nn.Module):
    """Ids to the loss of a classification by the first token."""

    def __init__(self, sizes: BertSizes, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocab, sizes.hidden, padding_idx=0)
        self.positions = nn.Embedding(sizes.positions, sizes.hidden)
        self.types = nn.Embedding(2, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden)
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))
        self.pooler = nn.Linear(sizes.hidden, sizes.hidden)
        self.classifier = nn.Linear(sizes.hidden, sizes.num_labels)
        self.register_buffer("ids", torch.arange(sizes.positions))
        self.register_buffer("type_ids", torch.zeros(sizes.positions, dtype=torch.int64))
        self._is_checkpointed = is_checkpointed

    def encoded(self, ids: Tensor) -> Tensor:
        mask = (1.0 - torch.ones(ids.shape)[:, None, None, :]) * -10000.0
        x = self.words(ids) + self.types(self.type_ids[: ids.shape[1]].expand(ids.shape))
        x += self.positions(self.ids[: ids.shape[1]])
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            if self._is_checkpointed:
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask)
        return x

    def classified(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.classified(self.encoded(ids))
        return functional.cross_entropy(logits, labels), logits


class PretrainedBert(nn.Module):
    """Ids, places of masked words, these words, and what follows, to the loss of pre-training."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.bert = Bert(sizes)
        self.transform = nn.Linear(sizes.hidden, sizes.hidden)
        self.transformed = nn.LayerNorm(sizes.hidden)
        self.bias = nn.Parameter(torch.zeros(sizes.vocab))

    def forward(
        self, ids: Tensor, places: Tensor, words: Tensor, follows: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = self.bert.encoded(ids)
        masked = x.flatten(0, 1).index_select(0, places)
        masked = self.transformed(functional.gelu(self.transform(masked)))
        logits = functional.linear(masked, self.bert.words.weight, self.bias)
        loss = functional.cross_entropy(logits, words)
        return loss + functional.cross_entropy(self.bert.classified(x), follows), logits


class _Optimizer:
    """One parameter after the other, after the norm of all gradients was limited."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in self.parameters]
        factor = 1.0 / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        for parameter in self.parameters:
            state = self.state.setdefault(parameter, {})
            if not state:
                state |= self.made(parameter)
            self.update(parameter, parameter.grad, state)

    def made(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        raise NotImplementedError

    def update(self, parameter: nn.Parameter, grad: Any, state: dict[str, Tensor]) -> None:
        raise NotImplementedError


class AdamW(_Optimizer):
    """Two moments in place and one temporary, as transformers' own AdamW had it."""

    def made(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter) for name in ("first", "second")}

    def update(self, parameter: nn.Parameter, grad: Any, state: dict[str, Tensor]) -> None:
        state["first"].mul_(0.9).add_(grad, alpha=0.1)
        state["second"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        denominator = state["second"].sqrt().add_(1e-6)
        parameter.addcdiv_(state["first"], denominator, value=-1e-3)


class Adafactor(_Optimizer):
    """Second moments by rows and columns, no first moment, as in transformers."""

    def made(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter.dim() < 2:
            return {"second": torch.zeros_like(parameter)}
        shape = parameter.shape
        return {"rows": torch.zeros(shape[:-1]), "columns": torch.zeros(shape[:-2] + shape[-1:])}

    def update(self, parameter: nn.Parameter, grad: Any, state: dict[str, Tensor]) -> None:
        change = (grad**2) + 1e-30
        if "rows" in state:
            state["rows"].mul_(0.9).add_(change.mean(dim=-1), alpha=0.1)
            state["columns"].mul_(0.9).add_(change.mean(dim=-2), alpha=0.1)
            rows = (state["rows"] / state["rows"].mean(dim=-1, keepdim=True)).rsqrt_()
            change = torch.mul(rows.unsqueeze(-1), state["columns"].unsqueeze(-2).rsqrt())
        else:
            state["second"].mul_(0.9).add_(change, alpha=0.1)
            change = state["second"].rsqrt()
        change.mul_(grad)
        size = torch.linalg.vector_norm(change) / change.numel() ** 0.5
        change.div_(size.clamp_(min=1.0)).mul_(1e-3)
        parameter.add_(-change)


class EightBitAdam(_Optimizer):
    """Moments of a byte with a float for each block; small tensors keep theirs in float32.

    One kernel reads and writes all of it in place, which an in-place product stands for here.
    """

    block, smallest = 2048, 4096

    def made(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter.numel() < self.smallest:
            return {name: torch.zeros_like(parameter) for name in ("first", "second")}
        made = {}
        for name in ("first", "second"):
            made[name] = torch.zeros_like(parameter, dtype=torch.uint8)
            made[f"{name} scale"] = torch.zeros(-(-parameter.numel() // self.block))
        return made

    def update(self, parameter: nn.Parameter, grad: Any, state: dict[str, Tensor]) -> None:
        for tensor in state.values():
            tensor.mul_(1)
        parameter.add_(grad, alpha=-1e-3)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw (transformers)": AdamW,
    "adafactor": Adafactor,
    "bitsandbytes adam8bit": EightBitAdam,
}
