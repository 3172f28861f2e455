"""Rings through devices: the order in which they all-reduce, and how fast.

Each of n devices sends 2 (n - 1) / n of all bytes to the next one. The narrowest wire decides: each
hop of the ring that passes it gets an equal part of it. Devices that are sorted by closeness pass
each slow wire once, and one ring is enough. Where pairs have links of their own, as in a cube of
NVLinks, no order is given: the search takes one ring after the other, in both directions, out of
the bandwidth that the rings before have left, as NCCL does.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise, permutations

from bayplan.simulating.wiring import Route, Wire, Wiring

__all__ = ["Ring", "find_rings", "ring_flows", "ring_rate"]

_MOST_SEARCHED = 16  # devices: those of one host
_MOST_STEPS = 10_000  # of one search for a ring
_MOST_RINGS = 12
_WORTH = 0.05  # of what the rings before carry; less is not worth a ring of its own


@dataclass(frozen=True, kw_only=True)
class Ring:
    """An order of devices and the bytes/s that go around."""

    devices: tuple[int, ...]
    bytes_per_s: float


def ring_flows(wiring: Wiring, orders: Iterable[Sequence[int]]) -> Counter[Wire]:
    """How many ways go through each wire, if some rings turn at once."""
    return Counter(
        wire for order in orders for route in _routes(wiring, order) for wire in route.wires
    )


def ring_rate(flows: Counter[Wire]) -> float:
    """Bytes/s of each of these ways."""
    return min(wire.reduce_bytes_per_s / number for wire, number in flows.items())


def find_rings(wiring: Wiring, devices: Sequence[int]) -> list[Ring]:
    """Rings through all of some devices, which are sorted by closeness."""
    plain = tuple(devices)
    among = set(devices)
    has_pairs = any(among.intersection(wiring.neighbours_by_pairs(device)) for device in devices)
    # Between hosts, rings that leave one before they have seen all of it would be found as well;
    # nobody goes around like that.
    is_searched = 2 < len(devices) <= _MOST_SEARCHED and wiring.are_on_one_host(devices)
    if not has_pairs or not is_searched:
        return [Ring(devices=plain, bytes_per_s=ring_rate(ring_flows(wiring, [plain])))]
    return _packed(wiring, plain)


def _packed(wiring: Wiring, devices: tuple[int, ...]) -> list[Ring]:
    left = {  # bytes/s of each wire
        wire: wire.reduce_bytes_per_s
        for pair in permutations(devices, 2)
        for wire in wiring.route(*pair).wires
    }
    rings: list[Ring] = []
    while len(rings) < _MOST_RINGS:
        best = max(
            (_rated(wiring, order, left) for order in _candidates(wiring, devices, left)),
            key=lambda ring: ring.bytes_per_s,
        )
        if rings and best.bytes_per_s < _WORTH * sum(ring.bytes_per_s for ring in rings):
            break
        rings.append(best)
        for wire, number in ring_flows(wiring, [best.devices]).items():
            left[wire] -= number * best.bytes_per_s
    return rings


def _rated(wiring: Wiring, order: tuple[int, ...], left: dict[Wire, float]) -> Ring:
    flows = ring_flows(wiring, [order])
    rate = min(left[wire] / number for wire, number in flows.items())
    return Ring(devices=order, bytes_per_s=max(0.0, rate))


def _candidates(
    wiring: Wiring, devices: tuple[int, ...], left: dict[Wire, float]
) -> list[tuple[int, ...]]:
    """The plain order, and the first ring of links that are as wide as can be."""
    rates = {
        pair: min(left[wire] for wire in wiring.route(*pair).wires)
        for pair in permutations(devices, 2)
    }
    for least in sorted({rate for rate in rates.values() if rate > 0}, reverse=True):
        order = _cycle(devices, {pair for pair, rate in rates.items() if rate >= least})
        if order is not None:
            return [devices, order]
    return [devices]


def _cycle(devices: tuple[int, ...], joined: set[tuple[int, int]]) -> tuple[int, ...] | None:
    """A ring along pairs that are joined; None if there is none, or it is not found in time."""
    after = {device: [peer for peer in devices if (device, peer) in joined] for device in devices}
    if not all(after.values()):
        return None
    steps = count(1)

    def extended(order: tuple[int, ...]) -> tuple[int, ...] | None:
        if len(order) == len(devices):
            return order if devices[0] in after[order[-1]] else None
        for device in after[order[-1]]:
            if device not in order:
                if next(steps) > _MOST_STEPS:
                    return None
                ring = extended((*order, device))
                if ring is not None:
                    return ring
        return None

    return extended(devices[:1])


def _routes(wiring: Wiring, order: Sequence[int]) -> Iterable[Route]:
    return (wiring.route(*hop) for hop in chain(pairwise(order), [(order[-1], order[0])]))
