"""What torch's kernels of grouped matrix products make, which its fake kernel refuses.

Mixtures of experts multiply all tokens with the weights of their experts in one call. The kernels
take float32 and half precision, on the CPU and on CUDA; torch's fake kernel takes bfloat16 alone.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from bayplan import torch_compat

__all__ = ["correct_fake_products"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROW_BYTES = 16  # rows of a result begin at multiples of these


@cache
def correct_fake_products() -> None:
    """Let fake grouped products have the dtypes and layouts of the real ones.

    For the process: torch has one table of fake kernels.
    """
    torch_compat.set_fake_kernel(torch_compat.GROUPED_PRODUCT, _grouped_product)


def _grouped_product(
    otherwise: Callable[..., Any],
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    is_ours = left.dtype == right.dtype and left.dtype in _DTYPES
    if not is_ours or bias is not None:
        return otherwise(left, right, offsets, bias, out_dtype)
    rows, columns = left.shape[-2], right.shape[-1]
    is_flat = left.dim() == 2, right.dim() == 2
    if is_flat == (True, True):
        assert offsets is not None, "the kernel asks for them"
        shape: tuple[int, ...] = (offsets.shape[0], rows, columns)
    elif is_flat == (False, False):
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    unit = _ROW_BYTES // left.element_size()
    padded = -(-columns // unit) * unit
    strides = (rows * padded, padded, 1)[-len(shape) :]
    return left.new_empty_strided(shape, strides)
