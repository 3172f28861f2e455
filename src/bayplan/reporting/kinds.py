"""What memory is there for, in words."""

from bayplan.data.graph import StorageKind
from bayplan.data.record import MESSAGE
from bayplan.data.units import format_bytes

__all__ = ["KIND_WORDS", "kind_lines", "share_text"]

KIND_WORDS: dict[str, str] = {
    StorageKind.PARAMETER: "parameters",
    StorageKind.GRADIENT: "gradients",
    StorageKind.OPTIMIZER_STATE: "optimizer state",
    StorageKind.BUFFER: "buffers",
    StorageKind.INPUT: "batch",
    StorageKind.ACTIVATION: "activations held for backward",
    StorageKind.TEMPORARY: "temporaries",
    "workspace": "workspace inside the kernel",
    MESSAGE: "messages between ranks",
}


def kind_lines(by_kind: dict[str, int]) -> list[str]:
    """A line for each kind, with its share of all."""
    total = sum(by_kind.values())
    return [
        f"  {KIND_WORDS.get(kind, kind):<30} {format_bytes(size):>10}  {share_text(size, total)}"
        for kind, size in by_kind.items()
        if size
    ]


def share_text(part: float, whole: float) -> str:
    """A part of something, in percent."""
    return f"{100 * part / whole:5.1f} %" if whole else "    -  "
