"""What torch's CPU kernels of norms, losses and activations make, where fake kernels err.

The kernels keep statistics in float32 when a half-precision tensor meets float32 parameters, which
is what autocast gives them. torch's fake kernels say half precision, so a traced graph fails when
it meets the real tensors. Layouts differ as well: a BatchNorm's results are laid out like its
input, in one of torch's memory formats. Losses return gradients without gaps in the order of their
dimensions, whatever order the input has; some gradients of activations follow their first argument.

The kernels of other devices have other rules, and torch's own fake kernels are kept for them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from bayplan import torch_compat
from bayplan.devices.device import device_of

__all__ = ["correct_fake_norms"]

aten = torch.ops.aten
_Rule = Callable[..., Any]


@cache
def correct_fake_norms() -> None:
    """Let fake normalisations on the CPU have the dtypes and layouts of the real ones.

    For the process: torch has one table of fake kernels.
    """
    for operator, rule in _RULES.items():
        torch_compat.set_fake_kernel(operator, _on_cpu(rule))


def _on_cpu(rule: _Rule) -> _Rule:
    def choose(otherwise: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not device_of(args[0].device).runs_cpu_kernels:
            return otherwise(*args, **kwargs)
        return rule(otherwise, *args, **kwargs)

    return choose


def _statistics_dtype(image: torch.Tensor, *others: torch.Tensor | None) -> torch.dtype:
    """Of statistics and of the parameters' gradients: float32 once dtypes are mixed."""
    is_mixed = any(other is not None and other.dtype != image.dtype for other in others)
    return torch.float32 if is_mixed else image.dtype


def _like(image: torch.Tensor) -> torch.Tensor:
    """A tensor of an image's shape, in the memory format that torch takes the image to have."""
    return torch.empty_like(image, memory_format=torch_compat.suggested_format(image))


def _batch_norm(
    _: _Rule,
    image: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *__: float,
) -> tuple[torch.Tensor, ...]:
    dtype = _statistics_dtype(image, weight, bias, mean, variance)
    num_channels = image.shape[1] if training else 0
    statistics = (image.new_empty(num_channels, dtype=dtype) for _ in range(2))
    return _like(image), *statistics


def _batch_norm_without_statistics(
    _: _Rule, image: torch.Tensor, weight: Any, bias: Any, training: bool, *__: float
) -> tuple[torch.Tensor, ...]:
    return _batch_norm(_, image, weight, bias, None, None, training)


def _functional_batch_norm(_: _Rule, *args: Any) -> tuple[torch.Tensor, ...]:
    running = (torch.empty_like(each) for each in args[3:5])
    return *_batch_norm(_, *args), *running


def _batch_norm_backward(
    _: _Rule,
    gradient: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    saved_mean: torch.Tensor | None,
    saved_deviation: torch.Tensor | None,
    training: bool,
    epsilon: float,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    others = (weight, mean, variance, saved_mean, saved_deviation)
    dtype = _statistics_dtype(image, *others)
    of_image, *of_parameters = output_mask
    return (
        _like(image) if of_image else None,
        *(
            image.new_empty(image.shape[1], dtype=dtype) if asked else None
            for asked in of_parameters
        ),
    )


def _group_norm(
    otherwise: _Rule, image: torch.Tensor, weight: Any, bias: Any, *sizes: Any
) -> tuple[torch.Tensor, ...]:
    dtype = _statistics_dtype(image, weight, bias)
    normalised, mean, deviation = otherwise(image, weight, bias, *sizes)
    return normalised, mean.to(dtype), deviation.to(dtype)


def _group_norm_backward(
    otherwise: _Rule, gradient: torch.Tensor, image: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    of_image, *of_parameters = otherwise(gradient, image, *rest)
    return None if of_image is None else of_image.to(image.dtype), *of_parameters


def _layer_norm(
    otherwise: _Rule, image: torch.Tensor, shape: list[int], weight: Any, bias: Any, epsilon: float
) -> tuple[torch.Tensor, ...]:
    dtype = _statistics_dtype(image, weight, bias)
    normalised, mean, deviation = otherwise(image, shape, weight, bias, epsilon)
    return normalised, mean.to(dtype), deviation.to(dtype)


def _layer_norm_backward(
    otherwise: _Rule, gradient: torch.Tensor, image: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    of_image, *of_parameters = otherwise(gradient, image, *rest)
    return None if of_image is None else of_image.contiguous(), *of_parameters


def _contiguous(otherwise: _Rule, *args: Any, **kwargs: Any) -> Any:
    """The results of a kernel that returns them in the order of their dimensions."""
    made = otherwise(*args, **kwargs)
    return torch_compat.tree_map_only(torch.Tensor, lambda each: each.contiguous(), made)


def _like_first(_: _Rule, first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result of a kernel over tensors of one shape, laid out as the first of them."""
    others = [each for each in torch_compat.tensors_in((args, kwargs)) if each.shape == first.shape]
    return torch.empty_like(first, dtype=torch.result_type(first, others[0]) if others else None)


def _cross_entropy(otherwise: _Rule, first: torch.Tensor, *args: Any) -> torch.Tensor:
    made = otherwise(first, *args)
    return _like_first(otherwise, first, *args) if made.shape == first.shape else made


_RULES: dict[Any, _Rule] = {
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.log_sigmoid_forward.default: _contiguous,
    aten.elu_backward.default: _like_first,
    aten.hardsigmoid_backward.default: _like_first,
    aten.hardswish_backward.default: _like_first,
    aten.hardtanh_backward.default: _like_first,
    aten.logit_backward.default: _like_first,
    aten.softplus_backward.default: _like_first,
    aten.native_dropout_backward.default: _like_first,
    aten.binary_cross_entropy.default: _cross_entropy,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten._native_batch_norm_legit_functional.default: _functional_batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
