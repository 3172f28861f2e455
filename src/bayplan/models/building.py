"""What builders of reference models share: the type that they return, images, and text.

Builders create everything on the current default device, so the same call under
`torch.device("meta")` or a FakeTensorMode describes a model without holding it.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from bayplan.models.gpt import GptConfig
    from bayplan.models.llama import LlamaConfig

__all__ = [
    "NUM_CLASSES",
    "BuiltModel",
    "initialize_convolutions",
    "initialize_transformer",
    "with_images",
    "with_tokens",
]

BuiltModel = tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]
"""A model in training mode, a random batch `(inputs, targets)`, and its `loss(output, targets)`."""

NUM_CLASSES = 1000
INITIAL_STD = 0.02  # of a transformer's matrices


def with_images(
    model: nn.Module, batch_size: int, *, image_size: int, num_classes: int = NUM_CLASSES
) -> BuiltModel:
    """Join a classifier with random square RGB images, random classes and cross entropy."""
    images = torch.randn(batch_size, 3, image_size, image_size)
    classes = torch.randint(num_classes, (batch_size,))
    return model, (images, classes), nn.CrossEntropyLoss()


def initialize_convolutions(model: nn.Module) -> None:
    """Start every convolution at the scale that keeps gradients level through ReLU (He 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of (batch, sequence, vocabulary) logits, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def with_tokens(
    model: nn.Module, batch_size: int, sequence: int | None, config: "GptConfig | LlamaConfig"
) -> BuiltModel:
    """Join a language model with random tokens, the same tokens one step later, and the loss."""
    context = config.context
    sequence = context if sequence is None else sequence
    if not 1 <= sequence <= context:
        raise ValueError(
            f"sequence is {sequence} tokens, the model's context {context}. "
            f"Use a sequence of 1 to {context}, or a config with a larger context."
        )
    tokens = torch.randint(config.vocabulary, (batch_size, sequence + 1))
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
