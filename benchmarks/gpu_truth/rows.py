"""`Row`: one figure that others measured on a GPU, with ours beside it."""

from dataclasses import asdict, dataclass
from typing import Any

from bayplan.data.errors import BayplanError, UsageError

__all__ = ["ROW_FAULTS", "Found", "Row", "check_counts", "told"]

# Of rows whose fields are missing, of another type, or sizes that torch refuses.
ROW_FAULTS = (
    *(BayplanError, RuntimeError, ArithmeticError, AttributeError),
    *(LookupError, TypeError, ValueError),
)

_COUNTS = ("layers", "num_layers", "gradient_accumulation", "blocks_per_checkpoint")
_MOST = 1000


def check_counts(config: Any) -> None:
    """Refuse a network that would take forever to build: files are untrusted."""
    if not isinstance(config, dict):
        return
    for name in _COUNTS:
        words = str(config.get(name, "")).split(",")
        if any(len(word) > 5 or (word.isdecimal() and int(word) > _MOST) for word in words):
            raise UsageError(f"{name} is {str(config[name])[:20]}, more than {_MOST}")


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


def told(fault: BaseException) -> str:
    """Why a row is left out, in a line."""
    if isinstance(fault, KeyError):
        return f"the row does not say {fault}"
    return (str(fault) or type(fault).__name__).partition("\n")[0][:150]
