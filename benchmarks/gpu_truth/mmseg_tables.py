"""Peak memory of mmsegmentation's model zoo, by the words of a config's name.

The crop is fixed and cuDNN's benchmark is off, so the peak is a property of the model, except for
what cuDNN takes as workspace and for the unit: the logs have MiB, divided by 1000 or by 1024. Three
things were settled on nine rows of ResNet-50 at stride 8 or of UPerNet, which are marked: the unit,
the workspace of `winograd_bytes`, and that torch was older than 1.11.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpu_truth.devices import architecture_of
from gpu_truth.loops import Loop, peaks, record
from gpu_truth.rows import Row
from gpu_truth.segmentation import Segmenter, SegmenterKind
from torch import nn

from bayplan.data.errors import UsageError
from bayplan.data.graph import Node, StepGraph

__all__ = ["kind_of", "rows_of"]

_NAME = re.compile(
    r"d?(?P<head>deeplabv3plus|deeplabv3|fcn|pspnet|upernet)(?P<six>-d6)?"
    r"_r(?P<depth>18|50|101)(?P<plain>b?)(?:-d(?P<stride>8|16|32))?(?P<grid>-mg124)?"
    r"_\d+xb\d+-(?:\d+k|\d+e)_(?P<data>.+?)-?\d+x\d+"
)
_CLASSES = {
    "cityscapes": 19,
    "ade20k": 150,
    "voc12aug": 21,
    "pascal-context": 60,
    "pascal-context-59": 59,
    "coco-stuff10k": 171,
    "coco-stuff164k": 171,
    "loveda": 7,
    "potsdam": 6,
    "vaihingen": 6,
    "isaid": 16,
    "mapillay_v1_65": 65,
    "mapillary_v1_65": 65,
}
_UNIT = 1 << 30  # MiB by 1024: the other reading is 2.4 % less
_FEW_CHANNELS = 64
_FAR = 0.10
_LOOP = Loop(
    loss="own",
    has_backward=True,
    optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=False),
    to_none=False,
    num_warmups=0,
    starts_warm=True,
)


def rows_of(
    row: dict[str, Any], table: list[dict[str, Any]], captures: dict[str, Any], on_progress: Any
) -> Iterator[Row]:
    """Our peak beside one row's."""
    if not str(row["quantity"]).startswith("peak memory_allocated"):
        raise UsageError(f"no rules for the quantity {row['quantity']!r}")
    if row.get("dtype") != "float32":
        raise UsageError("mixed precision of mmcv's own, older than autocast")
    kind = kind_of(row)
    batch, (height, width) = int(row["batch_per_gpu"]), map(int, row["image"])

    def build() -> tuple[nn.Module, Any, Any]:
        images = torch.empty(batch, 3, height, width)
        labels = torch.empty(batch, height, width, dtype=torch.int64)
        return Segmenter(kind), (images, labels), labels

    key = repr((kind, batch, height, width))
    if key not in captures:
        on_progress(f"{row['model']}, {batch} x {height} x {width}")
        architecture = architecture_of(str(row.get("device")))
        recording = record(build, _LOOP, architecture=architecture)
        captures[key] = peaks(recording, workspace_bytes=winograd_bytes).allocated_bytes
    reported = float(row["value"]) * _UNIT
    yield Row(
        source=row["source"],
        model=row["model"],
        device=row["device"],
        quantity=f"peak memory_allocated, {batch} x {height} x {width}: bytes",
        reported=reported,
        predicted=captures[key],
        explained=_contradicted(row, kind, table)
        if abs(captures[key] - reported) > _FAR * reported
        else "",
        fitted=kind.depth == 50 and kind.has_deep_stem,
    )


def _contradicted(row: dict[str, Any], kind: SegmenterKind, table: list[dict[str, Any]]) -> str:
    """How much the same network took by another row of the table, where that is far from it."""
    near = _FAR * float(row["value"])
    for other in table:
        if any(other.get(key) != row[key] for key in ("batch_per_gpu", "image", "dtype")):
            continue
        try:
            is_same, value = kind_of(other) == kind, float(other["value"])
        except (UsageError, KeyError, TypeError, ValueError):  # listed where its own turn comes
            continue
        if is_same and abs(value - float(row["value"])) > near:
            return f"by {other['model']} of the same table, the same network took {value} GB"
    return ""


def winograd_bytes(graph: StepGraph, node: Node) -> int:
    """What cuDNN takes to transform a 3x3 convolution of stride 1 in float32, four rows at a time.

    Images, results and weights are held as tiles of 6x6 for each 4x4 of a result.
    """
    if "convolution" not in node.op:
        return 0
    is_backward = "backward" in node.op
    shapes = [graph.values[value].shape for value in node.reads]
    image, weight = shapes[is_backward], shapes[1 + is_backward]
    output = shapes[0] if is_backward else graph.values[node.writes[0]].shape
    is_dense = image[1] == weight[1] and weight[2:] == (3, 3)
    if not is_dense or image[2:] != output[2:] or image[1] < _FEW_CHANNELS:
        return 0
    tiles = output[0] * -(-output[2] // 4) * -(-output[3] // 4)
    numbers = tiles * (weight[0] + weight[1]) + weight[0] * weight[1]
    return 4 * 36 * numbers


def kind_of(row: dict[str, Any]) -> SegmenterKind:
    """The network that a config's name means; refused where it has other words."""
    named = _NAME.fullmatch(str(row["model"]))
    if named is None:
        words = row.get("config", {}).get("architecture") or [row["model"]]
        raise UsageError(f"no rules to rebuild {' with '.join(map(str, words))[:60]}")
    if named["data"] not in _CLASSES:
        raise UsageError(f"how many classes {named['data']} has is not known")
    return SegmenterKind(
        head=named["head"],
        depth=int(named["depth"]),
        num_classes=_CLASSES[named["data"]],
        stride=int(named["stride"] or 32),
        has_deep_stem=not named["plain"],
        multi_grid=bool(named["grid"]),
        head_dilation=6 if named["six"] else 1,
    )
