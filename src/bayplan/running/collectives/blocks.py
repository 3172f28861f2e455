"""Memory that several processes of one host see, and sums over it.

A block is a file without a name (memfd): it takes no room in a folder, needs no clean-up, and is
gone with the last process that has it open, however that ends. Others open it through /proc, so
they need the same process namespace and user; where that fails, nothing is shared and sums go
through sockets.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bayplan.data.units import format_bytes, round_up
from bayplan.devices.device import HOST
from bayplan.native import load_part, why_untrusted

__all__ = [
    *("HEADER_BYTES", "LINE_BYTES", "SUMMABLE", "Block", "Blocks", "RankLost", "Wait", "load"),
]

SUMMABLE = (torch.float32, torch.float64)
HEADER_BYTES = 4096  # the flags
LINE_BYTES = 64
# From here on a copy is faster past the caches; what is smaller is often still in one when summed.
_STREAMED_BYTES = 64 << 10
_SOURCE = Path(__file__).with_name("shared_memory.c")


class RankLost(RuntimeError):
    """A process that takes part in a sum has not come."""


class Wait(NamedTuple):
    """How a sum began: which process came last, and how long this one waited for it."""

    last: int
    seconds: float


@cache
def load(cache: Path) -> ctypes.CDLL:
    """Compile, or take from the cache.

    Raises:
        CompileFailed: there is no compiler.
    """
    library = load_part(_SOURCE, cache)
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    turn = ctypes.c_uint32
    library.shared_sum.argtypes = [
        pointer, number, number, size, size, number, ctypes.c_double, number, turn, number,
        ctypes.POINTER(number), ctypes.POINTER(ctypes.c_double),
    ]  # fmt: skip
    library.shared_spread.argtypes = [pointer, number, number, size, size, turn, number]
    library.copy_pieces.argtypes = [pointer, pointer, pointer, number, size]
    library.copy_pieces.restype = None
    count = ctypes.c_uint64
    library.mailbox_bytes.argtypes, library.mailbox_bytes.restype = [count], count
    library.mailbox_put.argtypes = [pointer, count, pointer, count, count, pointer, count]
    library.mailbox_take.argtypes = [
        pointer, count, pointer, count, count, pointer, count, number,
        ctypes.POINTER(count), ctypes.POINTER(count),
    ]  # fmt: skip
    return library


class Block:
    """A piece of memory that other processes can open, by process and file number.

    It owns the open file that it is given; `size_bytes` includes the header.
    """

    def __init__(self, file: int, size_bytes: int) -> None:
        self.file, self.size_bytes = file, size_bytes
        # A tensor keeps its memory alive; the mapping ends when the last one is gone.
        self._memory = mmap.mmap(file, size_bytes)

    @classmethod
    def make(cls, data_bytes: int) -> "Block":
        """A new one, zeroed.

        Raises:
            OSError: there is no memory for it, or no memfd.
        """
        size_bytes = HEADER_BYTES + round_up(data_bytes, mmap.PAGESIZE)
        available_bytes = HOST.free_bytes
        if size_bytes > available_bytes:  # asking the kernel would end other processes first
            raise OSError(
                errno.ENOMEM,
                f"{format_bytes(size_bytes)} to share, {format_bytes(available_bytes)} available",
            )
        file = os.memfd_create("bayplan", os.MFD_CLOEXEC)
        try:
            os.fchmod(file, 0o600)
            os.posix_fallocate(file, 0, size_bytes)  # fails here rather than by SIGBUS later
            return cls(file, size_bytes)
        except BaseException:
            os.close(file)
            raise

    @classmethod
    def of_other(cls, process: int, file: int, size_bytes: int) -> "Block":
        """Open that of another process.

        Raises:
            OSError: it cannot be seen from here.
        """
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(opened)
            if why := why_untrusted(status):
                raise OSError(errno.EPERM, f"file {file} of process {process} {why}")
            file_bytes = status.st_size
            if file_bytes != size_bytes:
                raise OSError(
                    f"file {file} of process {process} has {file_bytes} bytes, not {size_bytes}"
                )
            return cls(opened, size_bytes)
        except BaseException:
            os.close(opened)
            raise

    @property
    def data_bytes(self) -> int:
        return self.size_bytes - HEADER_BYTES

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Offsets count from the beginning of the data."""
        return torch.frombuffer(
            self._memory, dtype=dtype, count=count, offset=HEADER_BYTES + offset
        )

    def close_file(self) -> None:
        """When nobody has to open it any more; the memory stays."""
        os.close(self.file)


class Blocks:
    """The blocks of some processes of one host, in the same order in all of them.

    Args:
        own: which of them is this process's.
        patience_seconds: how long to wait for the others before one counts as lost.
    """

    def __init__(
        self, library: ctypes.CDLL, blocks: Sequence[Block], own: int, *, patience_seconds: int
    ) -> None:
        self._library, self._blocks, self._own = library, blocks, own
        self._addresses = (ctypes.c_void_p * len(blocks))(*(block.address for block in blocks))
        self._patience_seconds = patience_seconds
        self._turn = 0

    @property
    def number(self) -> int:
        return len(self._blocks)

    @property
    def own(self) -> Block:
        return self._blocks[self._own]

    def begin_turn(self) -> int:
        """A number for one sum; all processes count the same ones."""
        self._turn = (self._turn + 1) % 2**32
        return self._turn

    def sum(self, turn: int, numbers: torch.Tensor, *, num_into: int, factor: float = 1.0) -> Wait:
        """Sum all blocks where these numbers lie; the first `num_into` blocks have the sums then.

        Each number is multiplied by the factor before it is added.
        """
        last, waited_seconds = ctypes.c_int(), ctypes.c_double()
        told = ctypes.byref(last), ctypes.byref(waited_seconds)
        form, when = (numbers.numel(), numbers.itemsize), (turn, self._patience_seconds)
        place = self._place(numbers)
        self._check(self._library.shared_sum(*place, *form, factor, num_into, *when, *told))
        return Wait(last.value, waited_seconds.value)

    def spread(self, turn: int, numbers: torch.Tensor) -> None:
        """Give all blocks what the first has where these numbers lie."""
        place, when = self._place(numbers), (turn, self._patience_seconds)
        self._check(self._library.shared_spread(*place, numbers.nbytes, *when))

    def _place(self, numbers: torch.Tensor) -> tuple[Any, int, int, int]:
        offset = numbers.data_ptr() - self.own.address
        return self._addresses, len(self._blocks), self._own, offset

    def put(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy numbers into parts of the own block: pairs of a part and its numbers.

        Large ones are copied past the caches. All of them are one call, because between two calls
        of kernels the way through torch takes longer than a small copy.
        """
        same = []
        for into, numbers in pieces:
            if _is_same_bytes(into, numbers):
                same.append((into, numbers))
            else:
                into.copy_(numbers)
        addresses = ctypes.c_void_p * len(same)
        self._library.copy_pieces(
            addresses(*[into.data_ptr() for into, _ in same]),
            addresses(*[numbers.data_ptr() for _, numbers in same]),
            (ctypes.c_size_t * len(same))(*[into.nbytes for into, _ in same]),
            len(same),
            _STREAMED_BYTES,
        )

    def _check(self, lost: int) -> None:
        if lost:
            raise RankLost(
                f"a sum over {len(self._blocks)} processes of this host timed out: number"
                f" {lost - 1} has not come for {self._patience_seconds} s"
            )


def _is_same_bytes(into: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether equal numbers are equal bytes in both."""
    return (
        HOST.holds(into)
        and HOST.holds(source)
        and into.dtype is source.dtype
        and ((into.is_contiguous() and source.is_contiguous()) or into.stride() == source.stride())
        and not source.is_neg()
        and not source.is_conj()
    )
