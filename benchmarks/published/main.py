"""The published tables of all five reports, predicted from clusters' files and our own captures.

Reports 000 to 002: every row is captured, cut as it was, and simulated; few constants are fitted to
all rows together, and every run is predicted once more by constants that never saw it. Report 003:
peaks, the batch behind them and the largest batches, nothing fitted. Report 004: latency and
bandwidth of each experiment. Then the best plan for VGG16 on the reports' server. All simulated.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say
from published.best import best_plans
from published.checkpoints import rows_of_report_003
from published.claims import claims_of
from published.exchanges import rows_of_report_004
from published.tables import Tables, orders
from reports_000_002.rows import RUNS

COLUMNS = ("row", "quantity", "reported", "predicted", "error_pct", "loo_error_pct", "explained")
SMALL = ("OneFlow AlexNet, data parallel", "OneFlow AlexNet, 15:1", "PipeDream AlexNet, 7:1")


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    runs = [
        run for run in RUNS if run.reported and (run.name in SMALL if arguments.quick else True)
    ]
    tables = Tables(runs=runs, on_run=say, leaves_out=not arguments.quick)
    rows = tables.rows()
    say(asdict(tables.constants))
    result: dict[str, Any] = {
        "orders": orders(rows),
        "constants": asdict(tables.constants),
        "memory_constants": asdict(tables.memory_constants),
        "steps": [tables.step(run) for run in runs],
    }
    say("report 003")
    rows += rows_of_report_003(("resnet18",)) if arguments.quick else rows_of_report_003()
    rows += rows_of_report_004()
    say("the best plan for VGG16")
    result["best_plans"] = [] if arguments.quick else best_plans(tables.constants)
    result["rows"] = [_with_errors(row) for row in rows]
    result["claims"] = claims_of(result)
    say(result["claims"])
    finish(__file__, result, columns=COLUMNS, arguments=arguments)


def _with_errors(row: dict[str, Any]) -> dict[str, Any]:
    left = row.pop("loo_predicted")
    return {
        **row,
        "source": "simulated",
        "error_pct": 100 * (row["predicted"] / row["reported"] - 1),
        "loo_error_pct": None if left is None else 100 * (left / row["reported"] - 1),
    }


if __name__ == "__main__":
    main()
