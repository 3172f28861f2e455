"""What does `bayplan.record` cost? Processor time of steps with and without it, taking turns."""

import statistics
import sys
import time
from pathlib import Path

import torch

import bayplan
from bayplan.models import load
from bayplan.step import TrainingStep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, options, say

CASES = {"resnet18": (4, {"image_size": 128}), "gpt": (1, {"sequence": 64})}
COLUMNS = ("model", "mode", "turns", "plain_seconds", "recorded_seconds", "ratio")


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--turns", type=int, default=12, help="how often the two take turns")
    arguments = parser.parse_args()
    turns = 2 if arguments.quick else arguments.turns
    torch.set_num_threads(1)
    rows = []
    for name, (batch_size, settings) in CASES.items():
        model, batch, loss_fn = load(name)(batch_size, **settings)
        optimizer = torch.optim.AdamW(model.parameters())
        step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer)
        step()
        for mode in ("peak only", "with curve"):
            rows.append({"model": name, "mode": mode, **_compare(step, mode, turns)})
            say("{model}, {mode}: {ratio:.4f}".format(**rows[-1]))
    finish(__file__, {"rows": rows}, columns=COLUMNS, arguments=arguments)


def _compare(step: TrainingStep, mode: str, turns: int) -> dict[str, float | int]:
    """Median ratio of neighbours: each recorded step against the plain ones beside it."""
    plain, recorded = [], []
    for _ in range(turns):
        plain.append(_seconds(step))
        with bayplan.record(curve=mode == "with curve"):
            recorded.append(_seconds(step))
    return {
        "turns": turns,
        "plain_seconds": min(plain),
        "recorded_seconds": min(recorded),
        "ratio": min(recorded) / min(plain),
        "median_ratio": statistics.median(r / p for p, r in zip(plain, recorded, strict=True)),
    }


def _seconds(step: TrainingStep) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


if __name__ == "__main__":
    main()
