"""What do broken and hostile files do? Each is refused with a clear error, or read as it stands.

Real files of every kind are changed at random, as text and as trees of values, read, and used for
what the commands use them for. Each reader runs in a process of its own, which counts what escapes.
"""

import collections
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say
from hostile.seeds import write_seeds

READERS = (
    *("plan", "rank_plan", "record", "graph", "profile", "device", "cluster", "cluster_yaml"),
    *("buckets", "topology", "placement", "sizes"),
)
COLUMNS = (
    *("reader", "inputs", "accepted", "refused", "crashes", "hangs", "too_large", "escapes"),
    *("worst_seconds", "grown_mib"),
)
_ALARMS = (signal.SIGALRM, signal.SIGPROF)
_WORDS = {"placement": 3, "sizes": 3, "topology": 2}  # cheap to read, so that more of them are


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="+", choices=READERS, default=READERS)
    given = parser.parse_args()
    inputs = 1_200 if given.quick else given.inputs
    whole = sum(_WORDS.get(reader, 1) for reader in given.readers)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_seeds(Path(folder))
        for reader in given.readers:
            share = -(-inputs * _WORDS.get(reader, 1) // whole)
            rows.append(_row(reader, share, given.seed, Path(folder)))
            say(reader, {name: rows[-1][name] for name in COLUMNS[1:]}, *rows[-1]["seen"])
    totals = {name: sum(row[name] for row in rows) for name in COLUMNS[1:8]}
    finish(__file__, {"rows": rows, "totals": totals}, columns=COLUMNS, arguments=given)
    if any(totals[name] for name in ("crashes", "hangs", "too_large", "escapes")):
        sys.exit(1)


def _row(reader: str, inputs: int, seed: int, folder: Path) -> dict[str, Any]:
    """Read inputs in a child process; where one ends it, another goes on behind that input."""
    row: dict[str, Any] = collections.Counter()
    seen: list[str] = []
    first = 0
    while first < inputs:
        script = Path(__file__).with_name("reading.py")
        range_of = map(str, (seed, first, inputs))
        command = [sys.executable, str(script), reader, str(folder), *range_of]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        last: dict[str, Any] = {}
        for line in child.stdout:  # one each second, and one at the end
            last = json.loads(line)
        child.wait()
        if not last or child.returncode > 0:
            raise RuntimeError(f"the process that reads {reader} ended with {child.returncode}")
        first = last.pop("next")
        seen += last.pop("seen")
        for name in ("worst_seconds", "grown_mib"):
            row[name] = max(row[name], last.pop(name))
        row.update(last)
        if child.returncode:  # ended by the kernel: SIGKILL by its own alarm, or a crash in C
            row["inputs"] += 1
            row["hangs" if -child.returncode in _ALARMS else "crashes"] += 1
            seen.append(f"input {first} ended the process with {child.returncode}")
            first += 1
    return {name: 0 for name in COLUMNS} | {"reader": reader, **row, "seen": seen[:5]}


if __name__ == "__main__":
    main()
