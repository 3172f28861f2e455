"""Where a rank is: its process and host, as ranks tell each other."""

import os
import re
import socket

from bayplan.devices.machine import is_running

__all__ = ["is_seen_running", "own_place"]

_PLACE = re.compile(r"pid (\d+) on (.*)")


def own_place() -> str:
    """This process, in words."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def is_seen_running(place: str) -> bool:
    """Whether another process of this host is seen to run; of other hosts, nothing is seen.

    Example:
        >>> is_seen_running(own_place()), is_seen_running("pid 1 on the moon")
        (False, False)
    """
    match = _PLACE.fullmatch(place)
    if match is None or match[2] != socket.gethostname() or int(match[1]) == os.getpid():
        return False
    return is_running(int(match[1]))
