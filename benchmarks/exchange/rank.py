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
    from exchange.jobs import sums_of_sizes, tuned, whole_step
    from exchange.sets import GradientSet

    kind = job.pop("kind")
    if kind == "sums":
        return sums_of_sizes(**job)
    function = tuned if kind == "tuner" else whole_step
    return [function(job.pop("name"), GradientSet(**job.pop("given")), **job)]


if __name__ == "__main__":
    do_jobs(_rows)
