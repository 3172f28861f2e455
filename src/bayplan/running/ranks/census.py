"""What fills a rank's memory when it is fullest, by kind.

A counter of bytes knows how many there are, and not what they are for. So in one step every
action's highest moment is noted, with all tensors that the rank has as the action begins. Those of
the fullest action are told by kind; what is more than they is made inside the action itself:
temporaries, scratch memory of kernels, and values that will be known by kind when it is done.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from bayplan.data.graph import StorageKind
from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import MemoryMeter, open_meter

__all__ = ["Census", "open_census"]

Held = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@contextmanager
def open_census(held: Held, device: torch.device) -> Iterator["Census"]:
    """A census with a meter of its own; what others measure stays theirs."""
    with open_meter(device, cache_directory()) as meter:
        yield Census(held, meter)


class Census:
    """Follows the actions of one step.

    Args:
        held: tells all tensors of the rank, with what each is there for; the first counts where
            several lie in the same memory.
        meter: of the rank's device.
    """

    def __init__(self, held: Held, meter: MemoryMeter) -> None:
        self._held, self._meter = held, meter
        self._now: Counter[str] = Counter()
        self._fullest: Counter[str] = Counter()
        self._most_bytes: int | None = None

    def began(self, position: int) -> None:
        """An action is about to begin."""
        self._now = self._counted()
        self._meter.reset_peak()

    def ended(self, position: int) -> None:
        """It is done."""
        peak_bytes = self._meter.peak_bytes
        if self._most_bytes is None or peak_bytes > self._most_bytes:
            self._most_bytes, self._fullest = peak_bytes, self._now

    def by_kind(self, peak_bytes: int) -> dict[str, int]:
        """A peak of so many bytes by kind, the largest first; what has no kind is temporary."""
        found = Counter(self._fullest)
        found[StorageKind.TEMPORARY] += max(0, peak_bytes - sum(found.values()))
        return {str(kind): size for kind, size in found.most_common() if size}

    def _counted(self) -> Counter[str]:
        known: set[int] = set()
        found: Counter[str] = Counter()
        for kind, tensor in self._held():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                found[kind] += storage.nbytes()
        return found
