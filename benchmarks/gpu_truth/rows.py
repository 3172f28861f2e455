"""`Row`: one figure that others measured on a GPU, with ours beside it."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Found", "Row"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of one run.

    Attributes:
        source: who measured, and where.
        explained: why ours is another one, where that is known and in the source's own data.
        seen: what was seen, where ours is off and that is not explained.
        fitted: whether anything of ours was chosen after seeing the figure.
    """

    source: str
    model: str
    device: str
    quantity: str
    reported: float
    predicted: float
    explained: str = ""
    seen: str = ""
    fitted: bool = False

    @property
    def error_pct(self) -> float:
        return 100 * (self.predicted - self.reported) / max(self.reported, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"error_pct": self.error_pct}


@dataclass(frozen=True)
class Found:
    """What one kind of measurement gave: its rows, and what may be claimed of them together."""

    rows: list[Row]
    claims: dict[str, Any]
