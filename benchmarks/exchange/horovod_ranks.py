"""Horovod among ranks that something else started: what `horovodrun` would have told them."""

import importlib
import os
from types import ModuleType
from typing import Any

from torch import distributed

from bayplan.devices.machine import host_identity

__all__ = ["HorovodMissing", "open_horovod"]


class HorovodMissing(RuntimeError):
    """It cannot take part; the message says why."""


_servers: list[Any] = []  # at which ranks meet, for as long as the process lives


def open_horovod() -> ModuleType:
    """`horovod.torch`, ready to exchange gradients; to be called on all ranks.

    Raises:
        HorovodMissing: it is not installed, or ranks are on several hosts.
    """
    try:
        horovod = importlib.import_module("horovod.torch")
    except ImportError as fault:
        raise HorovodMissing(f"Horovod is not installed ({fault})") from fault
    hosts: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(hosts, host_identity())
    if len(set(hosts)) > 1:
        raise HorovodMissing("Horovod is compared on one host only")
    if "HOROVOD_RANK" not in os.environ:
        os.environ.update(_told())
    horovod.init()
    return horovod


def _told() -> dict[str, str]:
    """Where ranks meet, and who this one is."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    place: list[Any] = [None]
    if rank == 0:
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        util = importlib.import_module("horovod.runner.common.util.hosts")
        place[0] = server.start()
        server.init(util.get_host_assignments(util.parse_hosts(f"localhost:{size}"), size))
        _servers.append(server)
    distributed.broadcast_object_list(place)
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(place[0]),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
