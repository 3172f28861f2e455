"""Any model: the same numbers as plain training, within the limit, as predicted?

Each model is trained plainly and as planned: for 70 % and 50 % of its plain peak, and for the
smallest limit that there is a plan for. Each row is measured in a process of its own, so that a
crash is one row's. A row is `same` if every number is, `refused` if the tool says no by name, else
`wrong` or `crash`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import commit_of_code, finish, keep_freed_memory, options, say
from zoo.measuring import OWN, builders_of

COLUMNS = (
    "model",
    "family",
    "precision",
    "status",
    "peak_error_pct",
    "floor_peak_over_limit",
    "time_ratio_70",
    "predicted_time_ratio_70",
    "time_ratio_50",
    "predicted_time_ratio_50",
    "plan_seconds",
)
QUICK = ("bert", "unet")
# Under autocast: a model of each kind that people train in it.
MIXED = (
    *("bert", "roberta", "modernbert", "gpt2", "llama", "llama-padded", "qwen3", "gemma3"),
    *("t5", "bart", "vit", "swin", "resnet", "convnext", "segformer", "whisper", "mamba2"),
    *("mixtral", "clip", "unet", "diffusion", "autoencoder", "gru", "torch-transformer", "mixer"),
)
_PATIENCE_SECONDS = 900


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--models",
        type=Path,
        metavar="FILE.py",
        help="builders of yours instead: public functions that return model, batch and loss",
    )
    parser.add_argument("--only", nargs="*", help="only these models")
    parser.add_argument(
        "--rest", action="store_true", help="only what was not yet measured with this commit"
    )
    parser.add_argument("--precision", nargs="*", default=["float32", "bf16"])
    parser.add_argument("--scale", type=float, default=4.0, help="times the builders' own batches")
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each search")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    given = parser.parse_args()
    keep_freed_memory()
    if given.quick:
        given.scale, given.rounds, given.seconds, given.precision = 0.5, 1, 0.2, ["float32"]
    if given.models:
        given.scale = 1.0
    latest = Path(__file__).parent / "results" / "latest.json"
    kept = Kept(None if given.quick or given.models else latest, commit_of_code())
    jobs = [job for job in _jobs(given) if not (given.rest and job in kept.measured_now)]
    with ThreadPoolExecutor(given.jobs) as pool:
        waiting = [pool.submit(_row, given, *job) for job in jobs]
        try:
            for row in as_completed(waiting):
                kept.add(row.result())
        except KeyboardInterrupt:
            say("interrupted: what is measured so far is kept, and the others' last rows")
            pool.shutdown(cancel_futures=True)
    rows = [*kept.rows.values()]
    result = {"rows": rows, **_summary(rows)}
    finish(__file__, result, columns=COLUMNS, arguments=given, is_own=given.models is None)


class Kept:
    """The last row of every model, each with its commit, in the result file as soon as it is there.

    A run of all models takes hours, so one that is killed leaves what it had measured.

    Args:
        path: the result file; without one, rows are only collected.
    """

    def __init__(self, path: Path | None, commit: str) -> None:
        self._path, self._commit = path, commit
        self._result: dict[str, Any] = {"rows": []}
        if path is not None and path.exists():
            self._result = json.loads(path.read_text())
        last = (row for row in self._result["rows"] if row["model"] in OWN)
        self.rows = {(row["model"], row["precision"]): row for row in last}

    @property
    def measured_now(self) -> set[tuple[str, str]]:
        """What was measured with the code as it is."""
        return {job for job, row in self.rows.items() if row["commit"] == self._commit}

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["model"], row["precision"]] = {**row, "commit": self._commit}
        if self._path is not None:
            self._result["rows"] = [*self.rows.values()]
            self._path.write_text(json.dumps(self._result, indent=1) + "\n")


def _jobs(given: argparse.Namespace) -> list[tuple[str, str]]:
    names = list(builders_of(given.models) if given.models else QUICK if given.quick else OWN)
    names = [name for name in names if not given.only or name in given.only]
    return [
        (name, precision)
        for precision in given.precision
        for name in names
        if precision == "float32" or given.models or given.only or name in MIXED
    ]


def _row(given: argparse.Namespace, name: str, precision: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent / "measuring.py"), name]
    command += ["--precision", precision, "--scale", str(given.scale)]
    command += ["--rounds", str(given.rounds), "--seconds", str(given.seconds)]
    if given.models:
        command += ["--file", str(given.models)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
        if ended.returncode == 0:
            row = json.loads(ended.stdout.splitlines()[-1])
        else:
            last = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
            row = _crash(given, name, precision, last[0])
    except subprocess.TimeoutExpired:
        row = _crash(given, name, precision, f"no end after {_PATIENCE_SECONDS} s")
    say(f"{name}, {precision}: {row['status']} {row.get('reason', '')[:200]}")
    return row


def _crash(given: argparse.Namespace, name: str, precision: str, reason: str) -> dict[str, Any]:
    family = given.models.stem if given.models else OWN[name][0]
    row = {"model": name, "family": family, "precision": precision}
    return {**row, "status": "crash", "reason": reason}


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the benchmark is about."""
    same = [row for row in rows if row["status"] == "same"]
    statuses = {
        status: sum(row["status"] == status for row in rows)
        for status in ("same", "refused", "wrong", "crash")
    }
    summary: dict[str, Any] = {
        "num_rows": len(rows),
        "num_families": len({row["family"] for row in rows}),
        **statuses,
    }
    if same:
        errors = [abs(row["peak_error_pct"]) for row in same]
        summary |= {
            "worst_peak_error_pct": max(errors),
            "median_peak_error_pct": statistics.median(errors),
            "worst_peak_over_limit": max(row["peak_over_limit"] for row in same),
        }
    off = [
        abs(row[f"predicted_time_ratio_{share}"] / row[f"time_ratio_{share}"] - 1)
        for row in same
        for share in ("70", "50")
        if f"time_ratio_{share}" in row
    ]
    if off:
        summary["time_ratios_within_10_pct"] = sum(error <= 0.1 for error in off) / len(off)
    say(json.dumps(summary))
    return summary


if __name__ == "__main__":
    main()
