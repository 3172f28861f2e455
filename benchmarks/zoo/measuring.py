"""One model, in a process of its own: plain training against plans at 70 %, 50 % and the floor.

Every training starts from the same seeds. After each step losses, gradients, parameters, buffers
and the random state are compared bit by bit. Peaks are those of a recording, of this model's
tensors and all that its steps allocate: the highest of several steps, so that of one that keeps all
its layers where they are dropped at random, which is the one that is predicted. Then steps take
turns, one thread, by processor time.
"""

import argparse
import gc
import hashlib
import importlib.util
import inspect
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import bayplan
from bayplan.data.errors import BayplanError, DoesNotFit
from bayplan.devices.meters import resident_tensor_bytes
from bayplan.preparing.sources import prepare
from bayplan.preparing.step import PreparedStep
from bayplan.running.fitted import fitting_of
from bayplan.step import AUTOCASTS, TrainingStep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zoo.architectures import TRANSFORMERS
from zoo.written import WRITTEN

__all__ = ["OWN", "builders_of", "measured_row"]

Built = tuple[nn.Module, Any, Any]
Builder = Callable[..., Built]
OWN: dict[str, tuple[str, Builder]] = {
    name: (family, builder)
    for family, models in {**TRANSFORMERS, **WRITTEN}.items()
    for name, builder in models.items()
}
_CPU = torch.device("cpu")
_STEPS = 3
_RECORDED = 8  # steps, so that one that drops layers at random keeps all of them in one of these
_LEAST_BYTES = 1  # a limit that no step keeps, to hear of the smallest that one does
_MOST_LIMITS = 5  # steps that drop layers at random may each need another one


def builders_of(path: Path) -> dict[str, tuple[str, Builder]]:
    """The public functions of a file that return model, batch and loss, by name with a family."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    named = getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if inspect.isfunction(thing)
        and thing.__module__ == path.stem
        and not name.startswith("_")
        and all(
            parameter.default is not parameter.empty
            for parameter in inspect.signature(thing).parameters.values()
        )
    ]
    return {name: (path.stem, getattr(module, name)) for name in named}


@dataclass
class Trained:
    """A step after its training, with what came of it."""

    step: TrainingStep
    digests: list[str]
    peak_bytes: int
    predicted_bytes: int = 0
    limit_bytes: int = 0
    predicted_seconds: tuple[float, float] = (1.0, 1.0)  # of the graph, planned and plain


class WrongNumbers(Exception):
    """Planned training gave other numbers than plain training."""


class NotRepeatable(Exception):
    """Plain training from the same seeds gave other numbers: there is nothing to compare with."""


def measured_row(
    build: Callable[[], Built], precision: str, *, rounds: int, seconds: float
) -> dict[str, Any]:
    """What became of a model: its status, and its figures if planned training is the same.

    Args:
        precision: `float32`, or a word for autocast.
        rounds: of timed steps.
        seconds: for each search.
    """
    row: dict[str, Any] = {}
    try:
        _compare(row, build, precision, rounds=rounds, seconds=seconds)
        row["status"] = "same"
    except NotRepeatable as fault:
        row |= {"status": "refused", "reason": str(fault)}
    except WrongNumbers as fault:
        row |= {"status": "wrong", "reason": str(fault)}
    except BayplanError as fault:
        row |= {"status": "refused", "reason": str(fault)}
    return row


def _compare(
    row: dict[str, Any],
    build: Callable[[], Built],
    precision: str,
    *,
    rounds: int,
    seconds: float,
) -> None:
    dtype = AUTOCASTS["none" if precision == "float32" else precision]
    make = partial(_step_of, build, dtype)
    plain = _trained(make())
    prepared = _prepared(make())
    planned: dict[str, Trained] = {}
    for share in ("70%", "50%"):
        started, processor = time.perf_counter(), time.process_time()
        try:
            planned[share] = _planned(make, share, seconds)
        except DoesNotFit as fault:
            row[f"no_{share[:2]}"] = str(fault)
        row.setdefault("plan_seconds", time.perf_counter() - started)
        row.setdefault("plan_processor_seconds", time.process_time() - processor)
        _check_same(plain, planned.get(share), share, make)
    floor = _floor(make, seconds)
    _check_same(plain, floor, "floor", make)
    every = [*planned.values(), floor]
    pairs = [(prepared.plain_peak_bytes, plain.peak_bytes)]
    pairs += [(each.predicted_bytes, each.peak_bytes) for each in every]
    errors = [100 * (predicted / measured - 1) for predicted, measured in pairs]
    row |= {
        "plain_peak_bytes": plain.peak_bytes,
        "peak_errors_pct": errors,
        "peak_error_pct": max(errors, key=lambda error: abs(error)),
        "peak_over_limit": max(each.peak_bytes / each.limit_bytes for each in every),
        "floor_peak_over_limit": floor.peak_bytes / floor.limit_bytes,
        "floor_share": floor.limit_bytes / prepared.plain_peak_bytes,
    }
    _time(row, plain, planned, prepared, rounds)


def _check_same(
    plain: Trained, planned: Trained | None, limit: str, make: Callable[[], TrainingStep]
) -> None:
    if planned is None or planned.digests == plain.digests:
        return
    first = _first_difference(plain, planned)
    again = _trained(make())
    if again.digests != plain.digests:
        other = _first_difference(plain, again)
        raise NotRepeatable(
            f"plain training does not repeat itself: trained again from the same seeds, {other} is"
            " another one (a forward may draw its own seeds)"
        )
    raise WrongNumbers(f"other numbers within {limit}, first in {first}")


def _first_difference(one: Trained, other: Trained) -> str:
    pairs = zip(one.digests, other.digests, strict=False)
    return next((a for a, b in pairs if a != b), "a number more or less").split()[0]


def _time(
    row: dict[str, Any],
    plain: Trained,
    planned: dict[str, Trained],
    prepared: PreparedStep,
    rounds: int,
) -> None:
    steps = {"plain": plain, **planned}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, trained in steps.items():
            started = time.process_time()
            trained.step()
            times[name].append(time.process_time() - started)
    row["plain_seconds"] = statistics.median(times["plain"])
    outside = prepared.outside_seconds
    for share, each in planned.items():
        ratios = [a / b for a, b in zip(times[share], times["plain"], strict=True)]
        seconds, plain_seconds = each.predicted_seconds
        row[f"time_ratio_{share[:2]}"] = statistics.median(ratios)
        row[f"time_ratio_{share[:2]}_range"] = [min(ratios), max(ratios)]
        row[f"predicted_time_ratio_{share[:2]}"] = (seconds + outside) / (plain_seconds + outside)


def _step_of(build: Callable[[], Built], dtype: torch.dtype | None) -> TrainingStep:
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return TrainingStep(
        model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer, autocast=dtype
    )


def _prepared(step: TrainingStep) -> PreparedStep:
    return prepare(
        step.model, step.batch, step.loss_fn, optimizer=step.optimizer, autocast=step.autocast
    )


def _floor(make: Callable[[], TrainingStep], seconds: float) -> Trained:
    """Training within the smallest limit that the planner names, for whatever way steps go."""
    limit_bytes = _LEAST_BYTES
    for _ in range(_MOST_LIMITS):
        try:
            return _planned(make, limit_bytes, seconds)
        except DoesNotFit as fault:
            limit_bytes = fault.smallest_bytes or limit_bytes
    raise DoesNotFit(f"no limit that was named worked, up to {limit_bytes} bytes")


def _planned(make: Callable[[], TrainingStep], memory: str | int, seconds: float) -> Trained:
    others_bytes = resident_tensor_bytes(_CPU)
    step = make()
    bayplan.fit(
        step.model,
        step.batch,
        step.loss_fn,
        memory=memory,
        optimizer=step.optimizer,
        autocast=step.autocast,
        time_limit_seconds=seconds,
        progress=False,
    )
    trained, fitting = _trained(step, others_bytes), fitting_of(step.model)
    # In pieces, the latest plan is the one that ran.
    plan = fitting.pieces.plans[0] if fitting.pieces else next(iter(fitting.plans.values())).order
    trained.predicted_bytes, trained.limit_bytes = plan.peak_bytes, fitting.known["limit_bytes"]
    trained.predicted_seconds = plan.seconds, plan.plain_seconds
    return trained


def _trained(step: TrainingStep, others_bytes: int = 0) -> Trained:
    """Train from one seed, then record steps, less what other models of the process take."""
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(1)
    digests = []
    for number in range(_STEPS):
        loss = step()
        digests += [f"loss {number} {_digest(loss)}", f"random {_digest(torch.get_rng_state())}"]
        for name, tensor in (*step.model.named_parameters(), *step.model.named_buffers()):
            gradient = "" if tensor.grad is None else _digest(tensor.grad)
            digests.append(f"{name} {_digest(tensor)} {gradient}")
        del loss
    gc.collect()
    with bayplan.record() as recording:
        for _ in range(_RECORDED):
            step()
    return Trained(step, digests, recording.result.steady_peak_bytes - others_bytes)


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    family, builder = (builders_of(given.file) if given.file else OWN)[given.name]
    size = inspect.signature(builder).parameters.get("batch_size")
    settings = {} if size is None else {"batch_size": max(1, round(size.default * given.scale))}
    build = partial(builder, **settings)
    row = measured_row(build, given.precision, rounds=given.rounds, seconds=given.seconds)
    print(json.dumps({"model": given.name, "family": family, "precision": given.precision, **row}))


if __name__ == "__main__":
    main()
