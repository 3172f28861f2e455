"""One rank: enters its host, joins the others, and does the jobs that it is told to.

    python rank.py jobs.json result.json

Started by `main.py`. Rank 0 writes the rows.
"""

import ctypes
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def main() -> None:
    jobs, result = map(Path, sys.argv[1:])
    told = json.loads(jobs.read_text())
    _enter_host(told["hosts"])
    rows = _rows(told)
    if os.environ["RANK"] == "0":
        result.write_text(json.dumps(rows))


def _enter_host(hosts: list[dict[str, str]]) -> None:
    """Move into a network namespace; only threads made afterwards do, so before all imports."""
    if not hosts:
        return
    own = hosts[int(os.environ["RANK"]) * len(hosts) // int(os.environ["WORLD_SIZE"])]
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", own["name"]).open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {own['name']}")
    os.environ["MASTER_ADDR"] = hosts[0]["address"]
    os.environ["GLOO_SOCKET_IFNAME"] = own["interface"]


def _rows(told: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from harness import say
    from pipeline.jobs import boundary_memory, replicas, versus_torch
    from pipeline.models import Case, Replicas
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows = []
    for job in told["jobs"]:
        if job["kind"] == "versus torch":
            rows.append(versus_torch(Case(**job["case"]), rounds=job["rounds"]))
        elif job["kind"] == "memory":
            rows.append(boundary_memory(Case(**job["few"]), Case(**job["many"])))
        else:
            rows.append(replicas(Replicas(**job["case"]), rounds=job["rounds"]))
        if distributed.get_rank() == 0:
            say(json.dumps(rows[-1]))
    distributed.barrier()
    distributed.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
