"""Ranks that bayplan starts find each other on this machine alone.

torch's store listens on every interface, and gloo on the one that the host's name leads to: whoever
reaches that port may write into the store. Ranks of this machine need the loopback interface only.
"""

import os
import socket
from datetime import timedelta

from torch import distributed

from bayplan.devices.device import Device

__all__ = ["join_ranks"]

_LOOPBACK = "127.0.0.1"
_WAIT = timedelta(minutes=5)  # for the others, as torch waits


def join_ranks(device: Device) -> None:
    """Make the process group of the ranks that the environment names.

    Where `MASTER_ADDR` is another host's, it is torch's own way, on the interfaces it chooses.
    """
    if os.environ["MASTER_ADDR"] != _LOOPBACK:
        distributed.init_process_group(device.group_backend)
        return
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port, is_host = int(os.environ["MASTER_PORT"]), rank == 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listening = None
    if is_host:
        own = socket.create_server((_LOOPBACK, port), backlog=max(128, num_ranks))
        listening = own.detach()
    store = distributed.TCPStore(
        _LOOPBACK, port, num_ranks, is_host, _WAIT, master_listen_fd=listening
    )
    distributed.init_process_group(
        device.group_backend, store=store, rank=rank, world_size=num_ranks
    )
