"""Prices of single operators, kept between runs.

A price depends on the operator with its arguments, the machine, the number of threads, the clock
and how memory was counted. All prices that share the rest lie in one file. It is read with all
checks of a file from anywhere; one that is damaged is made anew, and one that cannot be written
costs time and nothing else.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.profile import Clock
from bayplan.devices.machine import describe_machine, device_name

__all__ = ["OperatorPrices", "kept_prices"]

Prices = dict[str, tuple[float, int]]  # by signature: seconds and workspace bytes


class OperatorPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What operators cost on one machine."""

    schema: str = "bayplan/operator-prices"
    version: int = 2  # raised when an operator of ours becomes another
    prices: Prices

    def __post_init__(self) -> None:
        for signature, (seconds, workspace_bytes) in self.prices.items():
            if not (math.isfinite(seconds) and seconds >= 0 and workspace_bytes >= 0):
                raise ValueError(f"prices[{signature!r}] is negative or not finite")


@contextmanager
def kept_prices(
    cache: Path, *, device: torch.device, clock: Clock, method: str
) -> Iterator[Prices]:
    """Prices known so far, to be added to; what was added is kept when the block is left."""
    machine = sorted(describe_machine().items())
    key = (device_name(device), torch.get_num_threads(), clock, method, *machine)
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    path = cache / "operators" / f"{name}.json"
    prices: Prices = {}
    with contextlib.suppress(FileFault, OSError):
        if path.exists():
            prices.update(files.read(path, OperatorPrices).prices)
    num_before = len(prices)
    try:
        yield prices
    finally:  # also what was measured before a Ctrl-C
        if len(prices) > num_before:
            with contextlib.suppress(FileFault):
                files.write(path, OperatorPrices(prices=prices))
