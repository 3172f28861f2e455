"""What the language models share: random tokens, next-token loss, and how weights start."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayplan.models.building import BuiltModel

__all__ = ["initialize_transformer", "next_token_loss", "with_tokens"]

INITIAL_STD = 0.02


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of (batch, sequence, vocabulary) logits, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def with_tokens(
    model: nn.Module, batch_size: int, *, sequence: int, context: int, vocabulary: int
) -> BuiltModel:
    """Join a language model with random tokens, the same tokens one step later, and the loss."""
    if not 1 <= sequence <= context:
        raise ValueError(
            f"sequence is {sequence} tokens, the model's context {context}. "
            f"Use a sequence of 1 to {context}, or a config with a larger context."
        )
    tokens = torch.randint(vocabulary, (batch_size, sequence + 1))
    # Copies, because two overlapping views of one storage would reach graph capture as aliases.
    # clone, not contiguous(): for batch_size 1 the slices are contiguous already.
    inputs = tokens[:, :-1].clone(memory_format=torch.contiguous_format)
    targets = tokens[:, 1:].clone(memory_format=torch.contiguous_format)
    return model, (inputs, targets), next_token_loss


@torch.no_grad()
def initialize_transformer(model: nn.Module, *, num_layers: int) -> None:
    """Set every parameter as GPT-2 does, also those that came from meta by `to_empty`.

    Matrices are normal with deviation 0.02; those that write into the residual stream (named
    `output`) are smaller by sqrt(2 * num_layers), so that the sum of all layers keeps its scale.
    Biases start at zero, norm scales at one.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            scale = 1 / math.sqrt(2 * num_layers) if name.endswith(".output.weight") else 1.0
            parameter.normal_(std=INITIAL_STD * scale)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)
