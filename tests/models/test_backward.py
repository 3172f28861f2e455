"""A real step of the small models: finite loss, and a gradient for every parameter."""

import pytest
import torch

from bayplan.models import load
from bayplan.models.gpt import GptConfig
from bayplan.models.llama import LlamaConfig

TINY_GPT = GptConfig(num_layers=2, num_heads=2, width=16, context=8, vocabulary=32, dropout=0.1)
TINY_LLAMA = LlamaConfig(
    num_layers=2, num_heads=2, width=16, hidden=24, context=8, vocabulary=32, dtype=torch.float32
)


@pytest.mark.parametrize(
    ("name", "options", "output_shape"),
    [
        ("alexnet", {"image_size": 63}, (2, 1000)),
        ("alexnet-oneflow", {"image_size": 195}, (2, 1000)),
        ("resnet18", {"image_size": 64}, (2, 1000)),
        ("gpt", {"config": TINY_GPT}, (2, 8, 32)),
        ("llama-7b", {"config": TINY_LLAMA}, (2, 8, 32)),
    ],
)
def test_every_parameter_receives_a_gradient(
    name: str, options: dict[str, object], output_shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, (inputs, targets), loss_fn = load(name)(2, **options)
    output = model(inputs)
    loss = loss_fn(output, targets)
    loss.backward()

    assert output.shape == output_shape
    assert torch.isfinite(loss)
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
