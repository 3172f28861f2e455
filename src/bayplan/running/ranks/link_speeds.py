"""How fast ranks of this machine talk: measured by two of them once, and kept."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.link_speeds import LinkSpeeds
from bayplan.devices.machine import cache_directory, describe_machine
from bayplan.running.exchange.meeting import shares_memory
from bayplan.running.ranks.launching import launch
from bayplan.running.ranks.reports import INTERRUPTED

__all__ = ["local_link_speeds"]

_MOST_SECONDS = 120.0  # importing torch twice on a busy machine is most of it


def local_link_speeds(cache: Path | None = None) -> LinkSpeeds | None:
    """What was measured before, or else now, in some seconds; None if two ranks cannot talk.

    Args:
        cache: keeps it; the user's by default.
    """
    path = _path(cache or cache_directory())
    with contextlib.suppress(FileFault, OSError):  # damaged, or not to be looked into
        if path.exists():
            return files.read(path, LinkSpeeds)
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        found = Path(folder) / "link-speeds.json"
        code = launch(
            ["-m", "bayplan.running.ranks.probing", str(found)],
            num_ranks=2,
            log_folder=Path(folder),
            timeout_seconds=_MOST_SECONDS,
            on_line=lambda line: None,
        )
        if code == INTERRUPTED:  # the launcher took it for its ranks
            raise KeyboardInterrupt
        if code or not found.exists():
            return None
        speeds = files.read(found, LinkSpeeds)
    with contextlib.suppress(FileFault):  # a cache that cannot be written costs time alone
        files.write(path, speeds)
    return speeds


def _path(cache: Path) -> Path:
    # The number of threads is that of a rank, whatever it is here.
    machine = [item for item in sorted(describe_machine().items()) if item[0] != "threads"]
    way = (shares_memory(os.environ), machine)
    name = hashlib.sha256(repr(way).encode()).hexdigest()[:24]
    return cache / "links" / f"{name}.json"
