"""The reference models and one of transformers, small enough for tests: every layer, few channels.

Only sizes change. Which operators a model has, and so where it can be cut, stays as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import CrossEntropyLoss, functional

from bayplan.models.alexnet import AlexNet
from bayplan.models.gpt import Gpt, GptConfig
from bayplan.models.resnet import BasicBlock, ResNet
from bayplan.models.vgg import VGG16

NUM_CLASSES, VOCABULARY, LENGTH = 10, 40, 8
NARROW = 16  # channels are divided by this
PIXELS = {"alexnet": 64, "vgg16": 32, "resnet18": 64}


def narrowed(model: nn.Module) -> nn.Module:
    """The same layers with a sixteenth of the channels between them."""

    def fewer(number: int) -> int:
        return number // NARROW if number >= NARROW else number

    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Conv2d):
                shape = {"stride": layer.stride, "padding": layer.padding}
                setattr(
                    parent,
                    name,
                    nn.Conv2d(
                        fewer(layer.in_channels),
                        fewer(layer.out_channels),
                        layer.kernel_size,
                        bias=layer.bias is not None,
                        **shape,
                    ),
                )
            elif isinstance(layer, nn.Linear):
                outputs = layer.out_features
                outputs = fewer(outputs) if outputs > NUM_CLASSES else outputs
                setattr(parent, name, nn.Linear(fewer(layer.in_features), outputs))
            elif isinstance(layer, nn.BatchNorm2d):
                setattr(parent, name, nn.BatchNorm2d(fewer(layer.num_features)))
    return model


def images(name: str, build: Callable[[], nn.Module], num_samples: int, dtype: torch.dtype) -> Any:
    with torch.device("meta"):  # no memory for all the channels
        wide = build()
    size = PIXELS[name]
    batch = torch.randn(num_samples, 3, size, size, dtype=dtype)
    return narrowed(wide), (batch, torch.randint(NUM_CLASSES, (num_samples,))), CrossEntropyLoss()


def next_token(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The reference model's own loss is computed in float32, whatever the dtype."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def alexnet(num_samples: int, dtype: torch.dtype) -> Any:
    return images("alexnet", lambda: AlexNet(NUM_CLASSES), num_samples, dtype)


def vgg16(num_samples: int, dtype: torch.dtype) -> Any:
    return images("vgg16", lambda: VGG16(NUM_CLASSES), num_samples, dtype)


def resnet18(num_samples: int, dtype: torch.dtype) -> Any:
    """One block of each layer: the others are the same again."""
    blocks = (1, 1, 1, 1)
    return images("resnet18", lambda: ResNet(BasicBlock, blocks, NUM_CLASSES), num_samples, dtype)


def resnet18_frozen(num_samples: int, dtype: torch.dtype) -> Any:
    """With statistics that were found before, and stay."""
    model, batch, loss_fn = resnet18(num_samples, dtype)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(std=0.1)
            layer.running_var.uniform_(0.5, 2.0)
            layer.eval()
    return model, batch, loss_fn


def gpt(num_samples: int, _: torch.dtype) -> Any:
    config = GptConfig(
        num_layers=2, num_heads=2, width=16, context=LENGTH, vocabulary=VOCABULARY, dropout=0.1
    )
    tokens = torch.randint(VOCABULARY, (2, num_samples, LENGTH))
    return Gpt(config), (tokens[0].clone(), tokens[1].clone()), next_token


def bert(num_samples: int, _: torch.dtype) -> Any:
    """Of transformers, with its dropout; its loss is computed in the model's dtype."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    ids = torch.randint(VOCABULARY, (num_samples, LENGTH))
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids.flip(1)}, None


BUILDERS: dict[str, Callable[[int, torch.dtype], Any]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet18": resnet18,
    "resnet18-frozen": resnet18_frozen,
    "gpt": gpt,
    "bert": bert,
}
