"""What `PYTORCH_CUDA_ALLOC_CONF` changes in torch's caching allocator, and its sizes."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.units import round_up

__all__ = ["MAX_SMALL_BYTES", "MIN_BLOCK_BYTES", "SMALL_SEGMENT_BYTES", "AllocatorSettings"]

# As in torch 2.1 to 2.13: c10/core/AllocatorConfig.h, before c10/cuda/CUDACachingAllocator.cpp.
_MIB = 1 << 20
MIN_BLOCK_BYTES = 512
MAX_SMALL_BYTES = _MIB
SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_MIN_OWN_SEGMENT_BYTES = 10 * _MIB
_SEGMENT_GRANULARITY_BYTES = 2 * _MIB
_NUM_SIZE_CLASSES = 16  # that power2_divisions tells apart: below 2 MiB, below 4 MiB, …


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The settings that decide where a block goes.

    Attributes:
        max_split_bytes: blocks from this size on are oversized.
        max_unsplit_rounding_bytes: an oversized block serves requests that are less than this
            smaller.
        garbage_collection_threshold: a share of the allowed memory; 0 for never.
        power2_divisions: for requests below 2 MiB, below 4 MiB, …: the number of steps from a power
            of two to the next; empty for steps of 512 bytes.
    """

    expandable_segments: bool = False
    large_segment_bytes: int = _LARGE_SEGMENT_BYTES
    max_split_bytes: float = math.inf
    max_unsplit_rounding_bytes: int = _LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    power2_divisions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ValueError("garbage_collection_threshold must be at least 0 and below 1")
        if not self.max_split_bytes > 0 or self.max_unsplit_rounding_bytes < 0:
            raise ValueError("max_split_size and max_non_split_rounding must be more than 0")
        if self.large_segment_bytes < _LARGE_SEGMENT_BYTES:
            raise ValueError("large_segment_size must be at least 20 MiB")

    @classmethod
    def parse(cls, text: str) -> "AllocatorSettings":
        """Read the value of `PYTORCH_CUDA_ALLOC_CONF`.

        Example:
            >>> AllocatorSettings.parse("max_split_size_mb:128,expandable_segments:True")
            AllocatorSettings(expandable_segments=True, ... max_split_bytes=134217728, ...)
        """
        found: dict[str, Any] = {}
        end = 0
        while end < len(text):
            match = _SETTING.match(text, end)
            if match is None:
                raise UsageError(f"cannot read the allocator settings {text!r} at {text[end:]!r}")
            key, value, end = match[1], match[2].strip(), match.end()
            if key in _PARSED:
                name, parse = _PARSED[key]
                try:
                    found[name] = parse(value)
                except (ValueError, KeyError, IndexError):
                    raise UsageError(f"allocator setting {key} cannot be {value!r}") from None
            elif not key.startswith("pinned_") and (key, value) not in _WITHOUT_EFFECT:
                hint = did_you_mean(key, _PARSED)
                raise UsageError(f"allocator setting {key}:{value} is not simulated; {hint}")
        try:
            return cls(**found)
        except ValueError as fault:
            raise UsageError(f"allocator settings {text!r}: {fault}") from None

    def rounded(self, requested_bytes: int) -> int:
        """What a request takes."""
        if self.power2_divisions:
            size_class = max(requested_bytes.bit_length() - _MIB.bit_length(), 0)
            divisions = self.power2_divisions[min(size_class, len(self.power2_divisions) - 1)]
            if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
                power = 1 << (requested_bytes.bit_length() - 1)
                return round_up(requested_bytes, power >> (divisions.bit_length() - 1))
        return max(round_up(requested_bytes, MIN_BLOCK_BYTES), MIN_BLOCK_BYTES)

    def segment_bytes(self, size_bytes: int) -> int:
        """The segment that is taken for a rounded request."""
        if size_bytes <= MAX_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size_bytes < _MIN_OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return round_up(size_bytes, _SEGMENT_GRANULARITY_BYTES)


def _divisions(text: str) -> tuple[int, ...]:
    """`4`, or by size in MiB: `[256:1,512:2,>:8]`, where the first holds for all smaller ones."""
    if not text.startswith("["):
        return _powers((int(text),)) * _NUM_SIZE_CLASSES
    divisions, last = [0] * _NUM_SIZE_CLASSES, -1
    for part in text.strip("[]").split(","):
        bound, number = (word.strip() for word in part.split(":"))
        if bound == ">":
            divisions[last + 1 :] = [int(number)] * (_NUM_SIZE_CLASSES - last - 1)
            continue
        size_class = min(_powers((int(bound),))[0].bit_length(), _NUM_SIZE_CLASSES) - 1
        if last < 0:
            divisions[:size_class] = [int(number)] * size_class
        divisions[size_class], last = int(number), size_class
    return _powers(tuple(divisions))


def _powers(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers, if each is a power of two, or 0 for none."""
    if any(number < 0 or number & (number - 1) for number in numbers):
        raise ValueError(f"{numbers} are not all powers of two")
    return numbers


def _mebibytes(text: str) -> int:
    return int(text) * _MIB


_SETTING = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]*)(?:,|$)")
_PARSED: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", {"True": True, "False": False}.__getitem__),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_unsplit_rounding_bytes", _mebibytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "roundup_power2_divisions": ("power2_divisions", _divisions),
}
_WITHOUT_EFFECT = {("backend", "native")} | {
    (name, value)
    for name in ("release_lock_on_cudamalloc", "release_lock_on_hipmalloc")
    for value in ("True", "False")
}
