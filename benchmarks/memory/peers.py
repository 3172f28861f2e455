"""Other ways to save activation memory in PyTorch, applied to a model in place."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from memory.models import blocks_in
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

__all__ = ["PEERS", "Peer"]

_DEAR = [
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclass(frozen=True)
class Peer:
    """One way.

    Attributes:
        apply: changes a model; gets the names of its chains of blocks.
        first: what the first step must run in, where the way is read from a global setting.
    """

    apply: Callable[[nn.Module, Sequence[str]], None]
    first: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Checkpointed(nn.Module):
    """Blocks in a row of which only the input is kept."""

    def __init__(self, layers: Sequence[nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks; backward runs them once more."""
        return checkpoint(self.layers, x, use_reentrant=False, **self.options)


def _checkpoint(
    model: nn.Module,
    chains: Sequence[str],
    *,
    together: int = 1,
    every: int = 1,
    options: dict[str, Any] | None = None,
) -> None:
    """Put checkpoints around blocks.

    Args:
        model: is changed.
        chains: its attributes that hold blocks in a row.
        together: how many neighbours share a checkpoint.
        every: only each so-manieth group gets one; the others are kept.
        options: for torch's `checkpoint`.
    """
    for name in chains:
        chain = getattr(model, name)
        blocks = blocks_in(chain)
        groups = [blocks[at : at + together] for at in range(0, len(blocks), together)]
        layers: list[nn.Module] = []
        for number, group in enumerate(groups):
            members = [layer for block in group for layer in block]
            if number % every == 0:
                layers.append(_Checkpointed(members, options or {}))
            else:
                layers += members
        is_list = isinstance(chain, nn.ModuleList)
        setattr(model, name, nn.ModuleList(layers) if is_list else nn.Sequential(*layers))


def _compile(model: nn.Module, _: Sequence[str]) -> None:
    model.compile(backend="aot_eager", fullgraph=True, dynamic=False)


def _budget(share: float) -> Peer:
    """The partitioner's own budget, a share of what plain autograd saves; read when it compiles."""
    return Peer(_compile, partial(functorch_config.patch, activation_memory_budget=share))


_SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, _DEAR)}

PEERS: dict[str, Peer] = {
    "checkpoint each block": Peer(_checkpoint),
    "checkpoint every second block": Peer(partial(_checkpoint, every=2)),
    "checkpoint pairs of blocks": Peer(partial(_checkpoint, together=2)),
    "selective, save conv and mm": Peer(partial(_checkpoint, options=_SELECTIVE)),
    "activation_memory_budget 0.5": _budget(0.5),
    "activation_memory_budget 0.25": _budget(0.25),
}
