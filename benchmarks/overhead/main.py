"""What does a plan that keeps everything cost a small step? Planned over plain time, interleaved.

Forward, loss and backward, one thread, processor time: the kernels are the same, so what differs is
the way to them. Steps take from one to fifty milliseconds.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import bayplan
from bayplan.step import TrainingStep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, keep_freed_memory, known_of_others, options, say
from zoo.measuring import OWN

# Models of the zoo, with batch sizes.
CASES = {
    "bert": (1, 2, 8),
    "llama": (1, 4, 16),
    "vit": (1, 4, 16),
    "resnet": (1, 4, 32),
    "mixer": (4, 32),
    "unet": (1, 4),
    "lstm-cell": (8, 64),
}
QUICK = {"mixer": (4,)}
COLUMNS = ("model", "batch", "plain_ms", "ratio", "ratio_low", "ratio_high")
_WARM = 5


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=41, help="of a plain and a planned step")
    parser.add_argument("--models", nargs="*", help="only these; rows of others stay")
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    cases, rounds = (QUICK, 3) if given.quick else (CASES, given.rounds)
    chosen = {name: cases[name] for name in given.models or cases}
    rows = known_of_others(__file__, given).get("rows", [])
    rows += [_row(name, batch, rounds) for name, sizes in chosen.items() for batch in sizes]
    finish(__file__, {"rows": rows}, columns=COLUMNS, arguments=given)


def _row(name: str, batch: int, rounds: int) -> dict[str, Any]:
    plain, planned = _step(name, batch), _step(name, batch)
    bayplan.fit(planned.model, planned.batch, planned.loss_fn, memory="100%", progress=False)
    for _ in range(_WARM):
        plain(), planned()
    pairs = [(_seconds(plain), _seconds(planned)) for _ in range(rounds)]
    ratios = sorted(after / before for before, after in pairs)
    row = {
        "model": name,
        "batch": batch,
        "plain_ms": 1e3 * statistics.median(before for before, _ in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
    }
    say(row)
    return row


def _step(name: str, batch: int) -> TrainingStep:
    torch.manual_seed(0)
    model, inputs, loss_fn = OWN[name][1](batch)
    return TrainingStep(model=model, batch=inputs, loss_fn=loss_fn)


def _seconds(step: TrainingStep) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


if __name__ == "__main__":
    main()
