"""What happens to ranks that are killed, stopped, cut off, starved or told to go, and after that?

Small trainings on 2, 4 and 8 processes are struck by real faults, resumed from their last
checkpoint and struck again. Every loss is compared with that of a training nobody disturbed.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from faults.chains import Chain, Setup
from harness import commit_of_code, finish, options, say
from ranks.hosts import HostsUnavailable

SETUPS = (
    Setup("data-parallel-2", 2, "0:0-1"),
    Setup("data-parallel-4", 4, "0:0-3"),
    Setup("data-parallel-8", 8, "0:0-7"),
    Setup("pipeline-1-1", 2, "0:0.0:1"),
    Setup("pipeline-3-1", 4, "0:0-2.0:3"),
    Setup("pipeline-7-1", 8, "0:0-6.0:7"),
    Setup("stale-1-1", 2, "0:0.0:1", staleness=1),
    Setup("stale-3-1", 4, "0:0-2.0:3", staleness=1),
    Setup("stale-7-1", 8, "0:0-6.0:7", staleness=1),
    Setup("two-hosts-data-parallel-4", 4, "0:0-1,1:0-1", num_hosts=2),
    Setup("two-hosts-pipeline-3-1", 4, "0:0-1,1:0.1:1", num_hosts=2),
    Setup("two-hosts-stale-3-1", 4, "0:0-1,1:0.1:1", staleness=1, num_hosts=2),
)
NAMES = [setup.name for setup in SETUPS]
# On one host, how often by the number of ranks; `SIGNALS` are sent to runs of the command line.
KINDS = {
    2: {
        **{"kill": 7, "crash": 2, "leave": 2, "stop": 4, "error": 2, "loader": 3, "save": 4},
        **{"hold": 1, "pause": 2, "store gone": 2, "full disk": 2},
    },
    4: {
        **{"kill": 5, "crash": 1, "leave": 1, "stop": 3, "error": 2, "loader": 2, "save": 2},
        **{"hold": 1, "pause": 1, "store gone": 1, "full disk": 1},
    },
    8: {
        **{"kill": 3, "crash": 1, "leave": 1, "stop": 2, "error": 1, "loader": 1, "save": 1},
        **{"hold": 1, "pause": 1, "store gone": 1, "full disk": 1},
    },
}
SIGNALS = ("ctrl-c", "sigterm")
ACROSS = {"kill": 2, "cut": 3, "link down": 2, "slow": 1}
KEYS = tuple(dict.fromkeys((*KINDS[2], *ACROSS, *SIGNALS)))
COLUMNS = (
    *("setup", "kind", "injected", "hangs", "unexpected", "unnamed", "left", "stray"),
    *("lost_steps", "wrong_losses", "detect_seconds", "detect_most", "end_seconds"),
    *("resume_seconds", "resume_most"),
)
FAILURES = ("hangs", "unexpected", "unnamed", "left", "stray", "lost_steps", "wrong_losses")
AT_ONCE = ("kill", "crash", "leave", "error", "loader", "save", "store gone")
Row = dict[str, Any]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--setups", nargs="+", choices=NAMES, help="only these; keep the others")
    parser.add_argument("--kinds", nargs="+", choices=KEYS, help="only these; keep the others")
    parser.add_argument(
        "--rest", action="store_true", help="only what was not yet struck with this commit"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = ["pipeline-1-1"] if given.quick else given.setups or NAMES
    latest = Path(__file__).parent / "results" / "latest.json"
    kept = Kept(None if given.quick else latest, commit_of_code())
    with tempfile.TemporaryDirectory(prefix="bayplan-faults-") as folder:
        for setup in SETUPS:
            done = kept.struck_now(setup) if given.rest else set()
            wanted = [kind for kind in given.kinds or KEYS if kind not in done]
            inside, signals = kinds_of(setup, wanted, is_quick=given.quick)
            if setup.name not in chosen or not (inside or signals):
                continue
            say(f"{setup.name}: {setup.num_ranks} ranks")
            before = shared_memory()
            chain = Chain(setup, Path(folder, setup.name), given.seed)
            reason = ""
            try:
                if inside:
                    chain.strike_all(inside)
                if signals:
                    chain.signal_runs(signals)
            except HostsUnavailable as fault:
                reason = str(fault)
            kept.add(setup, chain.rows, stray=len(shared_memory() - before), skipped=reason)
    finish(__file__, kept.result, columns=COLUMNS, arguments=given)
    if kept.result["stray_shared_memory"] or any(kept.result[name] for name in FAILURES):
        sys.exit(1)


class Kept:
    """The last faults of every setup, each with its commit, in the result file once it is struck.

    Args:
        path: the result file; without one, faults are only collected.
    """

    def __init__(self, path: Path | None, commit: str) -> None:
        self._path, self._commit = path, commit
        self.result: Row = {"faults": [], "skipped": []}
        if path is not None and path.exists():
            self.result = json.loads(path.read_text())

    def struck_now(self, setup: Setup) -> set[str]:
        """The kinds that it was struck by with the code as it is."""
        own = (row for row in self.result["faults"] if row["setup"] == setup.name)
        return {row["kind"] for row in own if row.get("commit") == self._commit}

    def add(self, setup: Setup, rows: list[Row], *, stray: int = 0, skipped: str = "") -> None:
        """Replace the faults of the same kinds; what ranks said last stays where one failed."""
        made = [{**row, "commit": self._commit} for row in rows]
        for row in made:
            if not any(row.get(name) for name in FAILURES):
                row.pop("logs", None)
        if made:
            made[-1]["stray_shared_memory"] = stray
        anew = {(row["setup"], row["kind"]) for row in made}
        others = [row for row in self.result["faults"] if (row["setup"], row["kind"]) not in anew]
        found = sorted([*others, *made], key=lambda row: NAMES.index(row["setup"]))
        reasons = [row for row in self.result["skipped"] if row["setup"] != setup.name]
        reasons += [{"setup": setup.name, "reason": skipped}] if skipped else []
        self.result |= result_of(found, skipped=reasons)
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self.result, indent=1) + "\n")


def result_of(found: list[Row], *, skipped: list[Row]) -> Row:
    """All figures of the faults that were injected."""
    return {
        "rows": [summed(rows) for rows in grouped(found)],
        "injected": len(found),
        **{name: sum(row.get(name, 0) for row in found) for name in FAILURES},
        "without_action": sum(row.get("without_action", 0) for row in found),
        "stray_shared_memory": sum(row.get("stray_shared_memory", 0) for row in found),
        "detect_seconds": {
            "at once": spread(found, "detect_seconds", AT_ONCE),
            "by silence": spread(found, "detect_seconds", ("stop", "cut", "link down")),
        },
        "end_seconds": spread(found, "end_seconds"),
        "resume_seconds": spread(found, "resume_seconds"),
        "skipped": skipped,
        "faults": found,
    }


def kinds_of(setup: Setup, wanted: Sequence[str], *, is_quick: bool) -> tuple[list[str], list[str]]:
    """What a chain is struck by, and the signals to runs of the command line."""
    if is_quick:
        return ["kill", "stop", "loader"], ["sigterm"]
    is_one_host = setup.num_hosts == 1
    counts = KINDS[setup.num_ranks] if is_one_host else ACROSS
    inside = [kind for kind, count in counts.items() if kind in wanted for _ in range(count)]
    return inside, [kind for kind in SIGNALS if kind in wanted and is_one_host]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def grouped(found: list[Row]) -> Iterable[list[Row]]:
    keys = dict.fromkeys((row["setup"], row["kind"]) for row in found)
    return [[row for row in found if (row["setup"], row["kind"]) == key] for key in keys]


def summed(rows: list[Row]) -> Row:
    """One kind of fault in one setup."""
    figures: Row = {"setup": rows[0]["setup"], "kind": rows[0]["kind"], "injected": len(rows)}
    figures |= {name: sum(row.get(name, 0) for row in rows) for name in FAILURES}
    for name, most in (("detect", "detect_most"), ("end", ""), ("resume", "resume_most")):
        seconds = [row[f"{name}_seconds"] for row in rows if f"{name}_seconds" in row]
        if seconds:
            figures[f"{name}_seconds"] = statistics.median(seconds)
            figures |= {most: max(seconds)} if most else {}
    return figures


def spread(found: list[Row], name: str, kinds: tuple[str, ...] = ()) -> Row:
    seconds = sorted(row[name] for row in found if name in row and row["kind"] in (kinds or KEYS))
    if not seconds:
        return {}
    shares = {"least": 0.0, "median": 0.5, "of 95 %": 0.95, "most": 1.0}
    last = len(seconds) - 1
    return {"count": len(seconds), **{key: seconds[round(q * last)] for key, q in shares.items()}}


if __name__ == "__main__":
    main()
