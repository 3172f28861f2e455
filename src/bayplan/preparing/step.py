"""`PreparedStep`: a training step in hand, from which every question about it is answered.

The model is built once, without memory. Each batch size is captured once and traced once, and each
operator is priced once; all of that is kept on the object, and steps that differ in batch size,
precision, optimizer or device share what they have in common. Planners see what they need of it
through protocols, so that they know nothing of torch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from bayplan.costing.cache import Prices
from bayplan.costing.catalogue import device_names, load_device
from bayplan.costing.loss_memory import loss_memory
from bayplan.costing.measure import profile_step
from bayplan.costing.operators import OperatorCosts
from bayplan.costing.pricing import (
    DerivedCosts,
    measured_prices,
    prices_by_name,
    scaled_prices,
    seconds_of_nodes,
    smaller_batches,
)
from bayplan.costing.probe import probe_device
from bayplan.costing.roofline import derive_profile
from bayplan.costing.scaling import same_operators, scale_profile
from bayplan.costing.step_memory import (
    outside_nodes,
    plain_peak_bytes,
    resident_bytes,
    update_bytes,
)
from bayplan.data.device import DeviceKind
from bayplan.data.errors import BayplanError, ForeignPlan, UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.live_memory import replay_memory
from bayplan.data.plan import Request
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.data.record import RunRecord
from bayplan.data.units import LimitCounts, Progress, no_progress
from bayplan.devices.device import GPU, HOST, ObjectBytes, device_named, device_of
from bayplan.devices.fake_gpu import FakeGpu, why_no_fake_gpu
from bayplan.devices.machine import cache_directory, num_threads
from bayplan.models.targets import Target, check_one_device
from bayplan.planning.memory.reserved import Counting
from bayplan.rewriting.updates import ParameterUpdates
from bayplan.simulating.memory import simulate_step
from bayplan.simulating.reserving import reserve_step
from bayplan.step import AUTOCASTS, OPTIMIZERS, TrainingStep, autocast_dtype
from bayplan.tracing.capture import capture_step
from bayplan.tracing.explain import explained
from bayplan.tracing.fake import (
    OptimizerSource,
    build_without_memory,
    optimizer_source,
    without_memory,
)
from bayplan.tracing.hooks import copied
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.stages.whole_trace import batch_tensors, resize_batch
from bayplan.tracing.traced_step import MemoryContext, Price, TracedStep

__all__ = ["PreparedStep", "replay"]

# A step of about this much arithmetic takes seconds on a few cores: long enough to measure well.
_MEASURED_FLOPS = 1.5e11
_MEASURED_REPEATS = 2
_ROOM_TO_MEASURE = 1.5  # times its peak; a step that needs more is derived and not run
OnGpu = Callable[[], AbstractContextManager[None]]


class _Shared:
    """What steps of one target have in common, whatever their batch size and precision."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._first: tuple[int | None, tuple[nn.Module, Any, Any]] | None = None
        self.graphs: dict[object, StepGraph] = {}
        self.measured: dict[str, Profile] = {}  # by the fingerprint of the graph
        self.prices: Prices = {}  # measured here and now, where those in the cache are not wanted
        self.steps: dict[object, PreparedStep] = {}

    def built(self, size: int | None, on_gpu: OnGpu) -> tuple[nn.Module, Any, Any]:
        """Model, batch and loss without memory; the target's builder is called once.

        A batch of another size is the first one resized, where its tensors agree on what their
        samples are; otherwise the builder is asked again.
        """
        if self._first is None:
            self._first = (size, self._build(size, on_gpu))
            return self._first[1]
        first_size, (model, batch, loss_fn) = self._first
        if size == first_size:
            return model, batch, loss_fn
        sizes = {tensor.shape[0] for tensor in batch_tensors(batch) if tensor.dim()}
        if len(sizes) != 1 or size is None:
            return self._build(size, on_gpu)
        with on_gpu(), without_memory():
            return model, resize_batch(batch, size), loss_fn

    def _build(self, size: int | None, on_gpu: OnGpu) -> tuple[nn.Module, Any, Any]:
        if self._target.is_given:
            return self._target.build(size)
        return build_without_memory(lambda: self._target.build(size), on_gpu)


@dataclass(eq=False, kw_only=True)
class PreparedStep:
    """A target with all that decides its step.

    Attributes:
        batch: the batch size; None for the target's own.
        optimizer: a key of `OPTIMIZERS`, an optimizer, or a function from parameters to one.
        autocast: a key of `AUTOCASTS`.
        device: the kind of device asked about; None for the device here.
        operators: the architecture of the GPU whose operators are captured; empty for those of the
            device that the model is on. By default that of the device asked about.
        update_in_backward: whether plans update each parameter as soon as its gradient is complete.
        clock: for pricing operators here.
        again: measures anew, and replaces what the cache has of the step and its operators.
        on_progress: hears what is being done.
    """

    target: Target
    batch: int | None = None
    optimizer: str | OptimizerSource = "adamw"
    autocast: str = "none"
    device: DeviceKind | None = None
    operators: str | None = None
    update_in_backward: bool = False
    clock: Clock = Clock.WALL
    again: bool = False
    on_progress: Progress = no_progress
    shared: _Shared = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        autocast_dtype(self.autocast)
        optimizer_source(self.optimizer)
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch is {self.batch}; a step needs at least 1 sample")
        if self.batch is not None and not self.target.takes_batch_size:
            raise UsageError(
                f"{self.target.name!r} takes no batch size, so --batch {self.batch} cannot reach"
                " it; give the function a parameter batch_size, or leave --batch out"
            )
        if self.update_in_backward and self.optimizer == "none":
            raise UsageError("updating in backward needs the optimizer; --optimizer is none")
        if self.shared is None:
            self.shared = _Shared(self.target)
            self.shared.steps[self._key] = self

    # Variants of the step. Each is made once.

    def at(self, batch: int) -> "PreparedStep":
        """The same step with another batch size."""
        return self.changed(batch=batch)

    def changed(self, **changes: Any) -> "PreparedStep":
        """The same step with another batch size, precision, optimizer or device."""
        values = {part.name: getattr(self, part.name) for part in fields(self)} | changes
        variant = PreparedStep(**values)
        return self.shared.steps.setdefault(variant._key, variant)

    @property
    def _key(self) -> tuple[object, ...]:
        device = None if self.device is None else self.device.name
        options = self.update_in_backward, self.operators
        return self.samples, self.optimizer, self.autocast, *options, device

    def larger_devices(self, memory_bytes: int) -> Iterator["PreparedStep"]:
        """The step on devices of the catalogue with at least this much memory, smallest first."""
        kinds = [load_device(name) for name in device_names()]
        for kind in sorted(kinds, key=lambda kind: kind.memory_bytes.value):
            if kind.usable_bytes >= memory_bytes:
                yield self.changed(device=kind)

    # What is known without building the model.

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def samples(self) -> int | None:
        """The batch size in force; None where the target keeps it to itself."""
        return self.batch if self.batch is not None else self.target.default_batch

    @property
    def takes_batch_size(self) -> bool:
        return self.target.takes_batch_size

    @property
    def is_here(self) -> bool:
        """Whether the step is asked about on this machine."""
        return self.device is None

    @property
    def _architecture(self) -> str | None:
        """Of the GPU that is captured for; None if no other device is asked about."""
        if self.operators is not None or self.device is None:
            return self.operators
        return self.device.architecture

    @property
    def _elsewhere(self) -> str:
        """The device that is not here, as messages call it."""
        return "the cluster's oldest device" if self.device is None else self.device.name

    @cached_property
    def gpu(self) -> FakeGpu | None:
        """The GPU whose operators are captured on fake tensors; None for the model's own device."""
        architecture = self._architecture
        if not architecture or why_no_fake_gpu():
            return None
        gpu = FakeGpu.of(architecture)
        if self.autocast == "bf16" and not gpu.has_bfloat16:
            raise UsageError(
                f"{self._elsewhere} ({architecture}) has no bfloat16 arithmetic, which begins with"
                " sm_80, so --autocast bf16 would only be slow there; use --autocast fp16"
            )
        return gpu

    @property
    def operators_note(self) -> str:
        """What to know of the operators that are captured for a device that is not here."""
        if self._architecture is None:
            return ""
        if not self._architecture:
            return (
                f"CPU operators stand in for those of {self._elsewhere}, whose file does not say"
                " its architecture; add a line such as `architecture: sm_90`"
            )
        if self.gpu is None:
            return f"CPU operators stand in for those of {self._elsewhere}: {why_no_fake_gpu()}"
        if not self.gpu.is_nvidia:
            return (
                f"{self._elsewhere} runs CUDA's operators through HIP; captured are those without"
                " cuDNN's attention, with cuDNN's others standing in for MIOpen's"
            )
        return ""

    @property
    def optimizer_name(self) -> str:
        if isinstance(self.optimizer, str):
            return self.optimizer
        kind = type(self.optimizer) if isinstance(self.optimizer, torch.optim.Optimizer) else None
        return (kind.__name__ if kind else getattr(self.optimizer, "__name__", "given")).lower()

    def optimizer_source(self) -> OptimizerSource:
        """The optimizer as the device would run it: on CUDA, torch updates all in one call."""
        source = optimizer_source(self.optimizer)
        by_word = isinstance(self.optimizer, str) and self.device is not None
        if by_word and source is not None:
            return partial(OPTIMIZERS[str(self.optimizer)], foreach=True)
        return source

    @property
    def request(self) -> Request | None:
        """How a plan's step can be built again; None for a module that was handed over."""
        if self.target.is_given or not isinstance(self.optimizer, str):
            return None
        return Request(
            target=self.target.name,
            batch=self.batch,
            optimizer=self.optimizer,
            autocast=self.autocast,
            update_in_backward=self.update_in_backward,
            operators=self.operators or "",
        )

    @property
    def torch_version(self) -> str:
        return str(torch.__version__)

    @property
    def device_name(self) -> str:
        """What a plan says it is for."""
        return self.device.name if self.device is not None else device_of(self.model_device).name

    # The step itself.

    @cached_property
    def step(self) -> TrainingStep:
        """The step on tensors without memory."""
        on_gpu = nullcontext if self.gpu is None else self.gpu.present
        samples = self.samples if self.takes_batch_size else None
        model, batch, loss_fn = self.shared.built(samples, on_gpu)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"no parameter of {self.target.name!r} requires a gradient, so there is nothing to"
                " train; check `requires_grad`"
            )
        if self.gpu is not None:
            check_one_device(model)
        return TrainingStep(
            model=model,
            batch=batch,
            loss_fn=loss_fn,
            autocast=AUTOCASTS[self.autocast],
            gpu=None if self.gpu is None else on_gpu,
        )

    def build(self) -> TrainingStep:
        """Build the model for real, where its builder puts it, ready to train."""
        with explained():
            model, batch, loss_fn = self.target.build(self.batch)
        source = self.optimizer_source()
        if source is not None and not isinstance(source, torch.optim.Optimizer):
            source = source(
                parameter for parameter in model.parameters() if parameter.requires_grad
            )
        return TrainingStep(
            model=model,
            batch=batch,
            loss_fn=loss_fn,
            optimizer=source,
            autocast=AUTOCASTS[self.autocast],
        )

    @property
    def model_device(self) -> torch.device:
        return next(self.step.model.parameters()).device

    @property
    def granularity_bytes(self) -> int:
        """The rounding of the device's allocator."""
        if self.device is not None:
            return self.device.allocation_granularity_bytes
        return device_of(self.model_device).granularity_bytes

    @property
    def _own_architecture(self) -> str:
        """Of the GPU that the step would run on."""
        asked = device_of(self.model_device) if self.device is None else self.device
        return asked.architecture

    def counting(self, counts: str | None) -> Counting:
        """Which bytes a limit is for: live, reserved or total; by default what would run out."""
        if self.device is None:
            can_reserve = device_of(self.model_device).has_known_allocator
            context_bytes = None
        else:
            can_reserve = self.granularity_bytes == GPU.granularity_bytes
            context_bytes = int(self.device.context_bytes.value)
        if counts is None:
            usual = LimitCounts.RESERVED if can_reserve else LimitCounts.LIVE
            return Counting(usual, architecture=self._own_architecture)
        asked = LimitCounts.parse(counts)
        if asked is not LimitCounts.LIVE and not can_reserve:
            raise UsageError(
                f"--limit-counts {asked}: what the allocator of {self.device_name} reserves is not"
                " predicted; a limit counts live bytes there"
            )
        return Counting(asked, context_bytes, self._own_architecture)

    @cached_property
    def plain_reserved_bytes(self) -> int:
        """What torch's caching allocator takes for plain steps, scratch memory left out."""
        no_workspace = [0] * len(self.graph.nodes)
        architecture = self._own_architecture
        return reserve_step(self.graph, no_workspace, architecture=architecture).reserved_bytes

    @cached_property
    def graph(self) -> StepGraph:
        """The whole step as captured, plain."""
        key = (self.samples, self.optimizer, self.autocast, self.is_here, self.gpu)
        if key not in self.shared.graphs:
            self.on_progress("capturing", 0, 1)
            self.shared.graphs[key] = capture_step(
                self.step, optimizer=self.optimizer_source(), name=self.target.name
            )
        return self.shared.graphs[key]

    # The plain step: its costs and its memory.

    def device_memory_bytes(self, profile: Profile) -> int:
        """What the device asked about has to give; that of the profile where none is named."""
        if self.device is not None:
            return self.device.usable_bytes
        here = device_named(profile.device)
        if here is None:
            raise UsageError(
                f"no {profile.device} is here to ask for its memory; give it with --memory"
            )
        return here.free_bytes

    @property
    def half_precision(self) -> str | None:
        """The mixed precision to offer: bf16 needs no loss scaling, old GPUs cannot compute it."""
        if self.device is not None:
            words = (("bfloat16", "bf16"), ("float16", "fp16"))
            return next((word for dtype, word in words if dtype in self.device.flops_per_s), None)
        return "bf16" if device_of(self.model_device).has_bf16 else "fp16"

    @property
    def peak_without_workspace(self) -> int:
        no_workspace = [0] * len(self.graph.nodes)
        live = replay_memory(self.graph, no_workspace, granularity_bytes=self.granularity_bytes)
        return live.peak_bytes

    @cached_property
    def profile(self) -> Profile:
        """What the plain step costs: derived for the device, or measured here.

        It is measured at the largest batch that is quick and surely fits here, and scaled to this
        one; a step that cannot run here even at its smallest is derived from a probe.
        """
        if self.device is not None:
            return derive_profile(self.graph, self.device)
        quick = self._quick
        needed_bytes = replay_memory(quick.graph, [0] * len(quick.graph.nodes)).peak_bytes
        if needed_bytes * _ROOM_TO_MEASURE > self._free_bytes_here:
            return derive_profile(self.graph, probe_device(device_of(self.model_device)))
        measured = self.shared.measured
        fingerprint = quick.graph.fingerprint
        if fingerprint not in measured:
            measured[fingerprint] = quick.measured_profile(repeats=_MEASURED_REPEATS)
        return scale_profile(measured[fingerprint], quick.graph, self.graph)

    @property
    def _free_bytes_here(self) -> int:
        """Of the device and of the host, on which a target's builder may begin."""
        return min(HOST.free_bytes, device_of(self.model_device).free_bytes)

    @cached_property
    def _quick(self) -> "PreparedStep":
        """The step at a batch that runs in seconds, and whose profile can be scaled to this one."""
        if self.samples is None or not self.takes_batch_size:
            return self
        flops = sum(node.flops for node in self.graph.nodes)
        samples = max(1, int(self.samples * _MEASURED_FLOPS / max(flops, 1)))
        while samples < self.samples:
            small = self.at(samples)
            try:
                if same_operators(small.graph, self.graph):
                    return small
            except BayplanError:  # too few samples, as for batch normalization of a single one
                pass
            samples *= 2
        return self

    def measured_profile(self, *, repeats: int, clock: Clock = Clock.WALL) -> Profile:
        """Run the step here, at this batch size; derived where it is asked about elsewhere."""
        if self.device is not None:
            return derive_profile(self.graph, self.device)
        # The CPU clock sees one thread. Values that no capture looks at may be wrong, like a class
        # too high, so errors of the run are explained as well.
        with num_threads(1) if clock is Clock.CPU else nullcontext(), explained():
            step = self.build()
            if self.target.is_given:  # a module of the user's stays as it is
                model, optimizer = copied((step.model, step.optimizer))
                step = replace(step, model=model, optimizer=optimizer)
            return profile_step(
                step,
                self.graph,
                repeats=repeats,
                clock=clock,
                again=self.again,
                on_progress=partial(self.on_progress, "running the step"),
            )

    def estimated_peak_bytes(self, measured: StepGraph, profile: Profile) -> int:
        """The peak, with workspaces scaled from a profile of another batch size where possible."""
        if profile.origin is Origin.DERIVED or not same_operators(self.graph, measured):
            return self.peak_without_workspace
        return self.simulated(scale_profile(profile, measured, self.graph)).peak_bytes

    def simulated(self, profile: Profile | None = None) -> RunRecord:
        """The plain step replayed with the costs of a profile."""
        return replay(self.graph, self.profile if profile is None else profile, self.device)

    def check_profile(self, profile: Profile) -> None:
        """Refuse a profile of another device than the one asked about."""
        asked = None if self.device is None else self.device.name
        if asked is None and profile.origin is Origin.DERIVED:
            raise ForeignPlan(
                f"the profile is derived for {profile.device}, which is not here; add --device"
                f" {profile.device}, or measure here with `bayplan profile`"
            )
        if asked is not None and profile.device != asked:
            raise ForeignPlan(
                f"the profile is of {profile.device}, --device asks about {asked}; leave one out"
            )

    @cached_property
    def plain_peak_bytes(self) -> int:
        """Of the step as it would run without a plan; here, with the scratch memory of kernels."""
        return plain_peak_bytes(
            self.step,
            self.graph,
            optimizer=self.optimizer_source(),
            granularity_bytes=self.granularity_bytes,
            record_bytes=self._object_bytes.record,
            cache=cache_directory() if self.is_here else None,
        )

    @property
    def _object_bytes(self) -> ObjectBytes:
        return device_of(self.model_device).object_bytes if self.is_here else ObjectBytes()

    # The step as planners see it.

    @cached_property
    def context(self) -> MemoryContext:
        """What counts in memory beside the traced graph."""
        granularity_bytes = self.granularity_bytes
        cache = cache_directory() if self.is_here else None
        return MemoryContext(
            prices=self._prices,
            resident_bytes=resident_bytes(self.graph, granularity_bytes=self.granularity_bytes)
            + self._object_bytes.step,
            objects=self._object_bytes,
            loss=loss_memory(self.step, granularity_bytes=granularity_bytes, cache=cache),
            update_bytes=update_bytes(self.graph, granularity_bytes=granularity_bytes),
            granularity_bytes=granularity_bytes,
            updates=self._updates(),
        )

    def _updates(self) -> ParameterUpdates | None:
        if not self.update_in_backward:
            return None
        source, model = self.optimizer_source(), self.step.model
        if source is not None and not isinstance(source, torch.optim.Optimizer):
            source = source(p for p in model.parameters() if p.requires_grad)
        return ParameterUpdates.of(model, source)

    @cached_property
    def traced(self) -> TracedStep:
        """The joint graph that plans are made for, with its packed variants as programs."""
        self.on_progress("tracing", 0, 1)
        return trace_step(self.step, self.context)

    def _prices(self, device: torch.device) -> AbstractContextManager[Price]:
        if self._derived is not None:
            return nullcontext(self._derived)
        here = self.prices_here(device)
        return here if self._smaller is None else scaled_prices(*self._smaller, otherwise=here)

    def prices_here(self, device: torch.device) -> AbstractContextManager[OperatorCosts]:
        """Prices by running operators on this machine, at this step's very sizes."""
        anew = self.shared.prices if self.again else None
        return measured_prices(device, cache=cache_directory(), clock=self.clock, anew=anew)

    @cached_property
    def _derived(self) -> DerivedCosts | None:
        """Prices for a device elsewhere, shared by all variants of the step."""
        return None if self.device is None else DerivedCosts(self.device)

    @cached_property
    def _smaller(self) -> tuple[Prices, Prices, float] | None:
        """Prices at two small batch sizes, for a step that takes too long to price as it is."""
        if self.samples is None or not self.takes_batch_size:
            return None
        batches = smaller_batches(sum(node.flops for node in self.graph.nodes), self.samples)
        if batches is None:
            return None
        small, large = batches
        share = (self.samples - small) / (large - small)
        return self.at(small)._operator_prices, self.at(large)._operator_prices, share

    @cached_property
    def _operator_prices(self) -> Prices:
        packed = self.traced.with_packs(tuple(pack.name for pack in self.traced.packs))
        return prices_by_name((*self.traced.with_packs().program.ops, *packed.program.ops))

    @cached_property
    def outside_seconds(self) -> float:
        """What loss and update take, which are the same with every plan."""
        nodes = outside_nodes(self.graph)
        if self.device is not None:
            profile = derive_profile(self.graph, self.device)
            return sum(profile.seconds[index] for index in nodes)
        with self.prices_here(self.model_device) as costs:
            return seconds_of_nodes(self.step, nodes, costs, optimizer=self.optimizer_source())


def replay(graph: StepGraph, profile: Profile, kind: DeviceKind | None) -> RunRecord:
    """A plain step replayed on a device: a described one, or that of the profile."""
    device = GPU if kind is not None else device_named(profile.device) or GPU
    granularity_bytes = device.granularity_bytes
    if kind is not None:
        granularity_bytes = kind.allocation_granularity_bytes
    missed = ("scratch memory of kernels",) if profile.method == "storages" else ()
    return simulate_step(
        graph,
        profile,
        granularity_bytes=granularity_bytes,
        record_bytes=device.object_bytes.record,
        not_counted=missed + device.not_counted,
        reserves=granularity_bytes == GPU.granularity_bytes,
        architecture=(kind or device).architecture,
        context_bytes=None if kind is None else int(kind.context_bytes.value),
    )
