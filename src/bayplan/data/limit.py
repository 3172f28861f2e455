"""`Limit`: how much memory a step may use, in bytes or as a share of what it would use plainly."""

import re
from dataclasses import dataclass

from bayplan.data.errors import UsageError
from bayplan.data.units import format_bytes, parse_bytes

__all__ = ["Limit"]

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Limit:
    """Exactly one of the two is set.

    Example:
        >>> Limit.parse("8GiB").of(123), Limit.parse("40%").of(1000)
        (8589934592, 400)
    """

    size_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        assert (self.size_bytes is None) != (self.share is None), "bytes or a share, not both"

    @classmethod
    def parse(cls, text: "str | int | Limit") -> "Limit":
        """Read `8GiB`, a number of bytes, or `40%`."""
        if isinstance(text, Limit):
            return text
        match = _SHARE.fullmatch(str(text))
        if match is None:
            return cls(size_bytes=parse_bytes(text))
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise UsageError(f"{text!r} is not between 0 % and 100 % of the plain peak")
        return cls(share=share)

    def of(self, plain_peak_bytes: int) -> int:
        """The limit in bytes, for a step with this plain peak."""
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.share is not None, "one of the two is set"
        return int(self.share * plain_peak_bytes)

    def __str__(self) -> str:
        return f"{self.share:.0%}" if self.size_bytes is None else format_bytes(self.size_bytes)
