"""What is run: a list of stages, a batch, and a loss that is a mean over samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from ranks.emulation import EmulatedLayer
from torch import Tensor, nn

__all__ = ["CASES", "MEMORY_CASE", "Case", "Replicas", "mean_loss", "shrunk", "with_boundary"]

_MIB = 2**20
# VGG16's five blocks of convolutions on a V100, by PipeDream's profile of it: shares of their time,
# and of their parameters. The fully connected layers take 1.4 % of all time.
_BLOCKS = ((0.356, 0.003), (0.220, 0.015), (0.200, 0.100), (0.163, 0.401), (0.061, 0.481))
_FC_SHARE = 0.014


@dataclass(frozen=True)
class Case:
    """A straight pipeline, one rank for each stage.

    Attributes:
        kind: of its stages.
        samples: of one micro-batch.
        boundary_bytes: what one micro-batch sends from stage to stage, where that can be chosen.
        forward_seconds: of one micro-batch in one stage, where that is emulated.
        steps_per_turn: timed together; several where one is short.
        depth: of our schedule; 1 for as many micro-batches in flight as torch has.
        most_over_torch: the target.
        most_over_ideal: the target where stages take a known time.
    """

    name: str
    kind: str
    num_micro_batches: int
    samples: int = 4
    boundary_bytes: int = 0
    forward_seconds: float = 0.0
    steps_per_turn: int = 1
    depth: int = 1
    most_over_torch: float = 1.0
    most_over_ideal: float | None = None

    def stages(self, num_stages: int) -> list[nn.Module]:
        """Always with the same parameters."""
        torch.manual_seed(0)
        if self.kind == "tiny":
            return [nn.Linear(8, 8) for _ in range(num_stages)]
        if self.kind == "boundary":
            width = math.isqrt(self._boundary_floats)
            return [_Widen(width), *(_Scale(width * width) for _ in range(num_stages - 1))]
        if self.kind == "conv":
            return [_convolutions(8 // num_stages) for _ in range(num_stages)]
        seconds = self.forward_seconds / self.samples
        return [EmulatedLayer(4096, seconds) for _ in range(num_stages)]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same on every rank."""
        torch.manual_seed(1)
        num_samples = self.samples * self.num_micro_batches
        shapes = {
            "tiny": (8,),
            "boundary": (math.isqrt(self._boundary_floats),),
            "conv": (32, 32, 32),
            "emulated": (64,),
        }
        return torch.randn(num_samples, *shapes[self.kind]), torch.randn(num_samples)

    @property
    def _boundary_floats(self) -> int:
        return self.boundary_bytes // 4 // self.samples


@dataclass(frozen=True)
class Replicas:
    """Light convolutions on all ranks but one, heavy fully connected layers on that one.

    As in VGG16, nearly all compute is in one part and nearly all parameters are in the other; sizes
    are about a thirtieth of its.

    Attributes:
        num_ranks: of which the last computes the second stage.
        num_hosts: that the ranks are spread over.
        forward_seconds: of all convolutions on each rank that has them; backward takes twice as
            long.
        least_over_ddp, least_over_even: targets, as speed-ups.
        depth: of our schedule.
    """

    name: str
    num_ranks: int
    num_hosts: int = 1
    num_samples: int = 224
    num_micro_batches: int = 4
    conv_bytes: int = 2 * _MIB
    fc_bytes: int = 16 * _MIB
    activation_floats: int = 1024
    forward_seconds: float = 0.040
    least_over_ddp: float | None = None
    least_over_even: float | None = None
    depth: int = 2

    def stages(self) -> list[nn.Module]:
        """Two."""
        # One sample's, in all convolutions.
        seconds = self.forward_seconds * (self.num_ranks - 1) / self.num_samples
        light = (
            EmulatedLayer(int(self.conv_bytes * size), seconds * time) for time, size in _BLOCKS
        )
        heavy = EmulatedLayer(self.fc_bytes, seconds * _FC_SHARE / (1 - _FC_SHARE))
        return [nn.Sequential(*light), heavy]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same on every rank."""
        torch.manual_seed(1)
        inputs = torch.randn(self.num_samples, self.activation_floats)
        return inputs, torch.randn(self.num_samples)

    @property
    def placement(self) -> str:
        """All ranks but the last, then the last."""
        per_host = self.num_ranks // self.num_hosts
        places = [(rank // per_host, rank % per_host) for rank in range(self.num_ranks)]
        *light, heavy = (f"{host}:{device}" for host, device in places)
        return f"{','.join(light)}.{heavy}"


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over samples of what depends on one sample only."""
    return (outputs.flatten(1).mean(1) - targets).square().mean()


class _Widen(nn.Module):
    """Few numbers in, their square out: a large boundary from a small batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width))

    def forward(self, values: Tensor) -> Tensor:
        return (values.unsqueeze(2) * self.weight).flatten(1)


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.weight


def _convolutions(number: int) -> nn.Module:
    layers = ((nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(number))
    return nn.Sequential(*(layer for pair in layers for layer in pair))


CASES: Sequence[Case] = (
    Case("tiny", "tiny", 64, steps_per_turn=3, most_over_torch=0.80),
    Case("boundary 1 MB", "boundary", 32, 4, boundary_bytes=_MIB, most_over_torch=0.95),
    Case("boundary 4 MB", "boundary", 16, 16, boundary_bytes=4 * _MIB, most_over_torch=0.95),
    Case("conv, real compute", "conv", 8),
    Case("emulated 5+10 ms", "emulated", 16, forward_seconds=0.005, most_over_ideal=1.05),
)
MEMORY_CASE = Case("boundary memory", "boundary", 8, 32, boundary_bytes=8 * _MIB)


def with_boundary(case: Case, num_micro_batches: int) -> Case:
    """The same boundary, more or fewer times."""
    return replace(case, num_micro_batches=num_micro_batches)


def shrunk(case: Case) -> Case:
    """The same in a tiny setting."""
    return replace(
        case,
        num_micro_batches=4,
        samples=2,
        boundary_bytes=case.boundary_bytes // 64,
        forward_seconds=case.forward_seconds / 5,
        steps_per_turn=1,
    )
