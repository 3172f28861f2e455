"""Training throughput of NVIDIA's examples on one GPU: image networks, and BERT's pre-training.

A row's heading tells how much memory its A100 has. Several columns of a table are one field of a
row: `128 and 256` are the batches of full and of mixed precision. TF32 is for matrix products as
well, as NVIDIA's containers have it. Loading of data and loss scaling are left out, and nothing is
fitted.

BERT's second phase, of 512 words, has no rules: by its table a V100 would compute more than 19
TFLOP/s in float32, which is above its peak, so what was computed is not what the table says.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch
from gpu_truth.bert import BertSizes, PretrainedBert
from gpu_truth.devices import device_of
from gpu_truth.image_models import network
from gpu_truth.loops import Loop, record
from gpu_truth.rows import Row
from gpu_truth.timing import seconds_of
from torch import nn

from bayplan.data.device import DeviceKind
from bayplan.data.errors import UsageError

__all__ = ["rows_of"]

_NETWORKS = {
    "resnet50v1.5": "resnet50",
    "resnext101-32x4d": "resnext101_32x4d",
    "efficientnet-b0": "efficientnet_b0",
}
_REASONS = {
    "GNMT": "sentences of varying length",
    "Transformer": "sentences of varying length",
    "MaskRCNN": "images and objects of varying size",
}
_BERT_LARGE = BertSizes(hidden=1024, layers=24, heads=16, intermediate=4096, vocab=30528)
_LENGTH, _MASKED = 128, 20  # of the first phase, and its `max_predictions_per_seq`
_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)


def rows_of(
    row: dict[str, Any], table: list[dict[str, Any]], captures: dict[str, Any], on_progress: Any
) -> Iterator[Row]:
    """Our seconds of a step beside one row's."""
    model, config, precision = str(row["model"]), row["config"], str(row["dtype"])
    if row.get("n_gpus") != 1:
        raise UsageError("more than one GPU")
    if row["quantity"] != "throughput (all GPUs)":
        raise UsageError(f"no rules for the quantity {row['quantity']!r}")
    if model != "BERT" and model not in _NETWORKS:
        raise UsageError(_REASONS.get(model, f"no rules to rebuild {model!r}"))
    is_mixed = precision.startswith("mixed")
    device_of(str(row["device"]))  # refused where the row itself names none
    words = f"{row['device']} ({config['heading'].rpartition('/')[2].strip()})"
    device = _in_precision(device_of(words), precision)
    if model == "BERT":
        batch = _bert_batch(row, is_mixed=is_mixed)
        build, size, loss = partial(_bert, batch), f"{batch} x {_LENGTH}", "own"
    else:
        batch, image = int(row["batch_per_gpu"]), int(config["image"])
        build, size = partial(_images, model, batch, image), f"{batch} x {image} px"
        loss = "mean cross_entropy"
    # An update of BERT comes after so many batches that it does not count.
    loop = Loop(
        loss=loss,
        has_backward=True,
        optimizer=None if model == "BERT" else _SGD,
        autocast=torch.float16 if is_mixed else None,
        num_warmups=0,
        starts_warm=model != "BERT",
    )
    on_progress(f"{model}, {size}, {precision}")
    is_channels_last = config.get("memory_format") == "channels_last"
    recording = record(build, loop, architecture=device.architecture)
    yield Row(
        source=f"{row['source']}, {row['path']}",
        model=model,
        device=words,
        quantity=f"step_time by throughput, {precision}, {size}: seconds",
        reported=batch / float(row["value"]),
        predicted=seconds_of(recording, device, is_channels_last=is_channels_last),
    )


def _in_precision(device: DeviceKind, precision: str) -> DeviceKind:
    if precision != "TF32":
        return device
    rates = device.flops_per_s
    return msgspec.structs.replace(device, flops_per_s=rates | {"float32": rates["tf32"]})


def _bert_batch(row: dict[str, Any], *, is_mixed: bool) -> int:
    """Samples of a micro-batch."""
    columns = row["config"]["columns"]

    def told(start: str) -> int | None:
        """A number for each precision, or one for both."""
        for name, text in columns.items():
            if name.startswith(start):
                numbers = [int(each) for each in re.findall(r"\d+", str(text))]
                return numbers[-1 if is_mixed else 0]
        return None

    batch, length, steps = told("Batch size"), told("Sequence"), told("Accumulation")
    if not batch or length is None:
        raise UsageError("fine-tuning: texts of varying length")
    if length != _LENGTH:
        raise UsageError(f"{length} words: the table has more than its V100 can compute")
    if steps and told("Accumulated") is None:  # the batch is that of an update
        batch //= steps
    return batch


def _bert(batch: int) -> tuple[nn.Module, Any, None]:
    masked = batch * _MASKED
    ids = torch.empty(batch, _LENGTH, dtype=torch.int64)
    labels = (torch.empty(size, dtype=torch.int64) for size in (masked, masked, batch))
    return PretrainedBert(_BERT_LARGE), (ids, *labels), None


def _images(model: str, batch: int, image: int) -> tuple[nn.Module, Any, torch.Tensor]:
    images = torch.empty(batch, 3, image, image)
    return network(_NETWORKS[model]).train(), images, torch.empty(batch, dtype=torch.int64)
