"""How fast are pipelines on many ranks? Our plans against torch's pipelining and data parallel.

All contestants of a row take turns on the same ranks, which are processes of this machine with one
thread each and talk through gloo. Ratios are medians over the rounds of ratios within a round.
"""

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, keep_freed_memory, known_of_others, options, say
from pipeline.claims import claims
from pipeline.models import CASES, MEMORY_CASE, Replicas, shrunk, with_boundary
from ranks.launching import Launch, run_all

RANKS = (2, 4)
FEW, MANY = 8, 32  # micro-batches
REPLICAS = (
    Replicas("3:1, one host", 4, num_samples=96, least_over_even=1.5),
    Replicas("7:1, one host", 8, least_over_even=1.5),
    Replicas("3:1, two hosts", 4, 2, 96, least_over_ddp=3.0, least_over_even=1.25),
    Replicas("7:1, two hosts", 8, 2, least_over_ddp=3.0, least_over_even=1.25),
)
COLUMNS = (
    "case",
    "ranks",
    "ours_over_torch",
    "ours_over_torch_low",
    "ours_over_torch_high",
    "ours_over_ideal",
    "torch_over_ideal",
    "overhead",
    "ours_growth",
    "torch_growth",
    "ours_over_ddp",
    "ours_over_even",
)


def main() -> None:
    parser = options(__doc__ or "")
    names = [*(case.name for case in CASES), MEMORY_CASE.name, *(one.name for one in REPLICAS)]
    parser.add_argument("--cases", nargs="*", choices=names, help="these anew")
    parser.add_argument("--rounds", type=int, default=10, help="turns of all contestants")
    parser.add_argument(
        "--depth",
        type=int,
        help="of our schedules; default: 1, as torch has in flight, against its pipelines, else 2",
    )
    parser.add_argument(
        "--forward-ms", type=float, help="of the convolutions of uneven replicas; default: 40"
    )
    arguments = parser.parse_args()
    if not arguments.quick:  # which starts this process once more
        keep_freed_memory()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are removed
    chosen = arguments.cases or names
    launches = _quick(chosen) if arguments.quick else _full(chosen, arguments)
    rows, failures = run_all(Path(__file__).with_name("rank.py"), launches)
    rows = [*known_of_others(__file__, arguments, key="case").get("rows", []), *rows]
    result = {"rows": rows, "failures": failures, "rounds": arguments.rounds}
    if not arguments.quick:
        result["claims"] = claims(rows)
        say(json.dumps(result["claims"], indent=1))
    if rows:
        finish(__file__, result, columns=COLUMNS, arguments=arguments)
    if failures:
        sys.exit(1)


def _full(chosen: Sequence[str], arguments: Namespace) -> list[Launch]:
    """Each row on ranks of its own."""
    rounds = arguments.rounds
    chosen_depth = {} if arguments.depth is None else {"depth": arguments.depth}
    chosen_time = (
        {} if arguments.forward_ms is None else {"forward_seconds": arguments.forward_ms / 1e3}
    )
    found = [
        Launch(num_ranks, [_job("versus torch", case.name, case=asdict(case), rounds=rounds)])
        for case in (replace(one, **chosen_depth) for one in CASES)
        for num_ranks in RANKS
        if case.name in chosen
    ]
    if MEMORY_CASE.name in chosen:
        few, many = (asdict(with_boundary(MEMORY_CASE, number)) for number in (FEW, MANY))
        found.append(Launch(2, [_job("memory", MEMORY_CASE.name, few=few, many=many)]))
    found += [
        Launch(
            one.num_ranks,
            [_job("replicas", one.name, case=asdict(one), rounds=rounds)],
            one.num_hosts,
        )
        for one in (replace(one, **chosen_depth, **chosen_time) for one in REPLICAS)
        if one.name in chosen
    ]
    return found


def _quick(chosen: Sequence[str]) -> list[Launch]:
    """One of each kind in a tiny setting, on few ranks that stay: most time is their start."""
    kinds = {case.kind: case for case in reversed(CASES) if case.name in chosen}
    jobs = [
        _job("versus torch", case.name, case=asdict(shrunk(case)), rounds=1)
        for case in kinds.values()
    ]
    if MEMORY_CASE.name in chosen:
        small = shrunk(MEMORY_CASE)
        few, many = (asdict(with_boundary(small, number)) for number in (2, 4))
        jobs.append(_job("memory", MEMORY_CASE.name, few=few, many=many))
    launches = []
    for num_hosts in (1, 2):
        found = [one for one in REPLICAS if one.num_hosts == num_hosts and one.name in chosen]
        own = jobs if num_hosts == 1 else []
        own += [
            _job("replicas", one.name, case=asdict(_shrunk_replicas(one)), rounds=1)
            for one in found[:1]
        ]
        launches.append(Launch(2, own, num_hosts))
    return [one for one in launches if one.jobs]


def _shrunk_replicas(case: Replicas) -> Replicas:
    return replace(
        case,
        num_ranks=2,
        num_samples=8,
        num_micro_batches=2,
        conv_bytes=1 << 16,
        fc_bytes=1 << 18,
        activation_floats=64,
    )


def _job(kind: str, name: str, **told: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, **told}


if __name__ == "__main__":
    main()
