"""Measured costs, kept on disk: profiles of steps, prices of single operators, scratch memory.

A cost depends on what was measured, the machine, the number of threads, the clock and how memory
was counted; a file's name is a hash of these. A damaged file is measured anew, and a cache that
cannot be written costs time, never the result.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from bayplan.data import files
from bayplan.data.errors import FileFault, check_figures
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Profile
from bayplan.data.program import Cost
from bayplan.devices.device import device_of
from bayplan.devices.machine import describe_machine

__all__ = ["OperatorPrices", "Prices", "cached_profile", "cached_workspaces", "kept_prices"]

Prices = dict[str, Cost]  # by signature
_Noun = TypeVar("_Noun", bound=msgspec.Struct)


class OperatorPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str = "bayplan/operator-prices"
    version: int = 3  # raised when an operator of ours becomes another
    prices: Prices

    def __post_init__(self) -> None:
        for signature, price in self.prices.items():
            check_figures(f"prices[{signature!r}]", price)


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
    """Return the profile of this step on this machine; measure it only if none is kept.

    Args:
        repeats: steps that must have been timed, at least.
        method: of the meter; what one misses another counts, so their profiles are never mixed.
        renew: measure in any case, and replace what is kept.
    """
    path = _path(cache / "profiles", graph.fingerprint, device_of(device).name, clock, method)
    kept = None if renew else _read(path, Profile)
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


class _Workspaces(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the cache: scratch memory of some nodes of a graph."""

    schema: str = "bayplan/workspaces"
    version: int = 2
    workspace_bytes: dict[int, int]


def cached_workspaces(
    cache: Path,
    graph: StepGraph,
    nodes: Collection[int],
    *,
    key: tuple[object, ...],
    measure: Callable[[], dict[int, int]],
) -> dict[int, int]:
    """Scratch memory of some nodes of a graph; measured only where it is not kept.

    Args:
        key: what it depends on beside graph and machine: layouts, device, method.
    """
    path = _path(cache / "workspaces", graph.fingerprint, sorted(nodes), *key)
    kept = _read(path, _Workspaces)
    if kept is not None and {*kept.workspace_bytes} == {*nodes}:
        return kept.workspace_bytes
    workspace_bytes = measure()
    with contextlib.suppress(FileFault):
        files.write(path, _Workspaces(workspace_bytes=workspace_bytes))
    return workspace_bytes


@contextlib.contextmanager
def kept_prices(
    cache: Path, *, device: torch.device, clock: Clock, method: str, anew: Prices | None = None
) -> Iterator[Prices]:
    """Prices known so far, to be added to; what was added is kept when the block is left.

    Args:
        anew: the only ones that count as known, of this clock and method; what is added to them
            replaces what is kept.
    """
    key = (device_of(device).name, torch.get_num_threads(), clock, method)
    path = _path(cache / "operators", *key)
    kept = _read(path, OperatorPrices)
    known = {} if kept is None else kept.prices
    prices = known if anew is None else anew
    num_before = len(prices)
    try:
        yield prices
    finally:  # also what was measured before a Ctrl-C
        if len(prices) > num_before:
            with contextlib.suppress(FileFault):
                files.write(path, OperatorPrices(prices=known | prices))


def _path(folder: Path, *key: object) -> Path:
    parts = (*key, *sorted(describe_machine().items()))
    return folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.json"


def _read(path: Path, noun: type[_Noun]) -> _Noun | None:
    try:
        return files.read(path, noun) if path.exists() else None
    except (FileFault, OSError):  # damaged, or in a folder that may not be looked into
        return None
