"""One rank: does the jobs that it is told to.

    python rank.py jobs.json result.json

Started by `main.py`. Rank 0 writes the rows.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks.joining import do_jobs


def _rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    from pipeline.jobs import boundary_memory, replicas, versus_torch
    from pipeline.models import Case, Replicas

    if job["kind"] == "versus torch":
        return [versus_torch(Case(**job["case"]), rounds=job["rounds"])]
    if job["kind"] == "memory":
        return [boundary_memory(Case(**job["few"]), Case(**job["many"]))]
    return [replicas(Replicas(**job["case"]), rounds=job["rounds"])]


if __name__ == "__main__":
    do_jobs(_rows)
