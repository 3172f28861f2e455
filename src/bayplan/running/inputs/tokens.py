"""Tokenised text in one flat file, mapped into memory: `train.bin` and `val.bin`, or `.npy`.

A sample is a window of the model's sequence length, and its targets are the same tokens one place
later. Windows do not overlap; what is left at the end is too short for one and is not used.
"""

from pathlib import Path

import numpy

from bayplan.data.errors import FileFault, UsageError
from bayplan.running.inputs.image_folder import unread

__all__ = ["TokenFile"]

_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_LOOKED_AT = 1 << 16  # tokens at the beginning, to tell what a file without a header holds


class TokenFile:
    """The windows of one file."""

    shards: tuple[int, ...] = ()

    def __init__(self, path: Path, *, sequence: int, vocabulary: int | None) -> None:
        self._path, self._sequence = path, sequence
        try:
            self._tokens = _mapped(path, vocabulary or 0)
        except OSError as fault:
            raise unread(path, fault) from None
        self._vocabulary = vocabulary
        if not len(self):
            raise UsageError(
                f"{path} has {len(self._tokens)} tokens, and a sample needs {sequence + 1}; train"
                " with a shorter sequence or more text"
            )

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._sequence

    def window(self, index: int) -> numpy.ndarray:
        """Tokens of a sample, with the one that comes after.

        Raises:
            FileFault: the model has no such token.
        """
        begin = index * self._sequence
        window = self._tokens[begin : begin + self._sequence + 1].astype(numpy.int64)
        largest = int(window.max())
        if window.min() < 0 or (self._vocabulary is not None and largest >= self._vocabulary):
            where = begin + int(window.argmin() if window.min() < 0 else window.argmax())
            raise FileFault(
                f"{self._path} has the token {self._tokens[where]} at place {where}, and the"
                f" model's vocabulary has {self._vocabulary}: ids from 0 to"
                f" {(self._vocabulary or 0) - 1}; train a model of that vocabulary, or tokenise the"
                " text with its tokeniser"
            )
        return window


def _mapped(path: Path, vocabulary: int) -> numpy.ndarray:
    if path.suffix == ".npy":
        try:
            tokens = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as fault:
            raise FileFault(f"{path} is not a NumPy array: {fault}") from None
        if tokens.ndim != 1 or tokens.dtype.name not in _DTYPES:
            raise FileFault(
                f"{path} holds {tokens.dtype} of shape {tokens.shape}; tokens are one row of"
                f" {', '.join(_DTYPES)}"
            )
        return tokens
    if not path.stat().st_size:
        raise FileFault(f"{path} is empty")
    if path.stat().st_size % 2:
        raise FileFault(f"{path} has an odd number of bytes; tokens are uint16 or uint32")
    short = numpy.memmap(path, dtype="<u2", mode="r")
    # Small ids that are written in four bytes: each second half is 0, which no text is.
    looked_at = short[: 2 * _LOOKED_AT]
    is_wide = vocabulary > 1 << 16 or (looked_at.any() and not looked_at[1::2].any())
    if is_wide and len(short) % 2:
        raise FileFault(f"{path} has {2 * len(short)} bytes, which are no whole uint32 tokens")
    return numpy.memmap(path, dtype="<u4", mode="r") if is_wide else short
