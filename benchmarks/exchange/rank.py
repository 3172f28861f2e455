"""One rank: does the jobs that it is told to.

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
    rows = _rows(told["jobs"])
    if os.environ["RANK"] == "0":
        result.write_text(json.dumps(rows))


def _rows(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from exchange.jobs import sums_of_sizes, tuned, whole_step
    from exchange.sets import GradientSet
    from harness import say
    from torch import distributed

    join()
    rows = []
    for job in jobs:
        kind = job.pop("kind")
        if kind == "sums":
            found = sums_of_sizes(**job)
        else:
            function = tuned if kind == "tuner" else whole_step
            found = [function(job.pop("name"), GradientSet(**job.pop("given")), **job)]
        rows += found
        if distributed.get_rank() == 0:
            for row in found:
                say(json.dumps({name: row[name] for name in row if name != "seconds_by_round"}))
    distributed.barrier()
    distributed.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
