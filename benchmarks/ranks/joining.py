"""How a process of a benchmark becomes a rank: it enters its host and joins the others."""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["do_jobs", "enter_host"]

Row = dict[str, Any]

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


def do_jobs(do: Callable[[Row], list[Row]]) -> None:
    """Be a rank: join the others, do all jobs that were told, and as rank 0 write the rows.

    One thread for each rank, and gloo between them.

    Args:
        do: returns the rows of one job; torch may be imported by then.
    """
    jobs, result = map(Path, sys.argv[1:])
    told = json.loads(jobs.read_text())
    enter_host(told["hosts"])
    import torch
    from harness import say
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    is_first, rows = distributed.get_rank() == 0, []
    for job in told["jobs"]:
        found = do(job)
        rows += found
        for row in found if is_first else ():
            say(json.dumps({name: row[name] for name in row if name != "seconds_by_round"}))
    distributed.barrier()
    distributed.destroy_process_group()
    if is_first:
        result.write_text(json.dumps(rows))
