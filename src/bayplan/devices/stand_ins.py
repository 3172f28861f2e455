"""Stand-ins: tensors of any shape whose memory is mapped and never touched, and so takes none.

Some kernels ask for a tensor and look at nothing but its shape and strides. A stand-in is kept for
the next who asks, for making one takes as long as a small kernel and a step may want a hundred.
"""

import mmap
from functools import lru_cache

import torch

__all__ = ["is_stand_in", "stand_in"]

_MARK = "_bayplan_is_stand_in"


@lru_cache(maxsize=1024)
def stand_in(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU that nobody writes to; the same for all who ask for the same.

    Args:
        shape: with no dimension of size 0.
        stride: not below 0.
        dtype: any.
    """
    numel = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # Private: it takes no memory even if a kernel reads it.
    mapping = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=dtype, count=numel)
    tensor = whole.as_strided(shape, stride)
    for one in (whole, tensor):  # a view keeps what it is a view of
        setattr(one, _MARK, True)
    return tensor


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of these, and takes no memory."""
    return getattr(tensor, _MARK, False)
