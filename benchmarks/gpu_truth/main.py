"""What others measured on real GPUs, beside what bayplan predicts of it without one.

One file a quantity: `replaying.py` has reserved memory over time, from traces of torch's allocator.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_truth import replaying
from harness import finish, options, say

HERE = Path(__file__).resolve().parent
BESIDE_REPOSITORY = HERE.parents[2] / "shared" / "data" / "gpu"
EXAMPLE = HERE / "example"
QUANTITIES = {"allocator": replaying.found}
COLUMNS = ("source", "quantity", "reported", "predicted", "error_pct", "explained")


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[BESIDE_REPOSITORY], help="folders of measurements"
    )
    arguments = parser.parse_args()
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
            say(f"{name}: {folder}")
            told = found(folder, is_quick=arguments.quick)
            rows += [row.as_dict() for row in told.rows]
            claims[f"{name}, {folder.name}"] = told.claims
    say(claims)
    finish(__file__, {"rows": rows, "claims": claims}, columns=COLUMNS, arguments=arguments)


if __name__ == "__main__":
    main()
