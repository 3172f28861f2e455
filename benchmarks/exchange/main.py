"""How fast are gradients averaged? Ours against DistributedDataParallel, Horovod and gloo.

All contestants of a row take turns on the same ranks, which are processes of this machine with one
thread each. Ratios are medians over the rounds of ratios within a round: of step times against
others, so less is better, and of gloo's ring over our sums, so more is better.
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exchange.claims import claims
from exchange.sets import SETS, GradientSet
from harness import finish, keep_freed_memory, known_of_others, options, say
from ranks.launching import Launch, run_all

KIB, MIB = 1 << 10, 1 << 20
CAPS_MB = (1.0, 5.0, 100.0)
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SIZES_BETWEEN = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 32 * MIB)
# Between two hosts a step is as long as its exchange; smaller sets, so that it ends.
SETS_BETWEEN = (replace(SETS[0], name="vgg16 / 16", divisor=16), SETS[1])
COLUMNS = (
    "case",
    "set",
    "ranks",
    "backward_ms",
    "ours_over_ddp_default",
    "ours_over_ddp_best",
    "best_ddp",
    "ours_over_horovod",
    "ours_over_alone",
    "size_bytes",
    "ring_over_shared",
    "ring_over_hierarchical",
    "fastest",
    "tuner_steps",
    "found_over_best",
)
CASES = ("one host", "sums, one host", "two hosts", "sums, two hosts", "tuner")


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--cases", nargs="*", choices=CASES, help="these anew")
    parser.add_argument("--rounds", type=int, default=12, help="turns of all contestants")
    arguments = parser.parse_args()
    if not arguments.quick:  # which starts this process once more
        keep_freed_memory()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are removed
    chosen = arguments.cases or CASES
    launches = _quick() if arguments.quick else _full(chosen, arguments.rounds)
    rows, failures = run_all(Path(__file__).with_name("rank.py"), launches)
    rows = [*known_of_others(__file__, arguments, key="case").get("rows", []), *rows]
    result: dict[str, Any] = {"rows": rows, "failures": failures}
    if not arguments.quick:
        result["claims"] = claims(rows)
        say(json.dumps(result["claims"], indent=1))
    if rows:
        finish(__file__, result, columns=COLUMNS, arguments=arguments)
    if failures:
        sys.exit(1)


def _full(chosen: Sequence[str], rounds: int) -> list[Launch]:
    found = []
    if "one host" in chosen:
        found += [
            Launch(num_ranks, [_step("one host", one, backward_ms, rounds)])
            for num_ranks in (2, 4)
            for one in SETS
            for backward_ms in (0.0, one.backward_ms)
        ]
    if "sums, one host" in chosen:
        found += [Launch(n, [_sums("sums, one host", SIZES, rounds)]) for n in (2, 4)]
    if "two hosts" in chosen:
        found += [
            Launch(num_ranks, [_step("two hosts", one, one.backward_ms, rounds)], num_hosts=2)
            for num_ranks in (4, 8)
            for one in SETS_BETWEEN
        ]
    if "sums, two hosts" in chosen:
        between = _sums("sums, two hosts", SIZES_BETWEEN, rounds)
        found += [Launch(num_ranks, [between], num_hosts=2) for num_ranks in (4, 8)]
    if "tuner" in chosen:
        found += [
            Launch(num_ranks, [_tuner(one, one.backward_ms, rounds)], num_hosts=num_hosts)
            for num_ranks, num_hosts, one in (
                (2, 1, SETS[1]),
                (4, 1, SETS[0]),
                (4, 1, SETS[1]),
                (4, 2, SETS_BETWEEN[1]),
            )
        ]
    return found


def _tuner(
    one: GradientSet, backward_ms: float, rounds: int, most_steps: int | None = None
) -> dict[str, Any]:
    given = {"given": asdict(one), "backward_ms": backward_ms, "rounds": rounds}
    return {"kind": "tuner", "name": "tuner", **given, "most_steps": most_steps}


def _quick() -> list[Launch]:
    small = replace(SETS[1], divisor=400)
    jobs = [_step("one host", small, 2.0, 1), _sums("sums, one host", SIZES[:2], 1)]
    jobs.append(_tuner(small, 2.0, 1, most_steps=40))
    return [Launch(2, jobs), Launch(2, [_step("two hosts", small, 2.0, 1)], num_hosts=2)]


def _step(name: str, one: GradientSet, backward_ms: float, rounds: int) -> dict[str, Any]:
    return {
        "kind": "step",
        "name": name,
        "given": asdict(one),
        "backward_ms": backward_ms,
        "caps_mb": CAPS_MB,
        "rounds": rounds,
    }


def _sums(name: str, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    return {"kind": "sums", "name": name, "sizes": sizes, "rounds": rounds}


if __name__ == "__main__":
    main()
