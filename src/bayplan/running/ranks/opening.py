"""`open_watch`: the watch over the ranks of the default process group.

It is the first thing that a rank opens, so that whatever is wrong with the rest is told once.
"""

import atexit
import math
import os

from torch import distributed

from bayplan import torch_private
from bayplan.data.errors import UsageError
from bayplan.running.ranks.journal import Journal
from bayplan.running.ranks.watching import Watch, host_of_store

__all__ = ["check_environment", "open_watch"]

_SILENCE_SECONDS = 8.0


def open_watch() -> Watch:
    """Open the watch of this rank; it closes at exit by itself.

    What the rank does is told as a text, or as the journal that knows.
    """
    watch = Watch(
        torch_private.default_store(),
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        describe=lambda doing: doing.text(doing.now) if isinstance(doing, Journal) else doing,
        is_waiting=lambda doing: isinstance(doing, Journal) and doing.is_waiting(doing.now),
        silence_seconds=_silence_seconds() or _SILENCE_SECONDS,
        host=host_of_store(os.environ),
    )
    watch.__enter__()
    atexit.register(watch.close_at_exit)
    return watch


def check_environment() -> None:
    """Refuse a BAYPLAN_TIMEOUT that is no time; to be called when a watch can tell of it."""
    if _silence_seconds() is None:
        text = os.environ.get("BAYPLAN_TIMEOUT")
        raise UsageError(f"BAYPLAN_TIMEOUT is {text!r}; give seconds of silence, like 8")


def _silence_seconds() -> float | None:
    """How long a rank may be silent before it counts as lost; None if that is not said rightly."""
    try:
        seconds = float(os.environ.get("BAYPLAN_TIMEOUT", _SILENCE_SECONDS))
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
