"""How fast ranks of this machine talk: measured once by two of them, and kept.

They run `python -m bayplan.running.ranks.link_speeds FILE`. The fastest of several repeats counts,
because other processes only ever add.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import distributed

from bayplan import torch_compat as torch_compat
from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.links import LinkSpeed, LinkSpeeds
from bayplan.devices.machine import cache_directory, describe_machine
from bayplan.running.collectives.sums import room_bytes
from bayplan.running.collectives.topology import open_topology, shares_memory
from bayplan.running.collectives.transports import (
    Mailboxes,
    Transport,
    open_peer_memory,
    transport_of,
)
from bayplan.running.ranks.failures import INTERRUPTED
from bayplan.running.ranks.launching import launch

__all__ = ["local_link_speeds", "main"]


_MOST_SECONDS = 120.0  # importing torch twice on a busy machine is most of it


def local_link_speeds(cache: Path | None = None) -> LinkSpeeds | None:
    """What the cache has from before, or else measured now; None if two ranks cannot talk."""
    path = _path(cache or cache_directory())
    with contextlib.suppress(FileFault, OSError):  # damaged, or not to be looked into
        if path.exists():
            return files.read(path, LinkSpeeds)
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        measured_file = Path(folder) / "link-speeds.json"
        code = launch(
            ["-m", "bayplan.running.ranks.link_speeds", str(measured_file)],
            num_ranks=2,
            log_folder=Path(folder),
            timeout_seconds=_MOST_SECONDS,
            on_line=lambda line: None,
        )
        if code == INTERRUPTED:  # the launcher took it for its ranks
            raise KeyboardInterrupt
        if code or not measured_file.exists():
            return None
        speeds = files.read(measured_file, LinkSpeeds)
    with contextlib.suppress(FileFault):  # a cache that cannot be written costs time alone
        files.write(path, speeds)
    return speeds


def _path(cache: Path) -> Path:
    # The number of threads is that of a rank, whatever it is here.
    machine = [item for item in sorted(describe_machine().items()) if item[0] != "threads"]
    way = (shares_memory(os.environ), machine)
    name = hashlib.sha256(repr(way).encode()).hexdigest()[:24]
    return cache / "links" / f"{name}.json"


_SMALL_BYTES = 64
_LARGE_BYTES = 4 << 20  # as large as messages between stages mostly are
_NUM_SMALL = 50
_NUM_LARGE = 8


def main(path: Path) -> None:
    """Measure as one of two ranks of a process group; rank 0 writes the speeds."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    topology = open_topology()
    sizes = (room_bytes(size // 4, torch.float32) for size in (_SMALL_BYTES, _LARGE_BYTES))
    sums = topology.sums(range(topology.world_size), sum(sizes))  # as gradients are summed
    assert sums is not None, "all ranks take part"
    mailboxes, neighbours = Mailboxes(topology), open_peer_memory(topology)  # as stages send values
    mailboxes.open({1 - topology.rank: _SMALL_BYTES})
    speeds = LinkSpeeds(
        message=_speed(lambda data: _there_and_back((mailboxes, neighbours), data), torch.ones, 2),
        reduce=_speed(
            lambda data: sums.begin(data).wait(),
            lambda count: sums.room(count, torch.float32, torch.device("cpu")),
            1,
        ),
    )
    if distributed.get_rank() == 0:
        files.write(path, speeds)
    distributed.barrier()
    distributed.destroy_process_group()


def _speed(
    exchange: Callable[[torch.Tensor], object], room: Callable[[int], torch.Tensor], num_ways: int
) -> LinkSpeed:
    latency, _ = _fastest_of(exchange, room(_SMALL_BYTES // 4), _NUM_SMALL)
    seconds, busy_seconds = _fastest_of(exchange, room(_LARGE_BYTES // 4), _NUM_LARGE)
    return LinkSpeed(
        latency_seconds=latency / num_ways,
        bytes_per_second=_LARGE_BYTES * num_ways / max(seconds - latency, 1e-9),
        cores=busy_seconds / seconds,
    )


def _fastest_of(
    exchange: Callable[[torch.Tensor], object], data: torch.Tensor, repeats: int
) -> tuple[float, float]:
    """Seconds of one exchange, and for how long the cores of both ranks were busy with it."""
    exchange(data)  # warm: connections are made
    measured: list[tuple[float, float]] = []
    for _ in range(repeats):
        distributed.barrier()
        start, busy = time.perf_counter(), time.process_time()
        exchange(data)
        measured.append((time.perf_counter() - start, time.process_time() - busy))
    busy_seconds = torch.tensor([busy for _, busy in measured], dtype=torch.float64)
    distributed.all_reduce(busy_seconds)
    return min(zip((seconds for seconds, _ in measured), busy_seconds.tolist(), strict=True))


def _there_and_back(transports: Sequence[Transport], data: torch.Tensor) -> None:
    peer = 1 - distributed.get_rank()
    for comes in (False, True) if distributed.get_rank() == 0 else (True, False):
        way = transport_of(transports, peer, data.nbytes, comes=comes)
        (way.receive if comes else way.send)(data, peer, 0).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
