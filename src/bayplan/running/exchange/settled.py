"""Sums as settings ask for them."""

from collections.abc import Mapping

import torch

from bayplan.data.errors import UsageError
from bayplan.data.exchange_settings import Algorithm, Compression, ExchangeSettings
from bayplan.running.exchange.cheapest import CheapestSums, WayCosts
from bayplan.running.exchange.cycled import CycledSums
from bayplan.running.exchange.meeting import HIERARCHICAL, RING, SCATTERED, SHARED
from bayplan.running.exchange.sums import SharedSums, SocketSums, Sums

__all__ = ["costs_by", "sums_by"]

_WAY_OF = {
    Algorithm.RING: RING,
    Algorithm.REDUCE_SCATTER: SCATTERED,
    Algorithm.HIERARCHICAL: HIERARCHICAL,
    Algorithm.SHARED: SHARED,
}
_WIRE_DTYPES = {
    Compression.NONE: None,
    Compression.FP16: torch.float16,
    Compression.BF16: torch.bfloat16,
}


def sums_by(settings: ExchangeSettings, ways: Mapping[str, Sums], costs: WayCosts) -> Sums:
    """Sums in the way that settings name, or in the best of those that they allow.

    Args:
        settings: what is asked for.
        ways: that there are, by name. They all have the rooms of the first one, and are changed.
        costs: of each way.

    Raises:
        UsageError: there is no such way here.
    """
    for sums in ways.values():
        if isinstance(sums, SocketSums | SharedSums):
            sums.wire_dtype = _WIRE_DTYPES[settings.compression]
        if isinstance(sums, SharedSums):
            sums.strip_bytes = settings.strip_bytes
    # Rooms are those of the first way, whichever makes the sums.
    found: Sums = CheapestSums(ways, costs_by(settings, costs))
    if settings.cycle_time_ms:
        found = CycledSums(found, settings.cycle_time_ms / 1e3)
    return found


def costs_by(settings: ExchangeSettings, costs: WayCosts) -> WayCosts:
    """The costs of those ways that settings allow.

    Raises:
        UsageError: there is no such way here.
    """
    allowed = _allowed(settings, costs.seconds_of)
    return WayCosts({name: costs.seconds_of[name] for name in allowed})


def _allowed(settings: ExchangeSettings, ways: Mapping[str, object]) -> list[str]:
    if settings.algorithm is not Algorithm.AUTO:
        way = _WAY_OF[settings.algorithm]
    elif settings.hierarchical_allreduce:
        way = HIERARCHICAL
    else:
        is_flat = settings.hierarchical_allreduce is False
        return [name for name in ways if not (is_flat and name == HIERARCHICAL)]
    if way == HIERARCHICAL and SHARED in ways:
        way = SHARED  # with one host, inside it is all there is
    if way not in ways:
        raise UsageError(
            f"gradients cannot be summed by {way} here; there are {', '.join(ways)}. `shared` is"
            " for one host, `hierarchical` for hosts with several ranks each"
        )
    return [way]
