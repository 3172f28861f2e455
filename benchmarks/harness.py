"""What every benchmark shares: its options, its machine, its table and its result file."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayplan.devices.machine import describe_machine

__all__ = ["commit_of_code", "finish", "keep_freed_memory", "known_of_others", "options", "say"]

# glibc: no block straight from the system, and none given back.
_KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def options(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help="a tiny setting, to see that it runs")
    return parser


def keep_freed_memory() -> None:
    """Start this process again, with a malloc that reuses freed memory, as allocators for GPUs do.

    By default glibc asks the system for every large tensor anew. The page faults of that were seen
    to take a sixth of a step's processor time, by an amount that depends on what else the machine
    does. All methods of a benchmark run under the same setting.
    """
    if any(os.environ.get(name) != value for name, value in _KEEPING.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_KEEPING})


def say(*words: object) -> None:
    """Progress goes to stderr, results to stdout."""
    print(*words, file=sys.stderr, flush=True)


def commit_of_code() -> str:
    """The last commit that changed what is measured, and whether there are changes since."""
    code = ("--", "src", "benchmarks/*.py")  # of all folders in it

    def git(*words: str) -> str:
        command = ["git", *words, *code]
        root = Path(__file__).resolve().parents[1]
        return subprocess.run(command, capture_output=True, text=True, cwd=root).stdout.strip()

    commit = git("log", "-1", "--format=%h") or "unknown"
    return f"{commit}-dirty" if git("status", "--porcelain") else commit


def known_of_others(
    script: str,
    arguments: argparse.Namespace,
    *,
    key: str = "model",
    is_kept: Callable[[dict[str, Any]], bool] = lambda row: False,
) -> dict[str, Any]:
    """Where only some models or cases are run anew, what the last full run tells of the others.

    Args:
        script: the benchmark.
        arguments: of its command line; those that are run anew are in the plural of `key`.
        key: the column that tells them apart.
        is_kept: which rows of those that are run anew stay as well.
    """
    latest = Path(script).parent / "results" / "latest.json"
    chosen = getattr(arguments, f"{key}s")
    if arguments.quick or not chosen or not latest.exists():
        return {}
    before = json.loads(latest.read_text())
    for rows in (found for found in before.values() if isinstance(found, list)):
        rows[:] = [row for row in rows if row.get(key) not in chosen or is_kept(row)]
    return before


def finish(
    script: str,
    result: dict[str, Any],
    *,
    columns: Sequence[str],
    arguments: argparse.Namespace,
    is_own: bool = True,
) -> None:
    """Print the table, keep the result beside the script, print JSON if asked.

    Args:
        is_own: whether these are the benchmark's own cases, whose results are in the repository;
            those of cases that a user brings are kept apart.
    """
    rows = result["rows"]
    widths = [max([len(name), *(len(_shown(row.get(name))) for row in rows)]) for name in columns]
    for cells in ([*columns], *([_shown(row.get(name)) for name in columns] for row in rows)):
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    result = {
        **result,
        "machine": describe_machine(),
        "command": " ".join([f"python {_relative(script)}", *sys.argv[1:]]),
        "threads": torch.get_num_threads(),
        "malloc": {name: os.environ.get(name) for name in _KEEPING},
    }
    folder = Path(script).parent / "results"
    if arguments.quick or not is_own:
        folder /= "quick" if arguments.quick else "given"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest.json").write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))


def _shown(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else str(cell)


def _relative(script: str) -> str:
    return "/".join(Path(script).resolve().parts[-3:])
