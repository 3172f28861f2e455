"""`python -m bayplan.running.ranks.probing FILE`: two ranks measure how fast they talk.

Run as both ranks of a process group; rank 0 writes what was found. The fastest of several repeats
counts, for other processes only ever add.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import distributed

from bayplan import torch_private
from bayplan.data import files
from bayplan.data.link_speeds import LinkSpeed, LinkSpeeds
from bayplan.devices.machine import cache_directory
from bayplan.running.exchange.mailboxes import Mailboxes
from bayplan.running.exchange.meeting import Meeting, shares_memory
from bayplan.running.exchange.neighbours import meet_neighbours
from bayplan.running.exchange.sums import Sums, room_bytes
from bayplan.running.exchange.transports import Transport, transport_of

__all__ = ["main"]

_SMALL_BYTES = 64
_LARGE_BYTES = 4 << 20  # as large as messages between stages mostly are
_NUM_SMALL = 50
_NUM_LARGE = 8


def main(path: Path) -> None:
    """Measure as one of two ranks."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    meeting = Meeting(
        store=distributed.PrefixStore("bayplan/probing", torch_private.default_store()),
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        cache=cache_directory(),
        is_willing=shares_memory(os.environ),
    )
    sums, transports = _sums(meeting), _transports(meeting)
    speeds = LinkSpeeds(
        message=_speed(lambda data: _there_and_back(transports, data), torch.ones, 2),
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


def _sums(meeting: Meeting) -> Sums:
    """As gradients are summed."""
    needed_bytes = sum(
        room_bytes(size // 4, torch.float32) for size in (_SMALL_BYTES, _LARGE_BYTES)
    )
    sums = meeting.sums(range(meeting.world_size), needed_bytes)
    assert sums is not None, "all ranks take part"
    return sums


def _transports(meeting: Meeting) -> tuple[Transport, ...]:
    """As stages send their values."""
    mailboxes, neighbours = Mailboxes(meeting), meet_neighbours(meeting)
    mailboxes.open({1 - meeting.rank: _SMALL_BYTES})
    return mailboxes, neighbours


def _speed(
    exchange: Callable[[torch.Tensor], object],
    room: Callable[[int], torch.Tensor],
    num_ways: int,
) -> LinkSpeed:
    """What one of an exchange's ways costs."""
    latency, _ = _fastest(exchange, room(_SMALL_BYTES // 4), _NUM_SMALL)
    seconds, busy_seconds = _fastest(exchange, room(_LARGE_BYTES // 4), _NUM_LARGE)
    return LinkSpeed(
        latency_seconds=latency / num_ways,
        bytes_per_second=_LARGE_BYTES * num_ways / max(seconds - latency, 1e-9),
        cores=busy_seconds / seconds,
    )


def _fastest(
    exchange: Callable[[torch.Tensor], object], data: torch.Tensor, repeats: int
) -> tuple[float, float]:
    """Seconds of one exchange, and those that the cores of both ranks were busy with it."""
    exchange(data)  # warm: connections are made
    found: list[tuple[float, float]] = []
    for _ in range(repeats):
        distributed.barrier()
        start, busy = time.perf_counter(), time.process_time()
        exchange(data)
        found.append((time.perf_counter() - start, time.process_time() - busy))
    busy_seconds = torch.tensor([busy for _, busy in found], dtype=torch.float64)
    distributed.all_reduce(busy_seconds)
    return min(zip((seconds for seconds, _ in found), busy_seconds.tolist(), strict=True))


def _there_and_back(transports: Sequence[Transport], data: torch.Tensor) -> None:
    peer = 1 - distributed.get_rank()
    for comes in (False, True) if distributed.get_rank() == 0 else (True, False):
        way = transport_of(transports, peer, data.nbytes, comes=comes)
        (way.receive if comes else way.send)(data, peer, 0).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
