"""`PreparedStages`: a training step in hand for planning and running many ranks.

The step is traced once for each number of samples, and cut once for each choice of stages; what
was traced is shared between ways to price it. Planners see it as the `StepSource` of
`planning.pipelines.step_source`, which knows nothing of torch.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from bayplan.costing.pricing import (
    DerivedCosts,
    RankPrices,
    StagePrices,
    derived_prices,
    free_prices,
    one_thread_prices,
    samples_to_price,
    with_whole_masks,
)
from bayplan.costing.step_memory import UpdateCost, derived_update_cost, update_cost
from bayplan.data.chain import Chain
from bayplan.data.device import DeviceKind
from bayplan.data.plan import Request
from bayplan.data.program import Program
from bayplan.devices.device import device_of
from bayplan.devices.machine import cache_directory
from bayplan.planning.pipelines.step_source import (
    OneDeviceStep,
    SharesBy,
    StageValues,
    TracedStage,
)
from bayplan.preparing.step import PreparedStep
from bayplan.simulating.network import compute_spread
from bayplan.step import TrainingStep
from bayplan.tracing.explain import explained
from bayplan.tracing.fake import OptimizerSource, without_memory
from bayplan.tracing.joint import JointStep
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.stages.assigning import (
    operator_counts,
    parameter_bytes,
    seconds_with_backward,
    sent_bytes,
)
from bayplan.tracing.stages.chaining import chained, with_fixed_parts
from bayplan.tracing.stages.drawing import drawing_bytes
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.synchronising import norms_to_synchronise
from bayplan.tracing.stages.whole import InputKind, Samples, WholeStep, batch_dimensions
from bayplan.tracing.stages.whole_trace import (
    batch_tensors,
    named_tensors,
    num_samples_of,
    trace_whole,
)
from bayplan.tracing.traced_step import MemoryContext, Price

__all__ = ["PreparedStages"]

StageContext = Callable[[int, int], MemoryContext]  # of a stage and a number of samples


@dataclass(frozen=True)
class LocalCosts:
    """Measured here, as ranks of this machine find them: one thread each, or one device each."""

    device: torch.device

    @property
    def where(self) -> str:
        return device_of(self.device).name

    @property
    def num_cores(self) -> float:
        return len(os.sched_getaffinity(0)) if device_of(self.device).counts_cpu_time else math.inf

    def contexts(self, staged: Callable[[int], StagedStep], num_samples: int) -> StageContext:
        """What stages of a step, by its number of samples, are traced with in a whole batch."""
        return StagePrices(
            staged=staged,
            num_samples=num_samples,
            cache=cache_directory(),
            granularity_bytes=device_of(self.device).granularity_bytes,
        ).context

    def num_priced(self, whole: WholeStep) -> int:
        """The number of samples to price a whole step at."""
        return samples_to_price(whole.nodes, whole.num_samples)

    def prices(self) -> AbstractContextManager[RankPrices]:
        return one_thread_prices(self.device, cache=cache_directory())

    def update(self, parameters: Sequence[torch.Tensor], optimizer: OptimizerSource) -> UpdateCost:
        return update_cost(
            parameters,
            optimizer,
            prices=self.prices(),
            granularity_bytes=device_of(self.device).granularity_bytes,
        )


@dataclass(frozen=True)
class KindCosts:
    """Derived from the figures of devices that need not be here.

    Attributes:
        kinds: by stage, the kind of device; updates and single calls are priced by the first.
            Without any, nothing is priced and no size is rounded.
        where: see `StepSource`.
    """

    kinds: Sequence[DeviceKind] = ()
    where: str = ""
    num_cores: float = math.inf

    def contexts(self, staged: Callable[[int], StagedStep], num_samples: int) -> StageContext:
        def context(stage: int, piece_samples: int) -> MemoryContext:
            kind = self.kinds[stage] if self.kinds else None

            def prices(device: torch.device) -> AbstractContextManager[Price]:
                return free_prices(device) if kind is None else derived_prices(kind)

            return MemoryContext(
                prices=partial(with_whole_masks, prices, num_samples / piece_samples),
                granularity_bytes=1 if kind is None else kind.allocation_granularity_bytes,
            )

        return context

    def num_priced(self, whole: WholeStep) -> int:
        return whole.num_samples

    def prices(self) -> AbstractContextManager[RankPrices]:
        return derived_prices(self.kinds[0])

    def update(self, parameters: Sequence[torch.Tensor], optimizer: OptimizerSource) -> UpdateCost:
        if not self.kinds:
            return UpdateCost()
        return derived_update_cost(parameters, optimizer, kind=self.kinds[0])


CostSource = LocalCosts | KindCosts


@dataclass(frozen=True, kw_only=True)
class PreparedStages:
    """A step that is traced, cut and priced as far as it is asked about.

    Attributes:
        step: the model, a batch of the size to train with, and the loss; may take no memory.
        optimizer: makes one of parameters, to price its update; None leaves that out.
        name: of the model; its class by default.
        costs: where prices come from; by default they are measured here.
        question: how the step was asked for; None for a step that cannot be built again.
    """

    step: TrainingStep
    optimizer: OptimizerSource = None
    name: str = ""
    costs: CostSource | None = None
    question: PreparedStep | None = None
    _wholes: dict[int, WholeStep] = field(default_factory=dict, repr=False)
    _staged: dict[object, StagedStep] = field(default_factory=dict, repr=False)
    _priced: dict[tuple[int, str], JointStep] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, question: PreparedStep) -> "PreparedStages":
        return cls(
            step=question.step,
            optimizer=question.optimizer_source(),
            name=question.target.name,
            question=question,
        )

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", type(self.step.model).__name__)

    # What does not depend on where the step is cut.

    @cached_property
    def _costs(self) -> CostSource:
        return self.costs or LocalCosts(next(self.step.model.parameters()).device)

    @property
    def request(self) -> Request | None:
        return None if self.question is None else self.question.request

    @property
    def optimizer_name(self) -> str:
        return "" if self.question is None else self.question.optimizer_name

    @property
    def where(self) -> str:
        return self._costs.where

    @property
    def num_cores(self) -> float:
        return self._costs.num_cores

    @property
    def cache(self) -> Path:
        return cache_directory()

    @property
    def torch_version(self) -> str:
        return str(torch.__version__)

    @cached_property
    def num_samples(self) -> int:
        return num_samples_of(self.step.batch)

    @property
    def batch_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in batch_tensors(self.step.batch))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return named_tensors(self.step)

    def whole(self, num_samples: int) -> WholeStep:
        if num_samples not in self._wholes:
            with explained():
                self._wholes[num_samples] = trace_whole(self.step, num_samples=num_samples)
        return self._wholes[num_samples]

    def staged(
        self,
        num_samples: int,
        firsts: Sequence[int] = (0,),
        synchronised: frozenset[str] = frozenset(),
    ) -> StagedStep:
        key = (num_samples, tuple(firsts), synchronised)
        if key not in self._staged:
            self._staged[key] = StagedStep(self.whole(num_samples), tuple(firsts), synchronised)
        return self._staged[key]

    def dimensions(self, num_samples: int, other: int | None = None) -> dict[str, Samples | None]:
        """Along which dimension of each value samples lie: what differs between two sizes."""
        return batch_dimensions(self.whole(num_samples), self.whole(other or num_samples + 1))

    def program(self, num_samples: int) -> Program:
        return self.staged(num_samples).step.program

    def weights(self, by: SharesBy, num_samples: int) -> Sequence[float]:
        staged = self.staged(num_samples)
        if by is SharesBy.OPS:
            return operator_counts(staged.whole, staged.step)
        if by is SharesBy.PARAMETERS:
            return parameter_bytes(staged.whole, staged.step)
        whole = self.whole(self._costs.num_priced(staged.whole))
        with explained(), self._costs.prices() as price:
            return seconds_with_backward(whole.analysed(price))

    def sent_bytes(self, num_samples: int) -> list[int]:
        return sent_bytes(self.program(num_samples))

    def norms_to_synchronise(
        self, num_samples: int, firsts: Sequence[int], stages: Sequence[int]
    ) -> frozenset[str]:
        staged, dimensions = self.staged(num_samples, firsts), self.dimensions(num_samples)
        return norms_to_synchronise(staged.whole, staged.assignment, stages, dimensions)

    def chain(
        self, kind: DeviceKind, sizes: tuple[int, int], *, name: str, also: Sequence[int] = ()
    ) -> tuple[Chain, tuple[int, ...]]:
        (large, firsts), (small, small_firsts) = (
            chained(
                self.whole(size),
                self._priced_on(kind, name, size),
                name=self.name,
                device=name,
                spread=compute_spread([kind]),
                also=also,
            )
            for size in sizes
        )
        assert firsts == small_firsts, "a step is cut at the same places at any size"
        return with_fixed_parts(large, small), firsts

    def _priced_on(self, kind: DeviceKind, name: str, num_samples: int) -> JointStep:
        key = (num_samples, name)
        if key not in self._priced:
            self._priced[key] = self.whole(num_samples).analysed(DerivedCosts(kind))
        return self._priced[key]

    # The same step, priced otherwise.

    def on_kinds(self, kinds: Sequence[DeviceKind], *, where: str) -> "PreparedStages":
        optimizer = self.optimizer
        if self.question is not None:
            optimizer = self._question_on(kinds[0]).optimizer_source()
        return replace(self, optimizer=optimizer, costs=KindCosts(tuple(kinds), where))

    def _question_on(self, kind: DeviceKind) -> PreparedStep:
        """The whole step on a kind of device, with the operators its stages are traced with."""
        assert self.question is not None, "a plan says what it was made for"
        return self.question.changed(device=kind, operators=self.question.operators or "")

    def unpriced(self) -> "PreparedStages":
        return replace(self, costs=KindCosts())

    def alone(self, kind: DeviceKind, fingerprint: str) -> OneDeviceStep:
        assert self.question is not None, "a plan says what it was made for"
        here, there = self.question, self.question.changed(device=kind)
        if there.graph.fingerprint != fingerprint:  # planned here, with the operators of here
            there = self._question_on(kind)
        unrounded = replace(there.context, granularity_bytes=1, prices=free_prices)
        return OneDeviceStep(
            num_samples=here.samples,
            graph=there.graph,
            fingerprints=(there.graph.fingerprint, here.graph.fingerprint),
            traced=there.traced,
            unrounded=trace_step(there.step, unrounded),
            outside_seconds=there.outside_seconds,
        )

    def cut(
        self, firsts: Sequence[int], *, synchronised: frozenset[str] = frozenset()
    ) -> "CutStages":
        return CutStages(self, tuple(firsts), synchronised)


@dataclass(frozen=True)
class CutStages:
    """The stages of a step; see `CutSource`."""

    prepared: PreparedStages
    firsts: tuple[int, ...]
    synchronised: frozenset[str] = frozenset()
    _values: dict[int, StageValues] = field(default_factory=dict, repr=False)
    _traced: dict[tuple[int, int], TracedStage] = field(default_factory=dict, repr=False)

    def staged(self, num_samples: int) -> StagedStep:
        return self.prepared.staged(num_samples, self.firsts, self.synchronised)

    def values(self, num_samples: int) -> StageValues:
        if num_samples not in self._values:
            staged = self.prepared.staged(num_samples, self.firsts)
            self._values[num_samples] = _values_of(staged, self.prepared.tensors)
        return self._values[num_samples]

    def traced(self, stage: int, num_samples: int) -> TracedStage:
        key = (stage, num_samples)
        if key not in self._traced:
            staged = self.staged(num_samples)
            graph = staged.graph(stage)
            traced = staged.traced(graph, self._context(stage, num_samples))
            self._traced[key] = TracedStage(traced, num_gradients=len(graph.parameters))
        return self._traced[key]

    @cached_property
    def _context(self) -> StageContext:
        return self.prepared._costs.contexts(self.staged, self.prepared.num_samples)

    def update(self, parameters: Sequence[str]) -> UpdateCost:
        tensors = [self.prepared.tensors[name] for name in parameters]
        with explained():
            return self.prepared._costs.update(tensors, self.prepared.optimizer)

    def add_seconds(self, parameters: Sequence[str]) -> float:
        return self._call_seconds(torch.ops.aten.add_.Tensor, parameters)

    def copy_seconds(self, parameters: Sequence[str]) -> float:
        return self._call_seconds(torch.ops.aten.copy_.default, parameters)

    def _call_seconds(self, operator: Callable[..., Any], parameters: Sequence[str]) -> float:
        if not parameters:
            return 0.0
        with without_memory():
            tensors = [torch.empty_like(self.prepared.tensors[name]) for name in parameters]
        with self.prepared._costs.prices() as price:
            return sum(price.price(operator, (tensor, tensor), {})[0] for tensor in tensors)


def _values_of(staged: StagedStep, tensors: dict[str, torch.Tensor]) -> StageValues:
    gradients = {name: node.meta["val"] for name, node in staged.whole.gradients().items()}
    sizes = {name: value.nbytes for name, value in staged.whole.values.items()}
    state = (InputKind.PARAMETER, InputKind.BUFFER)
    return StageValues(
        num_samples=staged.whole.num_samples,
        fingerprint=staged.whole.fingerprint,
        tensors=tuple(
            tuple(given.name for given in staged.graph(stage).inputs if given.kind in state)
            for stage in range(len(staged.firsts))
        ),
        gradients=tuple(map(tuple, staged.assignment.gradients)),
        forward={
            pair: tuple(map(sizes.__getitem__, names))
            for pair, names in staged.carried.forward.items()
        },
        backward={
            pair: tuple(map(sizes.__getitem__, names))
            for pair, names in staged.carried.backward.items()
        },
        tensor_bytes={name: tensor.nbytes for name, tensor in tensors.items()},
        gradient_bytes={name: value.nbytes for name, value in gradients.items()},
        gradient_kinds={name: f"{value.dtype} {value.device}" for name, value in gradients.items()},
        drawing_bytes=drawing_bytes(staged.whole),
    )
