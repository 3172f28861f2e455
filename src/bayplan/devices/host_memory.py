"""How much memory of the host this process may still take, by each thing that bounds it.

The machine may have gigabytes free where a container, a batch system or `ulimit` lets a process
have less; what it would be killed or refused for is the least of all of them.
"""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["OWN_LIMITS", "Room", "host_rooms"]

OWN_LIMITS = {"address space": "v", "data": "d"}  # of each process alone, as options of `ulimit`
_GROUPS = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """What a process may still take, and what it has; of one that bounds it."""

    free_bytes: int
    used_bytes: int


def host_rooms(groups: Path = _GROUPS) -> dict[str, Room]:
    """The rooms of this process: of the machine, of its control groups, and of its own limits."""
    import psutil  # here: it takes 0.05 s to import, and most commands do not need it

    own = psutil.Process().memory_info()
    rooms = {"machine": Room(psutil.virtual_memory().available, own.rss)}
    for group, free_bytes in _groups(groups):
        rooms[str(group)] = Room(free_bytes, own.rss)
    limits = (resource.RLIMIT_AS, own.vms), (resource.RLIMIT_DATA, own.data)
    for name, (limit, used_bytes) in zip(OWN_LIMITS, limits, strict=True):
        most, _ = resource.getrlimit(limit)
        most = sys.maxsize if most == resource.RLIM_INFINITY else most
        rooms[name] = Room(max(0, most - used_bytes), used_bytes)
    return rooms


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups of this process that have a limit, and what each has free."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, most, current, idle = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, most, current = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        if not group.is_dir():  # inside a container, whose own group is the top of what it sees
            group = top
        for each in (group, *group.parents):
            free = _free_of(each, most, current, idle)
            if free is not None:
                yield each, free
            if each == top:
                break


def _free_of(group: Path, most: str, current: str, idle: str) -> int | None:
    try:
        limit = int((group / most).read_text())  # "max" where there is none
        used = int((group / current).read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(kept.get(idle, 0)))  # files that were read may go
    except (OSError, ValueError):
        return None
