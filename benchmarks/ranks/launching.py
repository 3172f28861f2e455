"""Ranks that a benchmark starts, and what they do one after the other."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import say
from ranks.hosts import Host, HostsUnavailable, two_hosts

from bayplan.running.ranks.launching import launch

__all__ = ["Launch", "run_all"]

_TIMEOUT_SECONDS = 900.0
_SIGNALLED = 128  # and the number of the signal, as exit code of ranks that were told to stop

Row = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """Ranks that are started together, and their jobs, each with a name."""

    num_ranks: int
    jobs: Sequence[Row]
    num_hosts: int = 1


def run_all(program: Path, launches: Sequence[Launch]) -> tuple[list[Row], list[Row]]:
    """The rows of all launches, and those that failed.

    Args:
        program: what every rank runs, with a file of jobs and a file for rows.
        launches: one after the other.
    """
    rows, failures = [], []
    for one in launches:
        names = [job["name"] for job in one.jobs]
        say(f"{', '.join(names)}: {one.num_ranks} ranks")
        try:
            rows += _run(program, one)
        except HostsUnavailable as reason:
            rows += [{"case": name, "skipped": str(reason)} for name in names]
        except RuntimeError as fault:
            failures.append({"cases": names, "fault": str(fault)})
            say(failures[-1])
    return rows, failures


def _run(program: Path, one: Launch) -> list[Row]:
    if one.num_hosts == 1:
        return _run_on(program, one, ())
    with two_hosts() as hosts:
        return _run_on(program, one, hosts)


def _run_on(program: Path, one: Launch, hosts: Sequence[Host]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        jobs, result = Path(folder, "jobs.json"), Path(folder, "result.json")
        jobs.write_text(json.dumps({"jobs": one.jobs, "hosts": [asdict(host) for host in hosts]}))
        exit_code = launch(
            [str(program), str(jobs), str(result)],
            num_ranks=one.num_ranks,
            log_folder=Path(folder, "logs"),
            timeout_seconds=_TIMEOUT_SECONDS,
            on_line=say,
        )
        if exit_code > _SIGNALLED:
            sys.exit(exit_code)
        if exit_code or not result.exists():
            raise RuntimeError(f"the ranks end with exit code {exit_code}; see above why")
        return json.loads(result.read_text())
