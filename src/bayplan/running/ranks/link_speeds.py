"""How fast ranks of this machine talk: measured once by two of them, and kept.

They run `python -m bayplan.running.ranks.link_speeds FILE DEVICE`. The fastest of several repeats
counts, because other processes only ever add.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

from bayplan import torch_compat as torch_compat
from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.links import LinkSpeed, LinkSpeeds
from bayplan.devices.device import HOST, Device, device_of
from bayplan.devices.machine import cache_directory, describe_machine
from bayplan.devices.moments import moment
from bayplan.running.collectives.groups import LinkKey, Queues, has_tags
from bayplan.running.collectives.sums import room_bytes
from bayplan.running.collectives.topology import RankTopology, open_topology, shares_memory
from bayplan.running.collectives.transports import (
    Mailboxes,
    Transport,
    open_peer_memory,
    transport_of,
)
from bayplan.running.ranks.failures import INTERRUPTED
from bayplan.running.ranks.joining import join_ranks
from bayplan.running.ranks.launching import launch

__all__ = ["local_link_speeds", "main", "measured_speeds"]


_MOST_SECONDS = 120.0  # importing torch twice on a busy machine is most of it


def local_link_speeds(cache: Path | None = None, device: Device = HOST) -> LinkSpeeds | None:
    """What the cache has from before, or else measured now; None if two ranks cannot talk.

    `device` is of the kind that ranks have; the default is the processor.
    """
    path = _path(cache or cache_directory(), device)
    with contextlib.suppress(FileFault, OSError):  # damaged, or not to be looked into
        if path.exists():
            return files.read(path, LinkSpeeds)
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        measured_file = Path(folder) / "link-speeds.json"
        code = launch(
            ["-m", "bayplan.running.ranks.link_speeds", str(measured_file), device.where.type],
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


def _path(cache: Path, device: Device) -> Path:
    # The number of threads is that of a rank, whatever it is here.
    machine = [item for item in sorted(describe_machine().items()) if item[0] != "threads"]
    way = (shares_memory(os.environ), machine, *([device.name] if device.is_accelerator else []))
    name = hashlib.sha256(repr(way).encode()).hexdigest()[:24]
    return cache / "links" / f"{name}.json"


_SMALL_BYTES = 64
_LARGE_BYTES = 4 << 20  # as large as messages between stages mostly are
_NUM_SMALL = 50
_NUM_LARGE = 8


def main(path: Path, kind: str) -> None:
    """Measure as one of two ranks of a process group; rank 0 writes the speeds."""
    torch.set_num_threads(1)
    device = device_of(kind).of_rank(int(os.environ["LOCAL_RANK"]))
    join_ranks(device)
    speeds = measured_speeds(device.where)
    if distributed.get_rank() == 0:
        files.write(path, speeds)
    distributed.barrier()
    distributed.destroy_process_group()


def measured_speeds(device: torch.device) -> LinkSpeeds:
    """How fast tensors of a device go between the two ranks of the default process group.

    The device tells the times, so what it was given before does not count. Messages and sums of a
    device take no cores.
    """
    topology = open_topology(device)
    sizes = (room_bytes(size // 4, torch.float32) for size in (_SMALL_BYTES, _LARGE_BYTES))
    sums = topology.sums(range(topology.world_size), sum(sizes))  # as gradients are summed
    assert sums is not None, "all ranks take part"
    exchange = _Exchange(topology)
    return LinkSpeeds(
        message=_speed(
            exchange.there_and_back, lambda count: torch.ones(count, device=device), num_ways=2
        ),
        reduce=_speed(
            lambda data: sums.begin(data).wait(),
            lambda count: sums.room(count, torch.float32, device),
            num_ways=1,
        ),
    )


class _Exchange:
    """Messages between two ranks, as stages send values."""

    def __init__(self, topology: RankTopology) -> None:
        self._rank, self._peer = topology.rank, 1 - topology.rank
        self._going: tuple[Transport, ...]
        self._coming: tuple[Transport, ...]
        if has_tags(topology.device):
            mailboxes = Mailboxes(topology)
            self._going = self._coming = (mailboxes, open_peer_memory(topology))
            mailboxes.open({self._peer: _SMALL_BYTES})
        else:
            ways = {sender: LinkKey(0, 1, bool(sender), sender, 1 - sender) for sender in range(2)}
            queues = Queues(self._rank, topology.device)
            queues.open(ways.values())
            self._going = (queues.of(ways[self._rank]),)
            self._coming = (queues.of(ways[self._peer]),)

    def there_and_back(self, data: torch.Tensor) -> None:
        for comes in (False, True) if self._rank == 0 else (True, False):
            transports = self._coming if comes else self._going
            way = transport_of(transports, self._peer, data.nbytes, comes=comes)
            (way.receive if comes else way.send)(data, self._peer, 0).wait()


def _speed(
    exchange: Callable[[torch.Tensor], object],
    room: Callable[[int], torch.Tensor],
    *,
    num_ways: int,
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
    device = data.device
    exchange(data)  # warm: connections are made
    measured: list[tuple[float, float]] = []
    for _ in range(repeats):
        distributed.barrier()
        start, busy = moment(device), time.process_time()
        exchange(data)
        seconds = float(moment(device)) - float(start)
        measured.append((seconds, (time.process_time() - busy) * device_of(device).counts_cpu_time))
    busy_seconds = torch.tensor([busy for _, busy in measured], dtype=torch.float64, device=device)
    distributed.all_reduce(busy_seconds)
    return min(zip((seconds for seconds, _ in measured), busy_seconds.tolist(), strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
