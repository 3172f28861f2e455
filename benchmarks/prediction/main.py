"""Does the prediction hold? Predicted against measured peak and step time, model by model.

Each model is profiled at half the batch size. Peak and time of the full batch are predicted from
that profile alone, and measured: live malloc bytes and processor time, one thread. Steps at both
batch sizes take turns, and medians over all turns are compared: this is a machine for many, whose
speed changes within minutes. Beside it, what a prediction itself costs.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import bayplan
from bayplan.models.targets import resolve_target
from bayplan.planning.verdict import check
from bayplan.preparing.step import PreparedStep
from bayplan.step import TrainingStep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import finish, keep_freed_memory, options, say
from prediction.models import MODELS, Case

QUICK = {"alexnet": 4, "transformers-bert": 4, "transformers-albert": 4}
COLUMNS = (
    "model",
    "batch",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "peak_error",
    "predicted_seconds",
    "measured_seconds",
    "time_error",
)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), help="only these")
    parser.add_argument("--rounds", type=int, default=5, help="turns of profile and measurement")
    parser.add_argument("--cost-of", choices=("resnet200", "llama-7b"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    if arguments.cost_of:
        print(json.dumps(_cost_of(arguments.cost_of)))
        return
    batches = QUICK if arguments.quick else {name: case.batch for name, case in MODELS.items()}
    rounds = 1 if arguments.quick else arguments.rounds
    rows = []
    for name in arguments.models or batches:
        batch = batches.get(name, MODELS[name].batch)
        rows.append(_measure(name, MODELS[name], batch, rounds))
        say("{model}: peak {peak_error:+.4%}, time {time_error:+.1%}".format(**rows[-1]))
    costs = [] if arguments.quick else [_in_a_process(name) for name in ("resnet200", "llama-7b")]
    for cost in costs:
        say(cost)
    peak_errors = [abs(row["peak_error"]) for row in rows]
    result = {
        "rows": rows,
        "costs": costs,
        "worst_peak_error": max(peak_errors),
        "median_peak_error": statistics.median(peak_errors),
        "worst_time_error": max(abs(row["time_error"]) for row in rows),
    }
    finish(__file__, result, columns=COLUMNS, arguments=arguments)


def _measure(name: str, case: Case, batch: int, rounds: int) -> dict[str, Any]:
    """One row; `rounds` turns of profiling half the batch and measuring the whole."""
    model, inputs, loss_fn = case.build(batch)
    optimizer = case.optimizer(model.parameters())
    whole = TrainingStep(model=model, batch=inputs, loss_fn=loss_fn, optimizer=optimizer)
    graph = bayplan.capture(model, inputs, loss_fn, optimizer=optimizer, name=name)
    for _ in range(2):  # what kernels make once and keep is no part of a step
        whole()
    peaks, seconds, predictions = [], [], []
    for _ in range(rounds):
        # The smaller batch is built for its turn only: what is alive counts in the measured peak.
        half_inputs = case.build(batch // 2)[1]
        half = bayplan.capture(model, half_inputs, loss_fn, optimizer=optimizer, name=name)
        profile = bayplan.profile(
            model,
            half_inputs,
            loss_fn,
            optimizer=optimizer,
            name=name,
            repeats=1,
            clock="cpu",
            again=True,
        )
        predictions.append(bayplan.simulate(graph, bayplan.scale(profile, half, graph, step=whole)))
        del half_inputs
        gc.collect()
        with bayplan.record(clock="cpu") as recording:
            for _ in range(3):
                whole()
        measured = recording.result
        peaks.append(measured.steady_peak_bytes)
        seconds += measured.step_seconds[1:]
    predicted_peak = predictions[-1].peak_bytes
    predicted_seconds = [record.typical_step_seconds for record in predictions]
    time_error = statistics.median(predicted_seconds) / statistics.median(seconds) - 1
    return {
        "model": name,
        "batch": batch,
        "profiled_batch": batch // 2,
        "predicted_peak_bytes": predicted_peak,
        "measured_peak_bytes": max(peaks),
        "peak_error": predicted_peak / max(peaks) - 1,
        "predicted_seconds": statistics.median(predicted_seconds),
        "predicted_seconds_range": [min(predicted_seconds), max(predicted_seconds)],
        "measured_seconds": statistics.median(seconds),
        "measured_seconds_range": [min(seconds), max(seconds)],
        "time_error": time_error,
        "nodes": len(graph.nodes),
    }


def _in_a_process(name: str) -> dict[str, Any]:
    """The cost of a question, in a process of its own so that its memory is its own."""
    command = [sys.executable, __file__, "--cost-of", name]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def _cost_of(name: str) -> dict[str, Any]:
    if name == "resnet200":
        question = PreparedStep(target=resolve_target(name), batch=32, optimizer="sgd")
        started = time.process_time()
        graph = question.graph
        peak_bytes = bayplan.simulate(graph, device="titan-v").peak_bytes
        what = "resnet200, batch 32: capture and memory simulation"
    else:
        from bayplan.costing.catalogue import load_device

        question = PreparedStep(target=resolve_target(name), device=load_device("h100"))
        started = time.process_time()
        peak_bytes = check(question).plain_peak_bytes
        what = "llama-7b, sequence 4096, batch 1: fit on an H100"
    return {
        "what": what,
        "cpu_seconds": time.process_time() - started,
        "resident_bytes": _peak_resident_bytes(),
        "predicted_peak_bytes": peak_bytes,
    }


def _peak_resident_bytes() -> int:
    """Of this process alone; `ru_maxrss` starts at what the parent had when it forked."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
