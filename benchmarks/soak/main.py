"""Does a long run leak? A pipeline that recomputes and swaps beside plain training, for hours.

Thousands of steps of a small model stand for them.

Every rank tells what it holds after each part of the run: memory, file descriptors, mappings,
threads, and files in shared memory. The losses are those of plain training in one process.
"""

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
from harness import finish, options
from soak.rank import NUM_SAMPLES, build, plain_losses

from bayplan.costing.pricing import free_prices
from bayplan.data import files
from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan, StageOrder
from bayplan.data.program import Program
from bayplan.devices.device import HOST
from bayplan.planning.memory.orders import order_of
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.running.ranks.launching import launch
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Swap
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole_trace import trace_whole
from bayplan.tracing.traced_step import MemoryContext

MICRO_BATCHES = 2
HELD = ("live_mib", "resident_mib", "descriptors", "mappings", "threads", "shared_files")
COLUMNS = ("rank", "step", *HELD)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    steps = 60 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # where /tmp may lie in memory
        files.write(Path(folder) / "plan.json", _plan())
        script = str(Path(__file__).with_name("rank.py"))
        code = launch([script, folder, str(steps)], num_ranks=2, log_folder=None)
        if code:
            sys.exit(code)
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
        left = sorted(path.name for path in (Path(folder) / "swap").iterdir())
    rows = [{"rank": rank, **row} for rank, own in enumerate(told) for row in own["rows"]]
    plain = plain_losses(steps)
    worst = max(
        abs(own - wanted) / abs(wanted)
        for own, wanted in zip(told[0]["losses"], plain, strict=True)
    )
    result: dict[str, Any] = {
        "rows": rows,
        "steps": steps,
        "growth": [_growth(own["rows"]) for own in told],
        "worst_loss_difference": worst,
        "left_in_swap_folder": left,
    }
    finish(__file__, result, columns=COLUMNS, arguments=arguments)
    print("growth", *result["growth"], "worst loss difference", worst, "left", left)


def _growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """From the second fifth of a run to the last: a ratio for memory, a difference for counts."""
    fifth = max(1, len(rows) // 5)
    growth = {}
    for name in HELD:
        early, late = (
            statistics.median(row[name] for row in part)
            for part in (rows[fifth : 2 * fifth], rows[-fifth:])
        )
        growth[name] = late / early - 1 if name.endswith("mib") else late - early
    return growth


def _plan() -> RankPlan:
    """The first stage swaps all that it may, the second makes again what it can."""
    wishes = RankPlanOptions(
        placement=Placement.parse("0:0.0:1"),
        shares_by=SharesBy.OPS,
        num_micro_batches=MICRO_BATCHES,
        schedule="gpipe",
    )
    step, _ = build()
    kept = place(PreparedStages(step=step), wishes)
    limit = int(0.7 * max(kept.predicted_peak_bytes))
    less = place(PreparedStages(step=step), replace(wishes, limit_bytes=limit, may_pack=False))
    piece = NUM_SAMPLES // MICRO_BATCHES
    whole = trace_whole(step, num_samples=piece)
    staged = StagedStep(whole, tuple(stage.first for stage in less.stages))
    context = MemoryContext(prices=free_prices, granularity_bytes=HOST.granularity_bytes)
    program = staged.traced(staged.graph(0), context).with_packs(()).program
    swapped = order_of(
        program,
        _swap_all(program),
        strategy="swap",
        packs=(),
        plain_peak_bytes=replay_schedule(program, plain_schedule(program)).peak_bytes,
        plain_seconds=0.0,
    )
    others = [own for own in less.stage_orders if own.stage != 0]
    assert any(len(own.order.schedule) > len({*own.order.schedule}) for own in others), (
        "the second stage was to recompute"
    )
    first = StageOrder(stage=0, num_samples=piece, order=swapped)
    return msgspec.structs.replace(less, stage_orders=(first, *others))


def _swap_all(program: Program) -> Arrangement:
    """Everything that backward reads leaves at once and comes back for each of its readers."""
    first = program.first_backward
    swaps = []
    for buffer in program.movable:
        readers = tuple(reader for reader in program.readers[buffer] if reader >= first)
        if readers and program.buffers[buffer]:
            swaps.append(Swap(buffer, first, readers))
    return Arrangement(plain_schedule(program), tuple(swaps))


if __name__ == "__main__":
    main()
