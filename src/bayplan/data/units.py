"""The only place that parses and prints bytes and seconds, and memory limits made of them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from bayplan.data.errors import UsageError

__all__ = [
    "Limit",
    "LimitCounts",
    "Progress",
    "format_bytes",
    "format_count",
    "format_rate",
    "format_seconds",
    "limit_text",
    "no_progress",
    "parse_bytes",
    "round_up",
    "tighter_limit",
]

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that do not want to hear."""


_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, _letter: 1024**_power}
_NUMBER = r"\d{1,1000}(?:\.\d{1,1000})?"  # more digits take long, and Python refuses them
_BYTES = re.compile(rf"\s*({_NUMBER})\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes such as `8GiB`, `7606 MB` or `1024`.

    `GiB` counts in 1024s and `GB` in 1000s; a bare `G` means `GiB`, as `nvidia-smi` users expect.
    """
    match = _BYTES.fullmatch(str(text))
    if match is None or match[2].lower() not in _FACTORS:
        shown = repr(text)[:60]
        raise UsageError(f"cannot read {shown} as bytes; write a number and a unit, like 8GiB")
    size_bytes = round(Fraction(match[1]) * _FACTORS[match[2].lower()])
    if size_bytes <= 0:
        raise UsageError(f"{text!r} is not a usable limit; write at least 1 byte, like 8GiB")
    return size_bytes


def format_bytes(size_bytes: float, *, digits: int = 1) -> str:
    """Print bytes in the largest binary unit that leaves at least 1, like `8.0 GiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        shown = f"{size:.{0 if unit == 'B' else digits}f}"
        if abs(float(shown)) < 1024:  # what is shown, so that 1024.0 KiB becomes 1.0 MiB
            return f"{shown} {unit}"
        size /= 1024
    return f"{size:.{digits}f} TiB"


def limit_text(size_bytes: int) -> str:
    """A limit to type that is no smaller than the size, like `644MiB`."""
    unit, name = (2**20, "MiB") if size_bytes >= 2**26 else (2**10, "KiB")
    return f"{-(-size_bytes // unit)}{name}"


def tighter_limit(planned_bytes: int, found_bytes: int) -> int:
    """What to plan within after a run of a plan found less memory than it needs.

    A tenth below both: what was found has what a process takes beside tensors, too (compiled code,
    threads), which nobody can count beforehand. A run that fails again is planned a tenth lower.
    """
    return int(0.9 * min(planned_bytes, found_bytes))


def format_seconds(seconds: float) -> str:
    """Print a duration with three significant digits, like `421 ms` or `66.0 s`."""
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(seconds) * factor >= 0.9995:
            scaled = seconds * factor
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def format_rate(bytes_per_s: float) -> str:
    """Print bytes per second in 1000s, as data sheets of links do."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def format_count(count: float) -> str:
    """Print a count in thousands, millions or billions, like `25.6 M`."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= limit * (1 if limit == 1e3 else 0.99995):  # 999960 shows as 1.0 M
            return f"{count / limit:.1f}{unit}"
    return f"{count:g}"


def round_up(size_bytes: int, granularity_bytes: int) -> int:
    """What an allocator of this granularity takes for a request."""
    return -(-size_bytes // granularity_bytes) * granularity_bytes


_SHARE = re.compile(rf"\s*({_NUMBER})\s*%\s*")


@dataclass(frozen=True)
class Limit:
    """Bytes, or a share of the plain peak: exactly one of the two is set."""

    size_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        assert (self.size_bytes is None) != (self.share is None), "bytes or a share, not both"

    @classmethod
    def parse(cls, text: "str | int | Limit") -> "Limit":
        """Read `8GiB`, a number of bytes, or `40%`."""
        if isinstance(text, Limit):
            return text
        if not isinstance(text, str | int) or isinstance(text, bool):
            raise UsageError(
                f"{text!r} is not a limit; write bytes as a whole number or like '8GiB', and a "
                "share"
                " of the plain peak like '70%'"
            )
        match = _SHARE.fullmatch(str(text))
        if match is None:
            return cls(size_bytes=parse_bytes(text))
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise UsageError(f"{text!r} is not between 0 % and 100 % of the plain peak")
        return cls(share=share)

    def of(self, plain_peak_bytes: int) -> int:
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.share is not None, "one of the two is set"
        return int(self.share * plain_peak_bytes)

    def __str__(self) -> str:
        return f"{self.share:.0%}" if self.size_bytes is None else format_bytes(self.size_bytes)


class LimitCounts(StrEnum):
    """Which bytes a limit is for.

    Attributes:
        LIVE: of tensors, as the allocator rounds them.
        RESERVED: that torch's caching allocator has taken from the driver, in use or kept for
            later, which is what a GPU runs out of.
        TOTAL: these and the context, as `nvidia-smi` shows them.
    """

    LIVE = "live"
    RESERVED = "reserved"
    TOTAL = "total"

    @property
    def words(self) -> str:
        """What is compared with such a limit."""
        return {"live": "peak", "reserved": "reserved memory"}.get(self, "memory with its context")

    @classmethod
    def parse(cls, text: "str | LimitCounts") -> "LimitCounts":
        try:
            return cls(text)
        except ValueError:
            raise UsageError(
                f"a limit cannot count {text!r}; it counts live, reserved or total bytes"
            ) from None
