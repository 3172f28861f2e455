"""Report 003 again: recomputation, swapping, their hybrid, and our plans, by network depth.

First as predicted for the report's batch of 32 on a GPU, with ours held a hundredth below the
smaller peak of checkpointing and hybrid; then measured here at a batch that fits; then the largest
batch of ResNet-50 in the report's 7606 MB. Swaps wait for a disk here, which processor time does
not show: `wall_ratio` does.
"""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import _dynamo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, keep_freed_memory, known_of_others, options, say
from ome.measured import measured_rows
from ome.predicted import largest_batches, predicted_rows
from ome.report import REPORTED
from ome.strategies import OURS, RIVALS

COLUMNS = (
    "model",
    "strategy",
    "kind",
    "peak_bytes",
    "predicted_peak_bytes",
    "report_peak_bytes",
    "seconds",
    "time_ratio",
    "predicted_time_ratio",
    "wall_ratio",
    "report_seconds",
)
# Batch and size of what is measured; the shallow ones need more for activations to count.
IMAGES = {"resnet18": (32, 128), "resnet34": (32, 128), "inception_v4": (4, 139)}
DEFAULT_IMAGES = (16, 96)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--models", nargs="*", choices=list(REPORTED), help="these anew")
    parser.add_argument("--rounds", type=int, default=2, help="turns of all strategies")
    parser.add_argument("--seconds", type=float, default=10.0, help="to plan each step")
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    # Every strategy is another version of one model's code, and all of them are alive.
    _dynamo.config.recompile_limit = 100
    result: dict[str, Any] = {"rows": [], "largest_batches": [], "runs": {}}
    result |= known_of_others(__file__, arguments)
    with tempfile.TemporaryDirectory() as cache, suppress(KeyboardInterrupt):
        if arguments.quick:
            _quick(result, Path(cache))
        else:
            _full(result, Path(cache), arguments.models or list(REPORTED), arguments)
    if result["rows"]:
        result["claims"] = _claims(result)
        say(result["claims"])
        for found in result["largest_batches"]:
            print("{model} {strategy}: batch {largest_batch}".format(**found))
        finish(__file__, result, columns=COLUMNS, arguments=arguments)


def _quick(result: dict[str, Any], cache: Path) -> None:
    _add(result, predicted_rows("resnet18", batch=4, cache=cache, seconds=1.0))
    settings: dict[str, Any] = {"cache": cache, "only": ("ome", OURS)}
    rows = measured_rows("resnet18", batch=8, image_size=96, seconds=1.0, rounds=1, **settings)
    _add(result, rows)
    result["largest_batches"] += largest_batches(
        "resnet18", limit_bytes=500_000_000, batches=(8, 16), seconds=0.3, **settings
    )


def _full(result: dict[str, Any], cache: Path, names: list[str], arguments: Any) -> None:
    for name in names:
        _add(result, predicted_rows(name, batch=32, cache=cache, seconds=arguments.seconds))
        batch, image_size = IMAGES.get(name, DEFAULT_IMAGES)
        rows = measured_rows(
            name,
            batch=batch,
            image_size=image_size,
            cache=cache,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
        )
        _add(result, rows)
        result["runs"][name] = sys.argv[1:]
    if "resnet50" in names:
        for found in largest_batches("resnet50", cache=cache):
            say("resnet50, {strategy}: largest batch {largest_batch}".format(**found))
            result["largest_batches"].append(found)


def _add(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for row in rows:
        peak = f"{row['peak_bytes'] / 2**20:.0f} MiB"
        say("{model}, {strategy}, {kind}:".format(**row), f"{peak} at {row['time_ratio']:.3f}x")
    result["rows"] += rows


def _claims(result: dict[str, Any]) -> dict[str, Any]:
    """Where ours is above a rival's peak or slower than it, and whose batch is largest."""
    by_key = {(row["model"], row["kind"], row["strategy"]): row for row in result["rows"]}
    above, bound, slower = [], [], []
    for (model, kind, strategy), row in by_key.items():
        rivals = [by_key.get((model, kind, rival)) for rival in RIVALS if strategy == OURS]
        for rival in (rival for rival in rivals if rival is not None):
            if row["peak_bytes"] >= rival["peak_bytes"]:
                (bound if _is_least(row) else above).append((model, kind, rival["strategy"]))
            if row["time_ratio"] > rival["time_ratio"]:
                slower.append((model, kind, rival["strategy"]))
    batches = {found["strategy"]: found["largest_batch"] for found in result["largest_batches"]}
    return {
        "peak_not_below": above,
        "peak_not_below_and_least_possible": bound,
        "slower_than": slower,
        "largest_batch_by": max(batches, key=batches.__getitem__, default=None),
    }


def _is_least(row: dict[str, Any]) -> bool:
    """Whether a measured peak is as predicted, and that is what a single operator needs."""
    return row.get("predicted_peak_bytes", -1) == row.get("least_possible_bytes")


if __name__ == "__main__":
    main()
