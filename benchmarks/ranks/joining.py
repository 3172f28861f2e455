"""How a process of a benchmark becomes a rank: it enters its host and joins the others."""

import ctypes
import os
from datetime import timedelta
from pathlib import Path

__all__ = ["enter_host", "join"]

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def enter_host(hosts: list[dict[str, str]]) -> None:
    """Move into a network namespace; only threads made afterwards do, so before torch is imported.

    Args:
        hosts: as `two_hosts` made them; with none, all ranks stay where they are.
    """
    if not hosts:
        return
    own = hosts[int(os.environ["RANK"]) * len(hosts) // int(os.environ["WORLD_SIZE"])]
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", own["name"]).open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {own['name']}")
    os.environ["MASTER_ADDR"] = hosts[0]["address"]
    os.environ["GLOO_SOCKET_IFNAME"] = own["interface"]


def join() -> None:
    """One thread for each rank, and gloo between them."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
