"""Measured costs, kept on disk: profiles of steps, and prices of single operators.

A price depends on the operator with its arguments, the machine, the number of threads, the clock
and how memory was counted. All prices that share the rest lie in one file. It is read with all
checks of a file from anywhere; one that is damaged is made anew, and one that cannot be written
costs time and nothing else.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Profile
from bayplan.devices.machine import describe_machine, device_name

__all__ = ["OperatorPrices", "Prices", "cached_profile", "kept_prices"]


def cached_profile(
    cache: Path,
    graph: StepGraph,
    *,
    device: torch.device,
    repeats: int,
    clock: Clock,
    method: str,
    measure: Callable[[], Profile],
    renew: bool = False,
) -> Profile:
    """Return the profile of this step on this machine, measuring it only if none is kept.

    One with fewer repeats than asked for does not count. A damaged or outdated file is measured
    anew and replaced; a cache that cannot be written costs time, never the result.

    Args:
        repeats: steps that must have been timed, at least.
        method: of the meter; what one misses another counts, so their profiles are never mixed.
        renew: measure in any case, and replace what is kept.
    """
    path = cache / "profiles" / f"{_key(graph, device, clock, method)}.json"
    kept = None if renew else _read(path)
    if (
        kept is not None
        and kept.repeats >= repeats
        and kept.fingerprint == graph.fingerprint
        and len(kept.seconds) == len(graph.nodes)
    ):
        # The same step may have been profiled under another name.
        return msgspec.structs.replace(kept, model=graph.model)
    profile = measure()
    with contextlib.suppress(FileFault):
        files.write(path, profile)
    return profile


def _read(path: Path) -> Profile | None:
    try:
        return files.read(path, Profile) if path.exists() else None
    except (FileFault, OSError):  # damaged, or in a folder that may not be looked into
        return None


def _key(graph: StepGraph, device: torch.device, clock: Clock, method: str) -> str:
    machine = describe_machine()
    parts = (graph.fingerprint, device_name(device), clock, method, *sorted(machine.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


Prices = dict[str, tuple[float, int]]  # by signature: seconds and workspace bytes


class OperatorPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
