"""What a stage needs in memory: one formula for a judged split and for all stages a planner tries.

weights         once
versions        once more for each batch that backward is behind
gradients       their sum over micro-batches
state           of the optimizer
activations     of each micro-batch in flight, and what passes in one of them; where a stage is
                recomputed, the inputs of those in flight and all activations of one
transfers       on each side a message that comes and one that goes
buckets         one that is filled and one that is summed up, where there are replicas
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bayplan.data.chain import Chain
from bayplan.data.judgement import MemoryNeed
from bayplan.planning.clusters.split import DeviceMemory, Split, Training

__all__ = [
    "BACKWARD_FIRST",
    "Parts",
    "StageSizes",
    "in_flight",
    "in_flight_of",
    "memory_need",
    "needed_parts",
]

# Where backward lags: its old batch comes before the new one's forward, which hides the sum.
BACKWARD_FIRST = "backward-first"
_FILLS_FIRST = "gpipe"
_ONE_BY_ONE = "one-by-one"

Figures = Any  # a number, or an array with one for each stage that is tried


class Parts(NamedTuple):
    """Bytes, by what they are for."""

    weights: Figures
    versions: Figures
    gradients: Figures
    state: Figures
    activations: Figures
    transfers: Figures
    buckets: Figures

    @property
    def total(self) -> Figures:
        return sum(self[1:], self[0])


@dataclass(frozen=True, kw_only=True)
class StageSizes:
    """What is known of a stage, for the samples that one device has of a micro-batch.

    Attributes:
        held_bytes: from forward to backward, if nothing is recomputed.
        passing_bytes: more than that, at the highest moment inside a layer.
        input_bytes, output_bytes: of messages.
    """

    parameter_bytes: Figures
    held_bytes: Figures
    passing_bytes: Figures
    input_bytes: Figures
    output_bytes: Figures

    @classmethod
    def of(cls, chain: Chain, first: int, last: int, num_samples: float) -> "StageSizes":
        share = num_samples / chain.num_samples
        is_last = last == len(chain.layers) - 1
        return cls(
            parameter_bytes=chain.parameter_bytes(first, last),
            held_bytes=chain.held_bytes(first, last, num_samples),
            passing_bytes=share
            * max(layer.passing_bytes for layer in chain.layers[first : last + 1]),
            input_bytes=chain.sent_bytes(first - 1, num_samples) if first else 0.0,
            output_bytes=0.0 if is_last else chain.sent_bytes(last, num_samples),
        )


def needed_parts(
    sizes: StageSizes,
    training: Training,
    *,
    in_flight: Figures,
    lag: int = 0,
    is_recomputed: bool = False,
    is_replicated: bool = False,
) -> Parts:
    """What a device of a stage holds at its highest moment.

    Args:
        in_flight: micro-batches that are past their forward.
        lag: batches that backward is behind forward.
        is_recomputed: whether it keeps only its input and repeats its forward.
        is_replicated: whether its gradients are summed up with those of others.
    """
    weights = sizes.parameter_bytes
    gradients = training.gradient_per_parameter * weights
    if is_recomputed:
        held = in_flight * sizes.input_bytes + sizes.held_bytes
    else:
        held = in_flight * sizes.held_bytes
    return Parts(
        weights=weights,
        versions=lag * weights,
        gradients=gradients,
        state=training.state_per_parameter * weights,
        activations=held + sizes.passing_bytes,
        transfers=2 * (sizes.input_bytes + sizes.output_bytes),
        buckets=np.minimum(gradients, 2 * training.bucket_bytes) if is_replicated else 0 * weights,
    )


def memory_need(parts: Parts, training: Training, memory: DeviceMemory | None = None) -> MemoryNeed:
    """The same as whole bytes, with what is beside it on a device."""
    names = ("weight", "version", "gradient", "state", "activation", "transfer", "bucket")
    whole = [int(np.ceil(part)) for part in parts]
    return MemoryNeed(
        **{f"{name}_bytes": size for name, size in zip(names, whole, strict=True)},
        allocated_bytes=int(np.ceil(sum(whole) * (1 + training.allocator_slack))),
        context_bytes=0 if memory is None else memory.context_bytes,
        device_bytes=0 if memory is None else memory.total_bytes,
    )


def in_flight(schedule: str, count: int, stages_left: int, lag: int) -> int:
    """Of so many micro-batches of each batch, how many are past their forward at once in a stage.

    Args:
        stages_left: from the stage to the end, itself included.
        lag: batches that backward is behind forward.
    """
    if lag:
        # A backward that comes first makes room for the forward behind it.
        return lag * count + (schedule != BACKWARD_FIRST)
    if schedule in (_ONE_BY_ONE, BACKWARD_FIRST):
        return 1
    return count if schedule == _FILLS_FIRST else min(count, stages_left)


def in_flight_of(split: Split) -> tuple[int, ...]:
    """By stage, the most micro-batches that are past their forward, of all batches at once."""
    num_stages, schedule = len(split.stages), split.schedule
    if any(split.lags) and schedule != BACKWARD_FIRST:
        schedule = _ONE_BY_ONE  # stale batches overlap, so micro-batches need not
    elif num_stages == 1:
        schedule = "1f1b"  # nobody to fill
    lags = split.lags or (0,) * num_stages
    return tuple(
        in_flight(schedule, split.num_micro_batches, num_stages - index, lag)
        for index, lag in enumerate(lags)
    )
