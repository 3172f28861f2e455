"""Image models by the names that timm gives them, and the training step that its results are of.

timm is no dependency: without it these rows are skipped, and the benchmark says so. It imports
torchvision, whose own kernels do not exist beside a CPU build of torch; none is used, so the two
that are asked for at import are declared by name.
"""

import csv
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from gpu_truth.loops import Loop, Recording, record
from torch import nn

from bayplan.data.errors import FileFault, UsageError

__all__ = [
    *("BATCHES", "ImageRow"),
    *("image_rows", "network", "spread", "timm_fault", "timm_names", "training"),
]

BATCHES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
# What timm built otherwise when its results were written, by the start of names.
_CHANGED = {"tresnet": "used batch norm fused in place with its activation (inplace_abn) then"}
_COUNT_TOLERANCE = 0.011  # the files round to 0.01 million parameters


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """One line of a result file.

    Attributes:
        failed_batch: the next larger one that was tried and failed; None if the largest fitted.
        file: its name tells layout, torch, CUDA and card.
    """

    file: str
    model: str
    family: str
    batch: int
    image: int
    seconds: float
    num_parameters: float
    failed_batch: int | None

    @property
    def is_channels_last(self) -> bool:
        return "nhwc" in self.file


def image_rows(path: Path, *, kind: str) -> Iterator[ImageRow]:
    """The rows of a file; `kind` is train or infer, as in its columns."""
    try:
        with path.open(newline="") as stream:
            for number, line in enumerate(csv.DictReader(stream), start=2):
                try:
                    failed = (line.get("next_larger_batch_that_failed") or "").strip()
                    yield ImageRow(
                        file=path.stem,
                        model=line["model"],
                        family=line.get("family") or line["model"].split("_")[0],
                        batch=_positive(line[f"{kind}_batch_size"]),
                        image=_positive(line[f"{kind}_img_size"]),
                        seconds=_positive(line[f"{kind}_step_time"], float) / 1e3,
                        num_parameters=_positive(line["param_count"], float),
                        failed_batch=_positive(failed) if failed else None,
                    )
                except (KeyError, TypeError, ValueError) as fault:
                    raise FileFault(f"{path.name}, line {number}: {fault!r}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as fault:
        raise FileFault(f"{path.name}: cannot be read: {fault}") from None


def _positive(text: str, kind: Any = int) -> Any:
    number = kind(float(text))
    if not 0 < number < 1e9:
        raise ValueError(f"{text} is out of range")
    return number


@cache
def timm_fault() -> str:
    """Why timm's models cannot be built here; empty where they can."""
    try:
        _timm()
    except (ImportError, RuntimeError, AttributeError) as fault:
        return f"timm cannot be imported: {fault} (pip install --no-deps torchvision timm pillow)"
    return ""


@cache
def _timm() -> Any:
    _declare_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm  # pyrefly: ignore[missing-import]  # by hand, no dependency
        import timm.layers  # pyrefly: ignore[missing-import]

    logging.getLogger("timm").setLevel(logging.ERROR)
    timm.layers.set_fused_attn(False)  # the results are older than fused attention
    return timm


@cache
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    return library


@cache
def timm_names() -> frozenset[str]:
    return frozenset(_timm().list_models())


def network(name: str) -> nn.Module:
    """A network of timm's as it stands there."""
    if timm_fault():
        raise UsageError(timm_fault())
    return _timm().create_model(name, num_classes=1000)


def build_model(row: ImageRow) -> nn.Module:
    """The model of a row; refused where timm has none of that name and size today."""
    timm = _timm()
    if row.model not in timm_names():
        raise UsageError(f"today's timm has no model {row.model!r}")
    for start, change in _CHANGED.items():
        if row.model.startswith(start):
            raise UsageError(f"{row.model} {change}")
    options: list[dict[str, Any]] = [{"img_size": row.image}, {}]
    size = timm.get_pretrained_cfg(row.model)
    if size is not None and size.input_size[-1] == row.image:
        options.reverse()
    faults = []
    for option in options:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = timm.create_model(row.model, num_classes=1000, **option)
            break
        except (TypeError, RuntimeError, AssertionError, ValueError) as fault:
            faults.append(fault)
    else:
        raise UsageError(f"timm cannot build {row.model}: {str(faults[0])[:120]}")
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    if abs(round(count, 2) - row.num_parameters) > _COUNT_TOLERANCE:
        raise UsageError(
            f"{row.model} has {count:.2f} million parameters today, {row.num_parameters} then"
        )
    return model


def training(row: ImageRow, batch: int, *, architecture: str) -> Recording:
    """The step of timm's benchmark: all of it but the update under autocast, gradients kept."""
    loop = Loop(
        loss="mean cross_entropy",
        has_backward=True,
        to_none=False,
        autocast=torch.float16,
        backward_in_autocast=True,
        optimizer=partial(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True, foreach=False),
        num_warmups=0,
        starts_warm=True,
    )
    return _recorded(row, batch, loop, architecture)


def _recorded(row: ImageRow, batch: int, loop: Loop, architecture: str) -> Recording:
    def build() -> tuple[nn.Module, Any, torch.Tensor]:
        model = build_model(row).train()
        images = torch.empty(batch, 3, row.image, row.image)
        return model, images, torch.empty(batch, dtype=torch.int64)

    return record(build, loop, architecture=architecture)


def spread(rows: Iterable[ImageRow], num_models: int) -> list[str]:
    """Names of models of as many families as possible, small and large ones of each."""
    families: dict[str, dict[str, float]] = {}
    for row in rows:
        families.setdefault(row.family, {})[row.model] = row.num_parameters
    orders = []
    for models in families.values():
        names = sorted(models, key=lambda name: (models[name], name))
        middle = len(names) // 2  # the middle one first, then the ends
        orders.append([names[middle], *names[:middle][::-1], *names[middle + 1 :]])
    chosen: list[str] = []
    for turn in range(max(map(len, orders), default=0)):
        for order in sorted(orders, key=len, reverse=True):
            if turn < len(order) and len(chosen) < num_models:
                chosen.append(order[turn])
    return chosen
