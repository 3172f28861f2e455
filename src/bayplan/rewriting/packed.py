"""Lossless small forms of activations: kernels that keep a bit, or a small integer, for an element.

Backward often needs far less of a value than forward made: of a dropout mask one bit for each
element, of a ReLU's output only whether it passed, of a max-pool's indices a number below the size
of a plane. Each kernel here has its way back, and the two together give the very same bits.

Bits follow the elements' order in memory, so that no dense tensor is ever copied, whatever its
memory format; tensors with gaps or overlaps go row by row. On the CPU two kernels of ours
(`packed.c`) do the most common work: the signs of float32. The rest is done in chunks that keep
temporary memory small, by numpy on the CPU and by torch elsewhere, where the host never waits for
the device; nothing here has been run on a GPU. Given tensors without data, as in tracing, all
return such tensors.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from bayplan.devices.device import HOST
from bayplan.devices.machine import cache_directory
from bayplan.native import CompileFailed, load_part

__all__ = [
    "as_integers",
    "index_dtype",
    "is_dense",
    "pack_bits",
    "pack_positive",
    "threshold_backward_from_bits",
    "unpack_bits",
]

aten = torch.ops.aten

# Elements at a time, multiples of 8: on a CPU 1 MiB as float32, which caches hold; elsewhere as
# many as keep a device busy for longer than it takes to launch the kernels.
_CPU_CHUNK, _DEVICE_CHUNK = 2**18, 2**22
_INDEX_DTYPES = (torch.uint8, torch.uint16, torch.int32)
_SOURCE = Path(__file__).with_name("packed.c")


def pack_bits(mask: torch.Tensor, stride: Sequence[int] | None = None) -> torch.Tensor:
    """One bit for each element of a boolean tensor, in the order of its memory or of `stride`.

    >>> pack_bits(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    bits = _empty_bits(mask)
    if _has_data(mask):
        flat = _flat(_in_order(mask, stride))
        for part, place in _chunks(flat):
            bits[place] = _packed(flat[part])
    return bits


def unpack_bits(bits: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The boolean tensor behind bits in the order of `stride`, which is the result's if dense."""
    mask = _empty_in_order(bits, shape, stride, torch.bool)
    if _has_data(bits):
        flat = _flat(mask)
        for part, place in _chunks(flat):
            flat[part] = _unpacked(bits[place], part.stop - part.start).view(torch.bool)
    return mask


def pack_positive(
    values: torch.Tensor, threshold: float = 0, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """One bit for each element: whether a gradient passes it, as `threshold_backward` decides.

    That is `not (value <= threshold)`, so NaN passes. Bits are ordered as in `pack_bits`.

    >>> pack_positive(torch.tensor([1.0, 0.0, -1.0, torch.nan]))
    tensor([9], dtype=torch.uint8)
    """
    bits = _empty_bits(values)
    if _has_data(values):
        flat = _flat(_in_order(values.detach(), stride))
        kernels = _kernels_for(flat) if flat.is_contiguous() else None
        if kernels is not None:
            kernels.pack_above(flat.data_ptr(), flat.numel(), threshold, bits.data_ptr())
            return bits
        for part, place in _chunks(flat):
            bits[place] = _packed(_passes(flat[part], threshold))
    return bits


def threshold_backward_from_bits(
    gradient: torch.Tensor,
    bits: torch.Tensor,
    stride: Sequence[int],
    *,
    grad_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient through a ReLU, from one bit for each element of its output.

    The same bits in the same memory format as `aten.threshold_backward` gives.

    Args:
        stride: the order of the bits.
        grad_input: where to put the result; may be the gradient itself.
    """
    if not _has_data(gradient):
        values = gradient.new_empty_strided(tuple(gradient.shape), tuple(stride))
        return aten.threshold_backward(gradient, values, 0)
    if gradient.stride() != tuple(stride) or not is_dense(gradient.shape, gradient.stride()):
        kernels = _kernels_for(gradient)
        if grad_input is None and kernels is not None and _is_in_rows(gradient, stride):
            result = gradient.new_empty(gradient.shape)
            rows = len(gradient), gradient.numel() // max(len(gradient), 1)
            addresses = gradient.data_ptr(), gradient.stride(0), bits.data_ptr()
            kernels.pass_gradient(*addresses, *rows, result.data_ptr())
            return result
        # Memory in two orders cannot be walked in chunks.
        values = unpack_bits(bits, gradient.shape, stride).to(gradient.dtype)
        output = {} if grad_input is None else {"grad_input": grad_input}
        return aten.threshold_backward(gradient, values, 0, **output)
    result = _empty_as_elementwise(gradient) if grad_input is None else grad_input
    source, target = _flat(gradient), _flat(result)
    kernels = _kernels_for(source)
    if kernels is not None:
        addresses = source.data_ptr(), source.stride(0), bits.data_ptr()
        kernels.pass_gradient(*addresses, 1, source.numel(), target.data_ptr())
        return result
    # The operator itself, on ones and zeros in the place of the output.
    passed = gradient.new_empty(min(_chunk(source), source.numel()))
    for part, place in _chunks(source):
        here = passed[: part.stop - part.start]
        here.copy_(_unpacked(bits[place], here.numel()))
        aten.threshold_backward(source[part], here, 0, grad_input=target[part])
    return result


def index_dtype(num_positions: int) -> torch.dtype:
    """The smallest integer type that holds every index below a number."""
    fitting = (dtype for dtype in _INDEX_DTYPES if num_positions - 1 <= torch.iinfo(dtype).max)
    return next(fitting, torch.int64)


def as_integers(indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Indices as another integer type, which must hold all of them."""
    return indices.to(dtype)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill a stretch of memory without gaps or overlaps, in whatever order.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (0, 1)), is_dense((2, 3), (4, 1))
    (True, False, False)
    """
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _kernels_for(values: torch.Tensor) -> ctypes.CDLL | None:
    """Kernels of ours for some numbers as they lie in memory; None where there are none."""
    is_plain = values.dtype is torch.float32 and HOST.holds(values) and not values.is_neg()
    return _kernels() if is_plain else None


def _is_in_rows(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether rows are dense but apart, as of some channels, and contiguous by `stride`."""
    shape = tensor.shape
    filling = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    same = list(stride) == filling and list(tensor.stride()[1:]) == filling[1:]
    return same and len(shape) > 1 and tensor.stride(0) > filling[0]


@cache
def _kernels() -> ctypes.CDLL | None:
    """Compiled once and kept, in a fraction of a second; None without a compiler."""
    try:
        library = load_part(_SOURCE, cache_directory())
    except CompileFailed:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.pack_above.argtypes = [pointer, size, ctypes.c_float, pointer]
    library.pass_gradient.argtypes = [pointer, size, pointer, size, size, pointer]
    library.pack_above.restype = library.pass_gradient.restype = None
    return library


def _has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a real one; the tracers' stand-ins are subclasses of their own."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta


def _empty_bits(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty((values.numel() + 7) // 8, dtype=torch.uint8)


def _in_order(tensor: torch.Tensor, stride: Sequence[int] | None) -> torch.Tensor:
    """A tensor as it is if it has the strides asked for, else a copy that has.

    Kernels sometimes return another memory format than tracing them promised.
    """
    if stride is None or tensor.stride() == tuple(stride):
        return tensor
    return _empty_in_order(tensor, tensor.shape, stride, tensor.dtype).copy_(tensor)


def _empty_in_order(
    like: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    if is_dense(shape, stride):
        return like.new_empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    return like.new_empty(tuple(shape), dtype=dtype)


def _empty_as_elementwise(gradient: torch.Tensor) -> torch.Tensor:
    """Memory for a result, laid out as torch lays out those of element-wise operators.

    Strides of dimensions of one element are free, and torch prefers the common ones.
    """
    for memory_format in (torch.contiguous_format, torch.channels_last):
        if gradient.is_contiguous(memory_format=memory_format):
            return torch.empty_like(gradient, memory_format=memory_format)
    return gradient.new_empty_strided(gradient.shape, gradient.stride())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one row: in the order of memory where they fill it, else row by row."""
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _chunk(flat: torch.Tensor) -> int:
    return _CPU_CHUNK if HOST.holds(flat) else _DEVICE_CHUNK


def _chunks(flat: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Where each chunk's elements lie, and where their bits."""
    for start in range(0, flat.numel(), _chunk(flat)):
        stop = min(start + _chunk(flat), flat.numel())
        yield slice(start, stop), slice(start // 8, math.ceil(stop / 8))


def _passes(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Whether each element is above the threshold, or NaN."""
    if not HOST.holds(values):
        return (values <= threshold).logical_not_()
    if values.element_size() < 4:
        values = values.float()  # exact, and what the operator compares, too
    # numpy compares five times as fast.
    blocked = np.less_equal(values.numpy(), threshold)
    return torch.from_numpy(np.logical_not(blocked, out=blocked))


def _packed(mask: torch.Tensor) -> torch.Tensor:
    if not HOST.holds(mask):
        return _packed_by_torch(mask)
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def _unpacked(bits: torch.Tensor, numel: int) -> torch.Tensor:
    """A byte of zero or one for each element."""
    if not HOST.holds(bits):
        return _unpacked_by_torch(bits, numel)
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=numel, bitorder="little"))


def _packed_by_torch(mask: torch.Tensor) -> torch.Tensor:
    if rest := mask.numel() % 8:
        mask = torch.nn.functional.pad(mask, (0, 8 - rest))
    return (mask.view(torch.uint8).view(-1, 8) << _places(mask)).sum(1, dtype=torch.uint8)


def _unpacked_by_torch(bits: torch.Tensor, numel: int) -> torch.Tensor:
    return (bits[:, None] >> _places(bits)).bitwise_and_(1).view(-1)[:numel]


def _places(beside: torch.Tensor) -> torch.Tensor:
    """The place of each element's bit in its byte, the first one lowest.

    Made on the device: a list of numbers would be copied there, and the host would wait for that.
    """
    return torch.arange(8, dtype=torch.uint8, device=beside.device)
