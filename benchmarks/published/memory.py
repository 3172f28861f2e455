"""How much memory nvidia-smi shows of a device, from what our capture knows of its stage.

    context                     as the device's file has it
    + parameters, some times    weight, momentum, gradient, the summed gradient, buffers of sums
    + activations               held for backward, the samples included; several times where batches
                                overlap on devices of their own
    + messages                  to and from the other stage, whole and in pieces
    + workspace                 where there are convolutions
    + loading                   real images, on devices that read them

Nothing of this is fitted to a single row. GPUs 1 to 6 hold more copies of their parameters than
GPU 0 in reports 001 and 002, for which no reason is known, but not in 000.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from published.captured import CapturedStage
from published.constants import Prior
from published.rows import Row
from reports_000_002.rows import RUNS

__all__ = ["MEMORY_PRIORS", "MemoryConstants", "MemoryRow", "memory_rows", "predicted_mib"]

MIB = 2**20
# What comes is received in pieces, into two buffers where batches overlap, and joined; what goes
# back is made whole and cut into pieces.
_RECEIVED_COPIES, _RETURNED_COPIES = 3, 2
_COLOCATED_COPIES = 2  # of stage 0, whose weights have two versions, in the devices' one pool


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """What all rows share.

    Attributes:
        parameter_copies: of the weights of a stage; one more where they have two versions.
        workspace_mib: of convolutions.
        activation_copies: of a stage whose batches overlap with those of a stage elsewhere.
        extra_copies: of parameters, on GPUs other than the first.
        loading_mib: of real images.
    """

    parameter_copies: float
    workspace_mib: float
    activation_copies: float
    extra_copies: float
    loading_mib: float

    @classmethod
    def at(cls, logarithms: Sequence[float]) -> "MemoryConstants":
        """Those with these logarithms, in the order of the fields."""
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, map(math.exp, logarithms), strict=True)))


MEMORY_PRIORS: dict[str, Prior] = {
    "parameter_copies": Prior(4.0, 0.4, "weight, momentum, gradient, summed gradient"),
    "workspace_mib": Prior(
        256.0, 0.7, "from these rows: what is left where there are convolutions"
    ),
    "activation_copies": Prior(2.0, 0.5, "two batches in flight"),
    "extra_copies": Prior(3.0, 0.5, "1.9 to 3.9 by report"),
    "loading_mib": Prior(1024.0, 0.7, "from these rows: real beside synthetic"),
}


@dataclass(frozen=True)
class MemoryRow:
    """One device of a row."""

    row: Row
    device: int
    reported_mib: int

    @property
    def name(self) -> str:
        """As the row's."""
        return self.row.name

    @property
    def stage(self) -> int:
        """The one that the device computes; with two on it, the last."""
        return 1 if self.row.run.is_pipeline and (self.device == 7 or self.row.run.local) else 0

    @property
    def is_explained(self) -> bool:
        """What PyTorch's allocator reserves does not follow from what is needed."""
        return not self.row.run.name.startswith("PipeDream")


def memory_rows() -> Iterator[MemoryRow]:
    """GPU 0, one of those beside it, and the last one where it has a stage of its own.

    Of two hosts the reports' tables have one figure, that of the fullest GPU.
    """
    for run in RUNS:
        for one in run.reported:
            devices = [1] if run.local else [0, 1]
            if run.is_pipeline and not run.local:
                devices.append(7)
            for device in devices:
                yield MemoryRow(Row(run, one), device, one.memory_mib[device])


def predicted_mib(
    asked: MemoryRow,
    captured: Sequence[CapturedStage],
    constants: MemoryConstants,
    *,
    context_bytes: float,
) -> float:
    """What the device holds.

    Args:
        asked: which device of which row.
        captured: the stages of its run.
        constants: of all rows.
        context_bytes: of a process without tensors.
    """
    run = asked.row.run
    own = captured if run.local else [captured[asked.stage]]
    if not asked.is_explained:
        return (context_bytes + _needed_by_torch(asked, own[0])) / MIB
    copies = constants.parameter_copies
    is_ahead = run.is_pipeline and not run.local and asked.stage == 0
    activations = sum(map(_activation_bytes, own))
    if is_ahead:
        activations *= constants.activation_copies
    elif len(own) > 1:
        activations += (_COLOCATED_COPIES - 1) * _activation_bytes(own[0])
    parameters = (copies + is_ahead) * sum(one.parameter_bytes for one in own)
    if asked.device not in (0, 7) or (asked.device == 7 and not run.is_pipeline):
        has_extra = asked.row.reported.report != "000"
        parameters += has_extra * constants.extra_copies * sum(one.parameter_bytes for one in own)
    total = context_bytes + parameters + activations
    if run.is_pipeline and not run.local and asked.stage == 1:
        # What it receives is as large as its gradient, which it returns.
        total += (_RECEIVED_COPIES + _RETURNED_COPIES) * own[0].returned_bytes
    if any(one.has_convolutions for one in own):
        total += constants.workspace_mib * MIB
    if asked.row.is_real and (asked.stage == 0 or run.local):
        total += constants.loading_mib * MIB
    return total / MIB


def _activation_bytes(captured: CapturedStage) -> int:
    return captured.held_bytes - captured.index_bytes + captured.input_bytes


def _needed_by_torch(asked: MemoryRow, captured: CapturedStage) -> float:
    """What PipeDream's tensors take: weights, momentum and gradients, older weights, activations.

    What is reserved beyond that is the allocator's and cuDNN's, and grows until the device is full.
    """
    in_flight = 2 if asked.row.run.is_pipeline and asked.stage == 0 else 1
    weights = (2 + in_flight) * captured.parameter_bytes
    return (
        weights + in_flight * (captured.held_bytes + captured.input_bytes) + captured.passing_bytes
    )
