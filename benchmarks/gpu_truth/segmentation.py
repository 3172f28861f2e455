"""Segmentation networks as mmsegmentation builds them: a dilated ResNet, a decode head, a loss.

Every convolution has a batch norm and an in-place ReLU behind it. Logits are resized to the labels
before the loss, for the decode head and for an auxiliary one on the third stage. Distributed data
parallel keeps a second copy of all gradients in its buckets.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Segmenter", "SegmenterKind"]

_POOLS = (1, 2, 3, 6)
_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


@dataclass(frozen=True, kw_only=True)
class SegmenterKind:
    """A network by the words of its name.

    Attributes:
        head: fcn, pspnet, deeplabv3, deeplabv3plus or upernet.
        stride: of the last stage's output, 8, 16 or 32; stages dilate instead of striding further.
        has_deep_stem: three 3x3 convolutions instead of one of 7x7.
        multi_grid: dilations of the last stage's blocks are multiplied by 1, 2 and 4.
        head_dilation: of an FCN head's convolutions.
    """

    head: str
    depth: int
    num_classes: int
    stride: int = 32
    has_deep_stem: bool = True
    multi_grid: bool = False
    head_dilation: int = 1


class _Unit(nn.Sequential):
    """Convolution, norm, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        has_relu: bool = True,
    ) -> None:
        super().__init__(
            nn.Conv2d(
                inputs,
                outputs,
                kernel,
                stride=stride,
                padding=dilation * (kernel // 2),
                dilation=dilation,
                groups=groups,
                bias=False,
            ),
            nn.BatchNorm2d(outputs),
            *[nn.ReLU(inplace=True)] * has_relu,
        )


def _separable(inputs: int, outputs: int, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        _Unit(inputs, inputs, 3, dilation=dilation, groups=inputs), _Unit(inputs, outputs)
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, *, stride: int, dilation: int, deep: bool) -> None:
        super().__init__()
        outputs = 4 * width if deep else width
        if deep:
            self.body = nn.Sequential(
                _Unit(inputs, width),
                _Unit(width, width, 3, stride=stride, dilation=dilation),
                _Unit(width, outputs, has_relu=False),
            )
        else:
            self.body = nn.Sequential(
                _Unit(inputs, width, 3, stride=stride, dilation=dilation),
                _Unit(width, width, 3, has_relu=False),
            )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = _Unit(inputs, outputs, stride=stride, has_relu=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return functional.relu(out, inplace=True)


class _ResNet(nn.Module):
    def __init__(self, kind: SegmenterKind) -> None:
        super().__init__()
        if kind.has_deep_stem:
            units = [_Unit(3, 32, 3, stride=2), _Unit(32, 32, 3), _Unit(32, 64, 3)]
        else:
            units = [_Unit(3, 64, 7, stride=2)]
        self.stem = nn.Sequential(*units, nn.MaxPool2d(3, 2, 1))
        is_deep = kind.depth >= 50
        self.widths, stages, inputs, total = list[int](), [], 64, 4
        dilation = 1
        for index, num_blocks in enumerate(_BLOCKS[kind.depth]):
            width, stride = 64 << index, 1 if index == 0 else 2
            first = dilation
            if stride == 2 and total * 2 > kind.stride:
                stride, dilation = 1, 2 * dilation  # the first block still has the old dilation
            else:
                first, total = dilation, total * stride
            grid = (1, 2, 4) if kind.multi_grid and index == 3 else (1,) * num_blocks
            blocks = []
            for number in range(num_blocks):
                own = dilation * grid[number] if number or grid != (1,) * num_blocks else first
                blocks.append(
                    _Block(
                        inputs,
                        width,
                        stride=1 if number else stride,
                        dilation=own,
                        deep=is_deep,
                    )
                )
                inputs = 4 * width if is_deep else width
            stages.append(nn.Sequential(*blocks))
            self.widths.append(inputs)
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, made = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            made.append(x)
        return made


def _resized(x: Tensor, like: Tensor) -> Tensor:
    return functional.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


class _Classifier(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout2d(0.1)
        self.last = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(x))


class _FcnHead(nn.Module):
    def __init__(
        self, inputs: int, channels: int, *, num_units: int, joins: bool, dilation: int = 1
    ) -> None:
        super().__init__()
        widths = [inputs] + [channels] * num_units
        self.units = nn.Sequential(
            *(_Unit(a, b, 3, dilation=dilation) for a, b in pairwise(widths))
        )
        self.join = _Unit(inputs + channels, channels, 3) if joins else None

    def forward(self, stages: list[Tensor]) -> Tensor:
        out = self.units(stages[-1])
        return out if self.join is None else self.join(torch.cat((stages[-1], out), 1))


class _Pyramid(nn.Module):
    """The last stage beside its averages over coarse grids."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), _Unit(inputs, channels)) for size in _POOLS
        )
        self.bottleneck = _Unit(inputs + len(_POOLS) * channels, channels, 3)

    def forward(self, stages: list[Tensor]) -> Tensor:
        x = stages[-1]
        parts = [x, *(_resized(pool(x), x) for pool in self.pools)]
        return self.bottleneck(torch.cat(parts, 1))


class _AtrousHead(nn.Module):
    def __init__(self, widths: list[int], channels: int, *, stride: int, is_plus: bool) -> None:
        super().__init__()
        inputs = widths[-1]
        rates = (12, 24, 36) if stride == 8 else (6, 12, 18)
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), _Unit(inputs, channels))
        self.branches = nn.ModuleList(
            [
                _Unit(inputs, channels),
                *(
                    _separable(inputs, channels, rate)
                    if is_plus
                    else _Unit(inputs, channels, 3, dilation=rate)
                    for rate in rates
                ),
            ]
        )
        self.bottleneck = _Unit(5 * channels, channels, 3)
        self.low = self.last = None
        if is_plus:
            low = channels * 48 // 512
            self.low = _Unit(widths[0], low)
            self.last = nn.Sequential(
                _separable(channels + low, channels), _separable(channels, channels)
            )

    def forward(self, stages: list[Tensor]) -> Tensor:
        x = stages[-1]
        parts = [_resized(self.image(x), x), *(branch(x) for branch in self.branches)]
        x = self.bottleneck(torch.cat(parts, 1))
        if self.low is None or self.last is None:
            return x
        low = self.low(stages[0])
        return self.last(torch.cat((_resized(x, low), low), 1))


class _UnifiedHead(nn.Module):
    def __init__(self, widths: list[int], channels: int) -> None:
        super().__init__()
        self.pyramid = _Pyramid(widths[-1], channels)
        self.sides = nn.ModuleList(_Unit(width, channels) for width in widths[:-1])
        self.smoothers = nn.ModuleList(_Unit(channels, channels, 3) for _ in widths[:-1])
        self.bottleneck = _Unit(len(widths) * channels, channels, 3)

    def forward(self, stages: list[Tensor]) -> Tensor:
        sides = [side(stage) for side, stage in zip(self.sides, stages, strict=False)]
        sides.append(self.pyramid(stages))
        for index in range(len(sides) - 1, 0, -1):
            sides[index - 1] = sides[index - 1] + _resized(sides[index], sides[index - 1])
        outs = [smooth(side) for smooth, side in zip(self.smoothers, sides, strict=False)]
        outs.append(sides[-1])
        outs = [outs[0], *(_resized(out, outs[0]) for out in outs[1:])]
        return self.bottleneck(torch.cat(outs, 1))


class Segmenter(nn.Module):
    """Images and labels to the loss of both heads."""

    def __init__(self, kind: SegmenterKind) -> None:
        super().__init__()
        self.backbone = _ResNet(kind)
        widths = self.backbone.widths
        channels = widths[-1] // 4
        if kind.head == "upernet":
            channels = 512
        self.head = _head(kind, widths, channels)
        self.classifier = _Classifier(channels, kind.num_classes)
        auxiliary = channels // 2
        self.auxiliary = _FcnHead(widths[2], auxiliary, num_units=1, joins=False)
        self.auxiliary_classifier = _Classifier(auxiliary, kind.num_classes)
        self.register_buffer(
            "buckets", torch.empty(sum(each.numel() for each in self.parameters()))
        )

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        stages = self.backbone(images)
        logits = self.classifier(self.head(stages))
        loss = _loss(logits, labels)
        others = self.auxiliary_classifier(self.auxiliary(stages[:3]))
        return loss + 0.4 * _loss(others, labels), loss


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    logits = functional.interpolate(
        logits, size=labels.shape[1:], mode="bilinear", align_corners=False
    )
    logs = _LogSoftmax.apply(logits)
    return functional.nll_loss(logs, labels, reduction="none", ignore_index=255).mean()


class _LogSoftmax(torch.autograd.Function):
    """As torch had it before 1.11: its input is kept for backward beside its output."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        logs = functional.log_softmax(logits, dim=1)
        ctx.save_for_backward(logits, logs)
        return logs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        logits, logs = ctx.saved_tensors
        return torch.ops.aten._log_softmax_backward_data(grads[0], logs, 1, logits.dtype)


def _head(kind: SegmenterKind, widths: list[int], channels: int) -> nn.Module:
    match kind.head:
        case "fcn":
            return _FcnHead(
                widths[-1], channels, num_units=2, joins=True, dilation=kind.head_dilation
            )
        case "pspnet":
            return _Pyramid(widths[-1], channels)
        case "upernet":
            return _UnifiedHead(widths, channels)
        case _:
            return _AtrousHead(
                widths, channels, stride=kind.stride, is_plus=kind.head == "deeplabv3plus"
            )
