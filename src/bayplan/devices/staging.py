"""`Staging`: the host buffer through which another device's bytes reach a file, piece by piece.

Its copies run on a stream of its own, in the thread of the file, so that they wait for what was
computed before and for nothing that came after. It has never met a GPU: on a CPU, where tests run
it, torch's streams are empty and copies happen at once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

__all__ = ["Staging"]

_PIECE_BYTES = 8 * 2**20

Transfer = Callable[[torch.Tensor, int], None]


class Staging:
    """One buffer, for one thread that uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)  # on a CPU empty, whatever its argument
        self._buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8)

    def writing(
        self, transfer: Transfer, source: torch.Tensor, offset_bytes: int
    ) -> Callable[[], None]:
        """A job that transfers a device's extent, as it is at this point of the stream, out."""
        return partial(self._write, self._ready(), transfer, source, offset_bytes)

    def reading(
        self, transfer: Transfer, target: torch.Tensor, offset_bytes: int
    ) -> Callable[[], None]:
        """A job that fills a device's extent; work queued before it may still use that memory."""
        return partial(self._read, self._ready(), transfer, target, offset_bytes)

    def _ready(self) -> Any:
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def _write(
        self, ready: Any, transfer: Transfer, source: torch.Tensor, offset_bytes: int
    ) -> None:
        with self._module.stream(self._stream):
            self._stream.wait_event(ready)
            for start, piece in self._pieces(source):
                buffer = self._buffer[: len(piece)]
                buffer.copy_(piece)  # blocks, so the buffer is complete
                transfer(buffer, offset_bytes + start)

    def _read(
        self, ready: Any, transfer: Transfer, target: torch.Tensor, offset_bytes: int
    ) -> None:
        with self._module.stream(self._stream):
            self._stream.wait_event(ready)
            for start, piece in self._pieces(target):
                buffer = self._buffer[: len(piece)]
                transfer(buffer, offset_bytes + start)
                piece.copy_(buffer)  # blocks, so the buffer may be used again

    def _pieces(self, extent: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, len(extent), _PIECE_BYTES):
            yield start, extent[start : start + _PIECE_BYTES]
