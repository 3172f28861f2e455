"""BatchNorm over the samples of several replicas, as if one device had them all.

Every replica computes the count, mean and sum of squared deviations of its own samples. An
all-gather of these few numbers gives all replicas the same bits, added in the same order. With
counts n, means m and sums of squared deviations s of the replicas

    N = sum n      M = sum n m / N      S = sum (s + n (m - M)^2)      variance = S / N

which holds for pieces of any sizes and loses nothing to large means. Backward needs two more sums
over all samples: of the gradient, and of the gradient times the normalised values. Gradients of
weight and bias stay local until the all-reduce of all gradients after the step.

torch's `SyncBatchNorm` does the same on GPUs, and only there.

NOTE [ Collectives inside a stage ]
1. A replica waits inside its forward or backward for the others. All replicas of a stage run the
   same collectives in the same order, whatever the sizes of their pieces and whatever they repeat:
   an operator with a collective is never repeated. So the collectives of one action pair up.
2. So an action of a stage with replicas begins on all of them or on none. `simulating/checking.py`
   proves before a run that such action lists end, as it does for receives. Sends and receives are
   posted without waiting, so they go on while a replica waits.
3. Each stage has a process group of its own for this, so that its collectives never pair up with
   others, such as the gradients' all-reduces, which are posted ahead.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = [
    "Replicas",
    "norm_of_replicas",
    "norm_of_replicas_backward",
    "normalise",
    "synchronised_norm",
    "synchronised_norm_backward",
]

aten = torch.ops.aten


class Replicas(Protocol):
    """The replicas of a stage, as one of them sees them."""

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """What all of them have, in rows, in one order for all."""
        ...

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of what they have."""
        ...


class _Alone:
    """A replica that has no others, for pricing and for tensors without memory."""

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        return own.unsqueeze(0)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        return own


def synchronised_norm(*arguments: Any) -> tuple[Any, ...]:
    """Stands in a graph until it is known who the replicas are; see `norm_of_replicas`."""
    return norm_of_replicas(_Alone(), *arguments)


def norm_of_replicas(
    replicas: Replicas,
    image: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    momentum: float,
    epsilon: float,
    stride: Sequence[int],
) -> tuple[Any, ...]:
    """BatchNorm in training, by the statistics of all replicas' samples.

    Args:
        image: of this replica; channels are its second dimension.
        stride: of the result.

    Returns:
        the normalised values, mean, inverse deviation, and the new running mean and variance.
    """
    # In one row: means, sums of squared deviations, and the count.
    own_count, values = _count(image), image.to(_exact(image.dtype))
    own_mean, own_variance = aten.batch_norm_update_stats(values, None, None, 0.0)
    own = torch.cat([own_mean.double(), own_variance.double() * own_count, own_count])
    gathered = replicas.gathered(own)
    counts = gathered[:, -1:]
    means, squares = gathered[:, :-1].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    deviations = (squares + counts * (means - mean).square()).sum(0)
    inverse_deviation = (deviations / count + epsilon).rsqrt()
    dtype = _exact(image.dtype)
    rounded = mean.to(dtype, copy=True), inverse_deviation.to(dtype)
    output = normalise(image, weight, bias, *rounded, stride)
    if running_mean is None or running_variance is None:
        return (output, *rounded, None, None)
    # Of samples, where the variance that normalises is of the batch itself.
    variance = _moved(running_variance, deviations / (count - 1), momentum)
    return (output, *rounded, _moved(running_mean, mean, momentum), variance)


def normalise(
    image: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """The values normalised by known statistics; without a stride, laid out as torch does."""
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
    output = None if stride is None else image.new_empty_strided(tuple(image.shape), tuple(stride))
    return torch.addcmul(_by_channel(shift, image), image, _by_channel(scale, image), out=output)


def synchronised_norm_backward(*arguments: Any) -> tuple[Any, ...]:
    """Stands in a graph as `synchronised_norm` does; see `norm_of_replicas_backward`."""
    return norm_of_replicas_backward(_Alone(), *arguments)


def norm_of_replicas_backward(
    replicas: Replicas,
    gradient: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    wanted: Sequence[bool],
    stride: Sequence[int],
) -> tuple[Any, ...]:
    """The gradients of `norm_of_replicas`: of its image, and this replica's of weight and bias.

    Args:
        wanted: which of the three to compute; without the first, nobody is waited for.
        stride: of the image's gradient.
    """
    # The kernel sums up what this replica has, by statistics of all.
    statistics = (None, None, mean, inverse_deviation, True, 0.0, [False, True, True])
    _, of_weight, of_bias = aten.native_batch_norm_backward(gradient, image, weight, *statistics)
    of_image = None
    if wanted[0]:
        own = torch.cat([of_weight.double(), of_bias.double(), _count(image)])
        total = replicas.total(own)
        tilt, level = (total[:-1] / total[-1]).chunk(2)
        scale = inverse_deviation.double() * (1.0 if weight is None else weight.double())
        # The sum of gradient, deviation from the mean and one, each with its factor by channel.
        factors = (scale, -scale * inverse_deviation * tilt, -scale * level)
        by_gradient, by_deviation, by_one = (
            _by_channel(factor.to(mean.dtype), image) for factor in factors
        )
        result = image.new_empty_strided(tuple(image.shape), tuple(stride), dtype=mean.dtype)
        torch.sub(image, _by_channel(mean, image), out=result)
        torch.addcmul(by_one, result, by_deviation, out=result)
        result.addcmul_(gradient.to(mean.dtype), by_gradient)
        of_image = result.to(image.dtype)
    return of_image, of_weight if wanted[1] else None, of_bias if wanted[2] else None


def _count(image: torch.Tensor) -> torch.Tensor:
    """Values of a channel; as a double, which is exact and travels with the others."""
    num_values = [image.numel() / image.shape[1]]
    return torch.tensor(num_values, dtype=torch.float64, device=image.device)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What statistics are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _moved(running: torch.Tensor, value: torch.Tensor, momentum: float) -> torch.Tensor:
    return (momentum * value + (1 - momentum) * running.double()).to(running.dtype)


def _by_channel(values: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (image.dim() - 2))
