"""How many of torch's operators and modules train with the bits of plain training under a plan?"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say
from operators.databases import module_cases, module_names, operator_cases, operator_names
from operators.refused import REFUSED
from operators.sweep import Case, compare

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
COLUMNS = ("database", "dtype", "tried", "same", "refused", "wrong", "crash", "samples", "share")
_WORST_FIRST = ("crash", "wrong", "refused", "same", "none")
Cases = Callable[..., Iterator[Case]]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--samples", type=int, default=3, help="of each operator, at most")
    parser.add_argument("--dtypes", nargs="*", help="float32, float64, bfloat16; all by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of samples
    rows, others = [], dict[str, str]()
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if arguments.dtypes and name not in arguments.dtypes:
            continue
        step = 40 if arguments.quick else 1
        operators = operator_names(dtype)[::step]
        modules = module_names()[::step] if dtype is torch.float32 else []
        for database, names, cases, most in (
            ("operators", operators, operator_cases, arguments.samples),
            ("modules", modules, module_cases, 1),
        ):
            if names:
                row, found = sweep(names, cases, dtype, most=most)
                rows.append({"database": database, "dtype": name, **row})
                others |= {f"{each}, {name}": why for each, why in found.items()}
                say(rows[-1])
    finish(__file__, {"rows": rows, "not_same": others}, columns=COLUMNS, arguments=arguments)


def sweep(
    names: Sequence[str], cases: Cases, dtype: torch.dtype, *, most: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare operators: how many came out how, and what came of those that are not the same."""
    counts, num_samples, others = Counter[str](), 0, dict[str, str]()
    for name in names:
        outcomes = [compare(case) for case in cases(name, dtype, most=most)]
        worst = min(outcomes, key=lambda each: _WORST_FIRST.index(each.status), default=None)
        if worst is None or worst.status == "none":
            continue  # nothing to compare with
        # A refusal that nobody has written down is as bad as a crash.
        status = worst.status
        status = "crash" if status == "refused" and name not in REFUSED else status
        counts[status] += 1
        num_samples += len(outcomes)
        if status != "same":
            others[name] = f"{status}: {worst.why}"
            say(f"{name}, {dtype}: {others[name]}")
    row = {status: counts[status] for status in ("same", "refused", "wrong", "crash")}
    tried = sum(row.values())
    return {"tried": tried, **row, "samples": num_samples, "share": row["same"] / tried}, others


if __name__ == "__main__":
    main()
