"""One rank: enters its host, joins the others, and does the jobs that it is told to.

    python rank.py jobs.json result.json

Started by `main.py`. Rank 0 writes the rows.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks.joining import enter_host, join


def main() -> None:
    jobs, result = map(Path, sys.argv[1:])
    told = json.loads(jobs.read_text())
    enter_host(told["hosts"])
    rows = _rows(told)
    if os.environ["RANK"] == "0":
        result.write_text(json.dumps(rows))


def _rows(told: dict[str, Any]) -> list[dict[str, Any]]:
    from harness import say
    from pipeline.jobs import boundary_memory, replicas, versus_torch
    from pipeline.models import Case, Replicas
    from torch import distributed

    join()
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
