"""Largest batches and step times of timm's own benchmark on an RTX 3090.

One capture of a model gives all its batches (`batches.py`), both layouts and its memory. What
depends on the device's constants is left open until all models are there: then three constants are
chosen on one half of the models (`fitting.py`), and the rows of all are predicted with them.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gpu_truth import brackets, timing
from gpu_truth.batches import TRACED_BATCH, with_batch
from gpu_truth.brackets import Bracket
from gpu_truth.devices import device_of
from gpu_truth.fitting import best, is_fitted, leave_one_out
from gpu_truth.image_models import ImageRow, image_rows, spread, timm_fault, timm_names, training
from gpu_truth.kept import Kept
from gpu_truth.rows import ROW_FAULTS, Found, Row, told
from gpu_truth.timing import SPEEDS, StepTime, time_claims

from bayplan.data.device import DeviceKind
from bayplan.data.errors import BayplanError

__all__ = ["Step", "found", "predicted"]

_NUM_MODELS = 100
_FEWEST_FITTED = 6  # with fewer models to choose constants on, the device's own stay
_OFF_PCT = 35


@dataclass(frozen=True)
class Step:
    """A row of a file, and what was found of its step before any constant is known."""

    row: ImageRow
    time: StepTime
    bracket: Bracket


def found(folder: Path, *, is_quick: bool, on_progress: Any = print) -> Found:
    """Predict brackets and step times of a spread of models over all families."""
    paths = sorted(folder.glob("timm/train-*.csv"))
    if is_quick or not paths:
        return Found([], {"skipped": "no files" if not paths else "--quick"})
    if timm_fault():
        return Found([], {"skipped": timm_fault()})
    skipped: dict[str, str] = {}
    by_device: dict[str, list[ImageRow]] = {}
    devices: dict[str, DeviceKind] = {}
    for path in paths:
        try:
            device = device_of(path.stem)
            devices[device.name] = device
            by_device.setdefault(device.name, []).extend(image_rows(path, kind="train"))
        except BayplanError as fault:
            skipped[path.name] = str(fault)
    kept = Kept("images")
    rows: list[Row] = []
    claims: dict[str, Any] = {}
    for name, lines in by_device.items():
        known = [row for row in lines if row.model in timm_names()]
        chosen = frozenset(spread(known, _NUM_MODELS))
        steps = _steps(
            [r for r in known if r.model in chosen], devices[name], kept, skipped, on_progress
        )
        made, claims[name] = predicted(steps, devices[name])
        rows += made
        claims[name]["models_not_in_todays_timm"] = len({r.model for r in lines} - timm_names())
        claims[name]["models_not_chosen"] = len({r.model for r in known} - chosen)
    if "the rest" not in skipped:
        kept.drop()
    return Found(rows, {**claims, "not_rebuilt": skipped})


def _steps(
    lines: Iterable[ImageRow],
    device: DeviceKind,
    kept: Kept,
    skipped: dict[str, str],
    on_progress: Callable[[str], None],
) -> list[Step]:
    """The steps of all rows, model by model; stops where it is told to."""
    groups: dict[tuple[str, int], list[ImageRow]] = {}
    for row in lines:
        groups.setdefault((row.model, row.image), []).append(row)
    steps: list[Step] = []
    for number, ((model, image), rows) in enumerate(groups.items()):
        on_progress(f"timm {number + 1}/{len(groups)}: {model} at {image}")
        key = repr((device.name, [asdict(row) for row in rows]))
        try:
            answer = kept.get(key)
            if answer is None:
                answer = [asdict(step) for step in _captured(rows, device)]
                kept.put(key, answer)
        except KeyboardInterrupt:
            skipped["the rest"] = "interrupted; the same command goes on from here"
            break
        except ROW_FAULTS as fault:
            skipped[f"{model} at {image}"] = told(fault)
            continue
        steps += [
            Step(row, StepTime(**part["time"]), Bracket(**part["bracket"]))
            for row, part in zip(rows, answer, strict=True)
        ]
    return steps


def _captured(rows: list[ImageRow], device: DeviceKind) -> list[Step]:
    """Of one model at one size."""
    traced = training(rows[0], TRACED_BATCH, architecture=device.architecture)
    needs: dict[int, int] = {}
    times: dict[tuple[int, bool], StepTime] = {}
    for batch in {batch for row in rows for batch in (row.batch, row.failed_batch) if batch}:
        recording = with_batch(traced, batch)
        needs[batch] = brackets.needed_bytes(recording, device)
        for layout in {row.is_channels_last for row in rows if row.batch == batch}:
            times[batch, layout] = timing.step_time(recording, device, is_channels_last=layout)
    return [
        Step(
            row,
            times[row.batch, row.is_channels_last],
            Bracket(
                row.batch,
                row.failed_batch,
                needs[row.batch],
                needs[row.failed_batch] if row.failed_batch else None,
            ),
        )
        for row in rows
    ]


def predicted(steps: list[Step], device: DeviceKind) -> tuple[list[Row], dict[str, Any]]:
    """All rows with the constants of one half, and what may be claimed of them."""
    by_model: dict[str, list[Step]] = {}
    for step in steps:
        by_model.setdefault(step.row.model, []).append(step)
    fitted = {model: mine for model, mine in by_model.items() if is_fitted(model)}
    speed, offered = SPEEDS[len(SPEEDS) // 2], device.usable_bytes
    claims: dict[str, Any] = {"constants_from_models": 0}
    if len(fitted) >= _FEWEST_FITTED:
        times = {
            model: timing.losses([(step.time, step.row.seconds) for step in mine])
            for model, mine in fitted.items()
        }
        spaces = {
            model: brackets.losses([step.bracket for step in mine], device)
            for model, mine in fitted.items()
        }
        speed, offered = SPEEDS[best(times)], brackets.offers(device)[best(spaces)]
        claims = {
            "constants_from_models": len(fitted),
            "leave_one_out": _left_out(fitted, leave_one_out(times), leave_one_out(spaces), device),
        }
    rows = [row for step in steps for row in _rows(step, steps, speed, offered, device)]
    return rows, {
        "constants": {**timing.shares(device, speed), "offered_bytes": offered},
        **claims,
        **_claims(rows, steps, offered),
    }


def _left_out(
    fitted: dict[str, list[Step]],
    speeds: dict[str, int],
    spaces: dict[str, int],
    device: DeviceKind,
) -> dict[str, Any]:
    """How each model is predicted by constants that all others of its half choose."""
    by_model: dict[str, float] = {}
    errors: list[float] = []
    inside: list[bool] = []
    for model, mine in fitted.items():
        speed, offered = SPEEDS[speeds[model]], brackets.offers(device)[spaces[model]]
        own = [100 * (s.time.at(speed) - s.row.seconds) / s.row.seconds for s in mine]
        by_model[model] = round(median(own), 1)
        errors += map(abs, own)
        inside += [s.bracket.predicted(offered) == s.row.batch for s in mine]
    return {
        "median_pct": median(errors),
        "within_35_pct": 100 * sum(error <= _OFF_PCT for error in errors) / len(errors),
        "brackets_inside_pct": 100 * sum(inside) / len(inside),
        "median_error_pct_of_model": by_model,
    }


def _claims(rows: list[Row], steps: list[Step], offered: float) -> dict[str, Any]:
    times = [row for row in rows if row.quantity.startswith("step seconds")]
    largest = [row for row in rows if row.quantity.startswith("largest batch")]
    parts = {
        "all": largest,
        "fitted": [row for row in largest if row.fitted],
        "predicted": [row for row in largest if not row.fitted],
    }
    soft = [step.bracket.distance_bytes(offered) <= brackets.SOFT_BYTES for step in steps]
    off = [row for row in times if abs(row.error_pct) > _OFF_PCT]
    return {
        "num_models": len({step.row.model for step in steps}),
        "num_families": len({step.row.family for step in steps}),
        "num_rows": len(steps),
        "step_times": time_claims(times),
        "step_times_off": {
            "explained": sum(bool(row.explained) for row in off),
            "unexplained": sum(not row.explained for row in off),
        },
        "brackets_inside_pct": {
            name: 100 * sum(row.reported == row.predicted for row in part) / len(part)
            for name, part in parts.items()
            if part
        },
        "brackets_inside_softened_pct": 100 * sum(soft) / max(len(soft), 1),
    }


def _rows(
    step: Step, steps: list[Step], speed: tuple[int, float], offered: float, device: DeviceKind
) -> Iterable[Row]:
    row, bracket = step.row, step.bracket
    common: dict[str, Any] = {
        "source": f"timm {row.file}",
        "model": row.model,
        "device": device.title,
        "fitted": is_fitted(row.model),
    }
    twins = [
        other.row
        for other in steps
        if (other.row.model, other.row.image, other.row.is_channels_last)
        == (row.model, row.image, row.is_channels_last)
    ]
    seconds = step.time.at(speed)
    error = seconds - row.seconds
    explained = [
        f"{other.file}: {other.seconds:.3f} s"
        for other in twins
        if other.batch == row.batch and (other.seconds - row.seconds) / error >= 1
    ]
    is_off = abs(error) > _OFF_PCT / 100 * row.seconds
    yield Row(
        **common,
        quantity=f"step seconds, {row.image} px, batch {row.batch}",
        reported=row.seconds,
        predicted=seconds,
        explained=explained[0] if is_off and explained else "",
        seen="not explained" if is_off and not explained else "",
    )
    batch = bracket.predicted(offered)
    others = [other.file for other in twins if other.batch == batch]
    larger = "-" if bracket.larger_bytes is None else f"{bracket.larger_bytes / 2**20:.0f}"
    yield Row(
        **common,
        quantity=f"largest batch, {row.image} px (next: {row.failed_batch})",
        reported=row.batch,
        predicted=batch,
        explained=f"{others[0]}: {batch}" if batch != row.batch and others else "",
        seen=""
        if batch == row.batch
        else f"needs {bracket.needed_bytes / 2**20:.0f} MiB, next {larger},"
        f" offered {offered / 2**20:.0f}",
    )
