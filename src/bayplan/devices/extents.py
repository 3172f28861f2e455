"""The stretch of memory that a tensor covers, from its first to its last element, as plain bytes.

Moving this stretch, whatever it holds, brings a tensor of any strides back bit for bit: transposed,
expanded or with gaps. A contiguous copy would need memory that no plan knows of, and could not be
copied back into a tensor whose elements overlap.
"""

from dataclasses import dataclass

import torch

__all__ = ["Layout", "extent_of"]


@dataclass(frozen=True, slots=True)
class Layout:
    """All that is needed to make a tensor again, except its bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """The layout of a strided tensor."""
        assert tensor.layout is torch.strided, f"{tensor.layout} tensors have no single extent"
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def size_bytes(self) -> int:
        """Bytes from the first to the last element, gaps included.

        Example:
            >>> Layout.of(torch.zeros(4, 10)[:, :3]).size_bytes  # 33 numbers apart, 12 of its own
            132
            >>> Layout.of(torch.zeros(1, 3).expand(1000, 3)).size_bytes
            12
        """
        if 0 in self.shape:
            return 0
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (1 + reach) * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """A tensor of this layout, not filled; it takes `size_bytes`."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def extent_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes a tensor covers, as a flat uint8 tensor on the same memory."""
    extent = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start_bytes = tensor.storage_offset() * tensor.itemsize
    size_bytes = Layout.of(tensor).size_bytes
    return extent.set_(tensor.untyped_storage(), start_bytes, (size_bytes,), (1,))
