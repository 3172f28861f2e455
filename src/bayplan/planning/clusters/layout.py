"""`Layout`: devices in a row, close ones next to each other, and what runs of them take to talk.

A stage gets a run of neighbours in this row, so its replicas are as close together as the network
lets them, and so are stages that follow each other.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bayplan.simulating.network import Network

__all__ = ["Layout", "layout_of"]

# All-reduces are looked up at these sizes and interpolated, because the best way changes with size.
_SIZES = np.array([0, *(4**power for power in range(5, 19))], dtype=float)
_MOST_SENDERS = 64  # of a run, next to its end; farther ones share no wire with these


@dataclass(frozen=True)
class Layout:
    """Devices in a row.

    Attributes:
        period: runs that begin so many places apart are alike; 0 if none are.
    """

    network: Network
    order: tuple[int, ...]
    period: int = 0
    _sums: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    # Latency, and seconds for a byte that one device sends, where all of a run send at once.
    _messages: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def run(self, begin: int, number: int) -> tuple[int, ...]:
        return self.order[begin : begin + number]

    def sum_seconds(self, begin: int, number: int, size_bytes: np.ndarray) -> np.ndarray:
        if number < 2:
            return 0.0 * size_bytes
        key = self.key(begin, number)
        if key not in self._sums:
            devices = sorted(self.run(begin, number))
            self._sums[key] = np.array(
                [self.network.reduce(devices, size).alone_seconds for size in _SIZES]
            )
        known = self._sums[key]
        largest = (known[-1] - known[-2]) / (_SIZES[-1] - _SIZES[-2])
        return np.interp(size_bytes, _SIZES, known) + largest * np.maximum(
            0.0, size_bytes - _SIZES[-1]
        )

    def message_seconds(self, border: int, number: int, size_bytes: np.ndarray) -> np.ndarray:
        """Of what each of so many devices on one side of a border of the row sends or gets at once.

        Each device before the border talks to the one as far behind it.
        """
        if not 0 < border < len(self.order):
            return 0.0 * size_bytes
        width = min(number, border, len(self.order) - border, _MOST_SENDERS)
        key = self.key(border, width)
        if key not in self._messages:
            self._messages[key] = self._message_costs(border, width)
        latency_seconds, seconds_per_byte = self._messages[key]
        return np.where(size_bytes > 0, latency_seconds + size_bytes * seconds_per_byte, 0.0)

    def _message_costs(self, border: int, width: int) -> tuple[float, float]:
        size = float(2**20)
        pairs = zip(self.run(border - width, width), self.run(border, width), strict=True)
        messages = [self.network.message(*pair, size) for pair in pairs]
        users = Counter(wire for message in messages for wire in message.wires)
        return max(message.latency_seconds for message in messages), max(
            message.seconds * max((users[wire] for wire in message.wires), default=1) / size
            for message in messages
        )

    def key(self, begin: int, number: int) -> tuple[int, int]:
        """The same for runs that are alike."""
        return (begin % self.period if self.period else begin, number)


def layout_of(network: Network, num_devices: int, *, kinds: Sequence[str] = ()) -> Layout:
    """Put devices in a row by the network's levels, if it has any, else by their numbers.

    Those of one kind come together within each group.
    """
    named = kinds or ("",) * num_devices
    places: list[list[int]] = [[] for _ in range(num_devices)]
    levels = getattr(network, "levels", tuple)()
    period = 0
    for level in reversed(levels):
        for index, group in enumerate(level.groups):
            for device in group:
                places[device].append(index)
        sizes = {len(group) for group in level.groups}
        # The largest groups below the whole are alike if they have one size.
        if not period and len(level.groups) > 1 and len(sizes) == 1:
            (period,) = sizes
    order = sorted(range(num_devices), key=lambda device: (places[device], named[device], device))
    if len(set(named)) > 1:
        period = 0
    return Layout(network, tuple(order), period)
