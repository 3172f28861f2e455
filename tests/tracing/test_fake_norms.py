"""Fake normalisations against the real ones, in all mixtures of dtypes and layouts that can meet.

Every normalisation that a forward and a backward really run is asked once more on fake tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bayplan import torch_compat
from bayplan.tracing.fake_norms import correct_fake_norms

NORMS: dict[str, Callable[..., nn.Module]] = {
    "batch": partial(nn.BatchNorm2d, 6),
    "batch, not tracked": partial(nn.BatchNorm2d, 6, track_running_stats=False),
    "instance": partial(nn.InstanceNorm2d, 6),
    "instance, tracked": partial(nn.InstanceNorm2d, 6, track_running_stats=True),
    "group": partial(nn.GroupNorm, 2, 6),
    "layer": partial(nn.LayerNorm, 8),
    "rms": partial(nn.RMSNorm, 8),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": partial(torch.Tensor.contiguous, memory_format=torch.channels_last),
    "transposed": lambda image: image.transpose(2, 3),
}
# Of the image and of the parameters: alone, in half precision, under autocast.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
]


def build(name: str, *, is_affine: bool) -> nn.Module:
    word = "elementwise_affine" if name in ("layer", "rms") else "affine"
    return NORMS[name](**{word: is_affine})


class Compare(torch_compat.OperatorWatch):
    """Runs every operator for real, and normalisations on fake tensors as well."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: list[str] = []

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        real = func(*args, **kwargs)
        if "norm" in str(func):
            self.compared.append(str(func))
            with torch_compat.FakeTensorMode() as mode:
                known = torch_compat.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
                fake = func(*known[0], **known[1])
            assert described(fake) == described(real), (func, described(args))
        return real


def described(values: Any) -> list[Any]:
    return [
        (leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in torch_compat.tree_leaves(values)
    ]


@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_fake_norms_are_what_real_ones_are(name, is_affine):
    correct_fake_norms()
    for image_dtype, dtype in DTYPES:
        for layout, lay_out in LAYOUTS.items():
            for gradient_layout in (torch.Tensor.contiguous, LAYOUTS["transposed"]):
                norm = build(name, is_affine=is_affine).to(dtype)
                image = lay_out(torch.randn(4, 6, 8, 8).to(image_dtype)).requires_grad_()
                with Compare() as compare:
                    normalised = norm(image)
                    normalised.backward(gradient_layout(torch.randn_like(normalised)))
                assert name == "rms" or len(compare.compared) == 2, layout


@pytest.mark.parametrize("name", ["batch", "group", "layer"])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_gradients_that_nobody_asked_for(name, is_frozen):
    """Of a frozen norm, and of the first layer of a model."""
    correct_fake_norms()
    norm = build(name, is_affine=True).requires_grad_(not is_frozen)
    image = torch.randn(4, 6, 8, 8, dtype=torch.bfloat16, requires_grad=is_frozen)
    with Compare():
        norm(image).float().sum().backward()


def test_evaluation_makes_no_statistics():
    correct_fake_norms()
    norm = nn.BatchNorm2d(6).eval()
    with Compare() as compare:
        norm(torch.randn(4, 6, 8, 8, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert len(compare.compared) == 2


def test_other_devices_keep_torchs_own_rules():
    correct_fake_norms()
    with torch_compat.FakeTensorMode():
        image = torch.empty(2, 6, 4, 4, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(6, device="cuda")
        norm = torch.ops.aten._native_batch_norm_legit_functional.default
        _, mean, *_ = norm(image, *[weight] * 4, True, 0.1, 1e-5)
    assert mean.device.type == "cuda"
    assert mean.dtype == torch.float32


aten = torch.ops.aten
# Arguments after a gradient of one number, and two tensors.
LOSSES: dict[Any, Callable[..., tuple[Any, ...]]] = {
    aten.mse_loss_backward.default: lambda g, x, y: (g, x, y, 1),
    aten.smooth_l1_loss_backward.default: lambda g, x, y: (g, x, y, 1, 1.0),
    aten.huber_loss_backward.default: lambda g, x, y: (g, x, y, 1, 1.0),
    aten.binary_cross_entropy.default: lambda g, x, y: (x, y, None, 0),
    aten._log_softmax_backward_data.default: lambda g, x, y: (x, y, 1, torch.float32),
    aten.log_sigmoid_forward.default: lambda g, x, y: (x,),
    aten.elu_backward.default: lambda g, x, y: (x, 1.0, 1.0, 1.0, False, y),
    aten.hardsigmoid_backward.default: lambda g, x, y: (x, y),
    aten.hardswish_backward.default: lambda g, x, y: (x, y),
    aten.hardtanh_backward.default: lambda g, x, y: (x, y, 0.0, 1.0),
    aten.logit_backward.default: lambda g, x, y: (x, y, None),
    aten.softplus_backward.default: lambda g, x, y: (x, y, 1.0, 20.0),
    aten.native_dropout_backward.default: lambda g, x, y: (x, y > 0.5, 2.0),
}


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("operator", LOSSES, ids=str)
def test_fake_losses_and_activations_are_laid_out_as_real_ones(operator, first, second):
    correct_fake_norms()
    shapes = [(2, 6, 8, 4) if each == "transposed" else (2, 6, 4, 8) for each in (first, second)]
    x, y = (
        LAYOUTS[each](torch.rand(shape))
        for each, shape in zip((first, second), shapes, strict=True)
    )
    args = LOSSES[operator](torch.ones(()), x, y)
    with torch_compat.FakeTensorMode() as mode:
        fake = operator(*torch_compat.tree_map_only(torch.Tensor, mode.from_tensor, args))
    assert described(fake) == described(operator(*args))
