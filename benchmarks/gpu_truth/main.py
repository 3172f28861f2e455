"""What others measured on real GPUs, beside what bayplan predicts of it without one.

One file a kind of measurement: `replaying.py` has reserved memory over time from traces of torch's
allocator, `trace_steps.py` the peaks of the steps behind them, `lm_tables.py` tables of language
models, `images.py` the largest batches and step times of image models.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_truth import images, lm_tables, replaying, trace_steps
from harness import finish, options, say

HERE = Path(__file__).resolve().parent
BESIDE_REPOSITORY = (HERE.parents[2] / "shared" / "data" / "gpu").resolve()
EXAMPLE = HERE / "example"
QUANTITIES = {
    "allocator": replaying.found,
    "steps of traces": trace_steps.found,
    "image models": images.found,
    "tables": lm_tables.found,
}
COLUMNS = ("source", "quantity", "reported", "predicted", "error_pct", "explained")


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[BESIDE_REPOSITORY], help="folders of measurements"
    )
    parser.add_argument("--only", choices=tuple(QUANTITIES), help="one kind of measurement")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
    folders = [folder for folder in arguments.data if folder.is_dir()]
    for folder in arguments.data:
        if folder not in folders:
            say(f"no measurements in {folder}: name a folder with --data DIR")
    if not folders and not arguments.quick:
        say("nothing to compare with, nothing written; --quick takes an example written by hand")
        return
    rows: list[dict[str, Any]] = []
    claims: dict[str, Any] = {}
    for folder in folders + [EXAMPLE] * arguments.quick:
        for name, found in QUANTITIES.items():
            if arguments.only not in (None, name):
                continue
            say(f"{name}: {folder}")
            try:
                told = found(folder, is_quick=arguments.quick, on_progress=say)
            except KeyboardInterrupt:
                claims[f"{name}, {folder.name}"] = {"interrupted": True}
                continue
            rows += [{"kind": name} | row.as_dict() for row in told.rows]
            claims[f"{name}, {folder.name}"] = told.claims
    is_own = {folder.resolve() for folder in folders} == {BESIDE_REPOSITORY}
    latest = HERE / "results" / "latest.json"
    # Of the kinds that are not run now, what is known.
    if arguments.only and is_own and not arguments.quick and latest.exists():
        before = json.loads(latest.read_text())
        rows += [row for row in before["rows"] if row.get("kind") not in (None, arguments.only)]
        claims = {**before["claims"], **claims}
    say(claims)
    result = {"rows": rows, "claims": claims}
    finish(__file__, result, columns=COLUMNS, arguments=arguments, is_own=is_own)


if __name__ == "__main__":
    main()
