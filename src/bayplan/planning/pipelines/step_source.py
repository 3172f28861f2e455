"""What planners of ranks ask about a step, as data and protocols without torch.

`preparing.stages.PreparedStages` answers: it holds the model, traces it, cuts it and prices it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from bayplan.data.chain import Chain
from bayplan.data.device import DeviceKind
from bayplan.data.graph import StepGraph
from bayplan.data.plan import Request, StepOrder
from bayplan.data.program import Program
from bayplan.planning.memory.orders import PackedVariants, Variant

__all__ = [
    "CutSource",
    "OneDeviceStep",
    "PackableStep",
    "SharesBy",
    "StageValues",
    "StepSource",
    "TracedStage",
    "UpdateCost",
]

Pair = tuple[int, int]  # the making stage and the reading one


class SharesBy(StrEnum):
    """What shares are shares of."""

    TIME = "time"
    OPS = "ops"
    PARAMETERS = "parameters"


class UpdateCost(Protocol):
    @property
    def seconds(self) -> float: ...

    @property
    def size_bytes(self) -> int:
        """Memory over parameters, gradients and optimizer state."""


class AnalysedStep(Variant, Protocol):
    """A joint graph as a program; its nodes are opaque here."""

    @property
    def buffers_of(self) -> Mapping[Any, Sequence[int]]:
        """The buffers behind each node's value."""

    @property
    def backward_outputs(self) -> Sequence[Any]:
        """The node of each gradient, or None."""

    @property
    def lines(self) -> Mapping[str, str]:
        """By place of an op, the first line of the user's that it runs for."""


class PackableStep(PackedVariants, Protocol):
    """A traced step (`tracing.TracedStep`) that may be run in an order that was decided."""

    def with_packs(self, names: Sequence[str] = ()) -> AnalysedStep: ...

    def for_order(self, order: StepOrder, *, is_here: bool = True) -> AnalysedStep:
        """Raises ForeignPlan if the order cannot be run with this step."""


@dataclass(frozen=True, kw_only=True)
class StageValues:
    """What stages read, make and send to each other at one number of samples.

    Attributes:
        fingerprint: of the whole step; the same at every number of samples.
        tensors: by stage, the parameters and buffers that it reads.
        gradients: by stage, the parameters that its backward makes gradients of, in that order.
        forward: by pair of stages, the bytes of each value that is sent.
        backward: the same of gradients; the making stage is the later one.
        tensor_bytes: of every parameter and buffer; a tied weight has several names.
        gradient_bytes: by parameter.
        gradient_kinds: by parameter, dtype and device of its gradient; only equal ones are summed
            together.
        drawing_bytes: the most that drawing the step's random numbers takes.
    """

    num_samples: int
    fingerprint: str
    tensors: tuple[tuple[str, ...], ...]
    gradients: tuple[tuple[str, ...], ...]
    forward: Mapping[Pair, tuple[int, ...]]
    backward: Mapping[Pair, tuple[int, ...]]
    tensor_bytes: Mapping[str, int]
    gradient_bytes: Mapping[str, int]
    gradient_kinds: Mapping[str, str]
    drawing_bytes: int

    @property
    def links(self) -> tuple[Pair, ...]:
        """The pairs of stages, the earlier first, between which values go."""
        return tuple(sorted(self.forward))

    @property
    def gradient_links(self) -> tuple[Pair, ...]:
        """The pairs of stages, the earlier first, between which gradients go."""
        return tuple(sorted((early, late) for late, early in self.backward))


@dataclass(frozen=True)
class TracedStage:
    """A stage as planners see it.

    Attributes:
        num_gradients: of parameters, the first outputs of its backward; other stages get the rest.
    """

    step: PackableStep
    num_gradients: int

    def program(self, packs: tuple[str, ...] = ()) -> Program:
        return self.step.with_packs(packs).program

    def gradients(self, packs: tuple[str, ...]) -> tuple[list[frozenset[int]], frozenset[int]]:
        """The buffers of each parameter's gradient, and those of all gradients for other stages."""
        step = self.step.with_packs(packs)
        made = [
            frozenset() if node is None else frozenset(step.buffers_of[node])
            for node in step.backward_outputs
        ]
        return made[: self.num_gradients], frozenset().union(*made[self.num_gradients :])


class CutSource(Protocol):
    """A step that is cut into stages, with what they cost in one place."""

    def values(self, num_samples: int) -> StageValues: ...

    def traced(self, stage: int, num_samples: int) -> TracedStage: ...

    def update(self, parameters: Sequence[str]) -> UpdateCost:
        """What the optimizer's update of these parameters costs."""

    def add_seconds(self, parameters: Sequence[str]) -> float:
        """To add gradients of these parameters to those that are there."""

    def copy_seconds(self, parameters: Sequence[str]) -> float:
        """To copy gradients of these parameters."""


@dataclass(frozen=True, kw_only=True)
class OneDeviceStep:
    """A step that is not cut, on one kind of device.

    Attributes:
        num_samples: None where the target keeps it to itself.
        graph: the captured step, as this kind of device updates it.
        fingerprints: of that, and as this machine does.
        unrounded: not priced, and without the allocator's rounding.
        outside_seconds: what loss and update take, which are outside the traced graph.
    """

    num_samples: int | None
    graph: StepGraph
    fingerprints: tuple[str, str]
    traced: PackableStep
    unrounded: PackableStep
    outside_seconds: float


class StepSource(Protocol):
    """A training step that planners may trace at any number of samples and cut anywhere."""

    @property
    def name(self) -> str:
        """What the model is called in plans and reports."""

    @property
    def request(self) -> Request | None:
        """How the step can be built again."""

    @property
    def optimizer_name(self) -> str:
        """Empty where it is not known."""

    @property
    def num_samples(self) -> int:
        """The size of the whole batch, over all replicas and micro-batches."""

    @property
    def batch_bytes(self) -> int: ...

    @property
    def torch_version(self) -> str: ...

    @property
    def cache(self) -> Path:
        """Where planners keep what they compiled and found."""

    @property
    def where(self) -> str:
        """What a plan says it is for: a device's name, or a cluster's fingerprint."""

    @property
    def num_cores(self) -> float:
        """Cores that ranks share; infinite where each has a device of its own."""

    def program(self, num_samples: int) -> Program:
        """The step before it is cut; its operators are not priced."""

    def weights(self, by: SharesBy, num_samples: int) -> Sequence[float]:
        """What each forward operator weighs for a cut, its backward included."""

    def sent_bytes(self, num_samples: int) -> list[int]:
        """What a cut before each forward operator would send."""

    def norms_to_synchronise(
        self, num_samples: int, firsts: Sequence[int], stages: Sequence[int]
    ) -> frozenset[str]:
        """The BatchNorms in training of some stages, by name."""

    def cut(
        self, firsts: Sequence[int], *, synchronised: frozenset[str] = frozenset()
    ) -> CutSource:
        """Cut it before some operators; BatchNorms may be computed by replicas together."""

    def on_kinds(self, kinds: Sequence[DeviceKind], *, where: str) -> "StepSource":
        """The same step, each stage priced by the figures of a kind of device."""

    def unpriced(self) -> "StepSource":
        """The same step without prices, and without an allocator's rounding."""

    def chain(
        self, kind: DeviceKind, sizes: tuple[int, int], *, name: str, also: Sequence[int] = ()
    ) -> tuple[Chain, tuple[int, ...]]:
        """The step as layers on a kind of device, and the operators that they begin with.

        Args:
            sizes: the number of samples to price at, and a smaller one: what the line through both
                has at no sample is fixed cost.
            also: operators that layers begin with in any case.
        """

    def alone(self, kind: DeviceKind, fingerprint: str) -> OneDeviceStep:
        """The whole step on a device, as a plan of that fingerprint was made for it.

        Plans that were made for this machine have its operators, those made for a kind of device
        have the operators of that kind.
        """
