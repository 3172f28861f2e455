"""A planned run that meets less memory than it was planned for: what it says, and what to try."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bayplan.data.errors import RanOut
from bayplan.data.units import format_bytes, limit_text, tighter_limit
from bayplan.devices.device import Device
from bayplan.devices.host_memory import OWN_LIMITS
from bayplan.tracing.explain import asked_memory, memory_fault

__all__ = ["MemoryWatch"]


class MemoryWatch:
    """Knows how much memory there was when a run began.

    Args:
        predicted_bytes: the peak of the plan on this device.
        held_bytes: what of that is there already.
        option: that sets a lower limit.
        hear: hears of the limit to plan within next.
    """

    def __init__(
        self,
        device: Device,
        *,
        predicted_bytes: int,
        option: str,
        held_bytes: int = 0,
        hear: Callable[[int], object] = lambda smaller_bytes: None,
    ) -> None:
        self._device, self._predicted_bytes, self._option = device, predicted_bytes, option
        self._begin, self._held_bytes = device.rooms, held_bytes
        self.hear = hear

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Turn an error that says memory ran out into one with both figures and a way out.

        Raises:
            RanOut: memory ran out.
        """
        try:
            yield
        except Exception as fault:
            cause = memory_fault(fault)
            if cause is None:
                raise
            bound, found_bytes = self._found()
            smaller_bytes = tighter_limit(self._predicted_bytes, found_bytes)
            self.hear(smaller_bytes)
            raise RanOut(
                f"out of memory in a planned run, which asked for {asked_memory(cause)}: predicted"
                f" was a peak of {format_bytes(self._predicted_bytes)}, and {_words(bound)} had"
                f" {format_bytes(found_bytes)} for it, code and buffers included. Try"
                f" {self._option} {limit_text(smaller_bytes)}; with --checkpoint DIR and --replan,"
                " a run does so by itself",
                smaller_bytes=smaller_bytes,
            ) from fault

    def _found(self) -> tuple[str, int]:
        """What bounds the run most, and how much that had for it.

        What it has now and what is free now, while all that it made is still alive; and no more
        than was free when it began.
        """
        found = {}
        for name, room in self._device.rooms.items():
            begin = self._begin.get(name, room)
            now_bytes = room.free_bytes + max(0, room.used_bytes - begin.used_bytes)
            found[name] = min(now_bytes, begin.free_bytes) + self._held_bytes
        bound = min(found, key=lambda name: found[name])
        return bound, found[bound]


def _words(bound: str) -> str:
    if bound in OWN_LIMITS:
        return f"the limit of this process (ulimit -{OWN_LIMITS[bound]})"
    return {"machine": "the machine", "device": "the device"}.get(bound, f"the group {bound}")
