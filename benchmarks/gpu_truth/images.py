"""Largest batches and step times of timm's own benchmark on an RTX 3090.

Batches were tried downwards along a fixed sequence until one fitted. A row is inside its bracket if
our allocator fits its batch into the card and does not fit the next larger one. With
`cudnn.benchmark` a convolution may ask for a large workspace, so the files' authors call a bracket
soft by about 1 GiB; both counts are told, the strict one first.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_truth.devices import device_of
from gpu_truth.image_models import ImageRow, image_rows, spread, timm_fault, timm_names, training
from gpu_truth.loops import Recording, at_batch, peaks
from gpu_truth.rows import Found, Row
from gpu_truth.timing import is_fitted, seconds_of, time_claims

from bayplan.data.device import DeviceKind
from bayplan.data.errors import BayplanError, DoesNotFit

__all__ = ["found"]

_NUM_MODELS = 40
_SOFT_BYTES = 1 << 30
_RESOLUTION_BYTES = 64 << 20


def found(folder: Path, *, is_quick: bool, on_progress: Any = print) -> Found:
    """Predict brackets and step times of a spread of models over all families."""
    paths = sorted(folder.glob("timm/train-*.csv"))
    if is_quick or not paths:
        return Found([], {"skipped": "no files" if not paths else "--quick"})
    if timm_fault():
        return Found([], {"skipped": timm_fault()})
    by_model: dict[str, list[ImageRow]] = {}
    skipped: dict[str, str] = {}
    for path in paths:
        try:
            for row in image_rows(path, kind="train"):
                by_model.setdefault(row.model, []).append(row)
        except BayplanError as fault:
            skipped[path.name] = str(fault)
    known = [rows[0] for name, rows in by_model.items() if name in timm_names()]
    num_unknown = len(by_model) - len(known)
    chosen = spread(known, _NUM_MODELS)
    rows: list[Row] = []
    for number, name in enumerate(chosen):
        on_progress(f"timm {number + 1}/{len(chosen)}: {name}")
        try:
            rows += _rows(by_model[name])
        except KeyboardInterrupt:
            skipped["the rest"] = "interrupted"
            break
        except BayplanError as fault:
            skipped[name] = str(fault)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as fault:
            skipped[name] = f"{type(fault).__name__}: {str(fault)[:150]}"
    brackets = [row for row in rows if row.quantity.startswith("largest batch")]
    times = [row for row in rows if row.quantity.startswith("step seconds")]
    strict = sum(row.reported == row.predicted for row in brackets)
    soft = sum(row.reported == row.predicted or bool(row.explained) for row in brackets)
    families = {row.model.split("_")[0] for row in times}
    return Found(
        rows,
        {
            "num_models": len({row.model for row in rows}),
            "num_name_families": len(families),
            "num_brackets": len(brackets),
            "brackets_inside_pct": 100 * strict / max(len(brackets), 1),
            "brackets_inside_softened_pct": 100 * soft / max(len(brackets), 1),
            "step_times": time_claims(times),
            "models_not_in_todays_timm": num_unknown,
            "not_rebuilt": skipped,
        },
    )


def _rows(files: list[ImageRow]) -> Iterator[Row]:
    """Of one model: one capture for each batch that its files have; layouts share it."""
    device = device_of(files[0].file)
    recordings: dict[int, Recording] = {}
    needs: dict[tuple[int, int], int] = {}
    for row in files:
        if row.batch not in recordings:
            recordings[row.batch] = training(row, row.batch, architecture=device.architecture)
        recording = recordings[row.batch]
        common: dict[str, Any] = {
            "source": f"timm {row.file}",
            "model": row.model,
            "device": device.title,
        }
        yield Row(
            **common,
            quantity=f"step seconds, batch {row.batch}",
            reported=row.seconds,
            predicted=seconds_of(recording, device, is_channels_last=row.is_channels_last),
            fitted=is_fitted(row.model),
        )
        yield _bracket(row, recording, device, needs, common)


def _bracket(
    row: ImageRow,
    recording: Recording,
    device: DeviceKind,
    needs: dict[tuple[int, int], int],
    common: dict[str, Any],
) -> Row:
    offered = device.memory_bytes.value - (
        device.context_bytes.value if device.context_bytes else 0
    )

    def need(batch: int) -> int:
        key = row.batch, batch
        if key not in needs:
            scaled = recording if batch == row.batch else at_batch(recording, row.batch, batch)
            needs[key] = _needed_bytes(scaled, int(offered))
        return needs[key]

    own, larger = need(row.batch), need(row.failed_batch) if row.failed_batch else None
    predicted, explained = row.batch, ""
    if own > offered:
        predicted = row.batch - 1
    elif larger is not None and larger <= offered:
        predicted = row.failed_batch or row.batch
    distance = own - offered if own > offered else offered - (larger or offered)
    if predicted != row.batch and distance <= _SOFT_BYTES:
        explained = f"within {distance / 2**20:.0f} MiB of the card, cuDNN's workspaces not counted"
    return Row(
        **common,
        quantity=f"largest batch (next: {row.failed_batch})",
        reported=row.batch,
        predicted=predicted,
        explained=explained,
        seen="" if predicted == row.batch else f"needs {own}, next {larger}, card {offered:.0f}",
    )


def _needed_bytes(recording: Recording, offered: int) -> int:
    """The least memory that the step runs in, up to a resolution; cached blocks are given back."""
    most = peaks(recording)
    if most.reserved_bytes <= offered:
        return most.reserved_bytes
    low, high = most.allocated_bytes, most.reserved_bytes
    while high - low > _RESOLUTION_BYTES:
        middle = (low + high) // 2
        try:
            peaks(recording, capacity_bytes=middle)
            high = middle
        except DoesNotFit:
            low = middle
    return high
