"""The verbs, joined: what `import bayplan` offers and what the command line calls."""

import copy
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import nn

from bayplan.capturing.fake import OptimizerSource
from bayplan.capturing.step import capture_step, follow_step
from bayplan.data.device import DeviceKind
from bayplan.data.errors import UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Profile
from bayplan.data.record import RunRecord
from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import open_meter
from bayplan.profiling.cache import cached_profile
from bayplan.profiling.catalogue import load_device
from bayplan.profiling.measure import measure_profile
from bayplan.profiling.roofline import derive_profile
from bayplan.profiling.scaling import scale_profile
from bayplan.profiling.workspaces import WorkspaceWatch, nodes_that_may_set_the_peak
from bayplan.running.recorder import Recorder
from bayplan.simulating.step import CPU_GRANULARITY_BYTES, simulate_step
from bayplan.training import Batch, LossFunction, TrainingStep

__all__ = ["capture", "profile", "profile_step", "record", "scale", "simulate"]

CUDA_GRANULARITY_BYTES = 512
NOT_COUNTED_ON_CUDA = (
    "the CUDA context",
    "fragmentation and blocks the caching allocator keeps",
    "cuDNN and cuBLAS workspaces",
)
NOT_COUNTED_ON_CPU = ("Python, torch and their libraries", "memory the allocator keeps for reuse")


def capture(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    optimizer: OptimizerSource = None,
    autocast: torch.dtype | None = None,
    name: str = "",
) -> StepGraph:
    """Return the graph of one training step; nothing is allocated and nothing is changed.

    Args:
        model: any module; real, on the meta device, or made under a fake mode.
        batch: with a loss of two arguments the pair `(inputs, targets)`, otherwise all of it goes
            to the model. Inputs are a tensor, a tuple of positional or a dict of keyword arguments.
        loss_fn: of `(output, targets)` or of the output alone; None if the output is the loss or
            has it as `.loss`, as transformers models do.
        optimizer: one that holds the model's parameters, or a function from parameters to one
            (`torch.optim.AdamW`); None leaves the update out.
        autocast: dtype of mixed precision for the forward.
        name: what to call the model; its class by default.

    Example:
        >>> import torch
        >>> graph = capture(torch.nn.Linear(3, 2), torch.ones(4, 3), lambda y: y.sum())
        >>> graph.num_parameters
        8
    """
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, autocast=autocast)
    return capture_step(step, optimizer=optimizer, name=name)


def profile(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    optimizer: OptimizerSource = None,
    autocast: torch.dtype | None = None,
    name: str = "",
    repeats: int = 5,
    clock: Clock | str = Clock.WALL,
    use_cache: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure seconds and workspace of each node by running the step on the device it is on.

    A copy of the model is trained for `2 * repeats + 1` steps; yours stays as it is. A profile made
    before of the same step on the same machine is taken from the cache (`BAYPLAN_CACHE`). What
    `torch.compile` made runs as it was written, as it does in a capture.

    Args:
        model: as for `capture`, on the device to measure.
        batch: as for `capture`.
        loss_fn: as for `capture`.
        optimizer: as for `capture`.
        autocast: as for `capture`.
        name: as for `capture`.
        repeats: steps to time, plain and watched, each.
        clock: `wall`, or `cpu` for the processor time of one thread, which ignores neighbours.
        use_cache: False measures anew, and replaces what the cache has of this step.
        on_progress: hears of each step done, and of how many.
    """
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; at least 1 step must run to be measured")
    clock = Clock.parse(clock)
    _device_of(model)  # a model that cannot be measured is refused before it is captured
    graph = capture(model, batch, loss_fn, optimizer=optimizer, autocast=autocast, name=name)
    # One deepcopy of both, so that the optimizer's copy holds the parameters of the model's.
    is_built = isinstance(optimizer, torch.optim.Optimizer)
    model, built = copy.deepcopy((model, optimizer if is_built else None))
    if optimizer is not None and built is None:
        assert callable(optimizer), "an optimizer is one, or makes one"
        built = optimizer(p for p in model.parameters() if p.requires_grad)
    step = TrainingStep(
        model=model, batch=batch, loss_fn=loss_fn, optimizer=built, autocast=autocast
    )
    return profile_step(
        step,
        graph,
        repeats=repeats,
        clock=clock,
        use_cache=use_cache,
        on_progress=on_progress,
    )


def profile_step(
    step: TrainingStep,
    graph: StepGraph,
    *,
    repeats: int,
    clock: Clock,
    use_cache: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure a step that may be trained on; random numbers go on as if nothing had run."""
    device, cache = _device_of(step.model), cache_directory()
    if clock is Clock.CPU and torch.get_num_threads() != 1:
        raise UsageError(
            f"the cpu clock sees one thread, but torch uses {torch.get_num_threads()};"
            " call torch.set_num_threads(1) first, or use the wall clock"
        )

    with open_meter(device, cache) as meter:

        def measure() -> Profile:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                return measure_profile(
                    step,
                    graph,
                    meter=meter,
                    device=device,
                    repeats=repeats,
                    clock=clock,
                    granularity_bytes=granularity_of(device.type),
                    on_progress=on_progress,
                )

        return cached_profile(
            cache,
            graph,
            device=device,
            repeats=repeats,
            clock=clock,
            method=meter.method,
            measure=measure,
            renew=not use_cache,
        )


def _device_of(model: nn.Module) -> torch.device:
    """Where a model is, and so is measured."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise UsageError(
            f"{type(model).__name__} has no parameters, so no parameter requires a gradient and"
            " there is nothing to train; give the module that holds them"
        )
    return parameter.device


def scale(
    profile: Profile,
    measured: StepGraph,
    wanted: StepGraph,
    *,
    step: TrainingStep | None = None,
    optimizer: OptimizerSource = None,
) -> Profile:
    """Carry the profile of one batch size over to another batch size of the same model.

    Args:
        profile: of `measured`.
        measured: the step that was profiled.
        wanted: the same model's step at another batch size.
        step: what `wanted` was captured from. With it, operators whose scratch memory could decide
            the peak are run once, each alone; without it their scratch memory is scaled as well.
        optimizer: as for `capture`; that of the step by default.
    """
    scaled = scale_profile(profile, measured, wanted)
    if step is None or measured.fingerprint == wanted.fingerprint:
        return scaled
    device = _device_of(step.model)
    granularity_bytes = granularity_of(device.type)
    nodes = nodes_that_may_set_the_peak(
        wanted, scaled.workspace_bytes, granularity_bytes=granularity_bytes
    )
    with open_meter(device, cache_directory()) as meter:
        watch = WorkspaceWatch(wanted, nodes, meter=meter, granularity_bytes=granularity_bytes)
        follow_step(step, optimizer=optimizer or step.optimizer, watcher=watch)
    sizes = [watch.found.get(index, size) for index, size in enumerate(scaled.workspace_bytes)]
    return msgspec.structs.replace(scaled, workspace_bytes=tuple(sizes))


def simulate(
    graph: StepGraph,
    profile: Profile | None = None,
    *,
    device: str | DeviceKind | None = None,
) -> RunRecord:
    """Replay a step: memory over time by kind, its peak, and the step's seconds.

    Args:
        graph: the step.
        profile: what its nodes cost; derived for the device if there is none.
        device: a device of the catalogue (`h100`), a device file or a `DeviceKind`; without one,
            the device that the profile is of. A profile of another device is refused.

    Example:
        >>> import torch
        >>> graph = capture(torch.nn.Linear(256, 256), torch.ones(64, 256), lambda y: y.sum())
        >>> simulate(graph, device="h100").peak_bytes > 256 * 256 * 4
        True
    """
    if device is not None:
        kind = load_device(device) if isinstance(device, str) else device
        if profile is not None and profile.device != kind.name:
            raise UsageError(
                f"the profile is of {profile.device}, the device asked about is {kind.name}; leave"
                " one of them out: without a profile its times are derived"
            )
        return simulate_step(
            graph,
            derive_profile(graph, kind) if profile is None else profile,
            granularity_bytes=kind.allocation_granularity_bytes,
            not_counted=NOT_COUNTED_ON_CUDA,
        )
    if profile is None:
        raise UsageError("simulate needs a profile, or a device to derive one for, like 'h100'")
    is_cpu = profile.device == "cpu"
    return simulate_step(
        graph,
        profile,
        granularity_bytes=granularity_of("cpu" if is_cpu else "cuda"),
        not_counted=NOT_COUNTED_ON_CPU if is_cpu else NOT_COUNTED_ON_CUDA,
    )


def record(
    path: Path | str | None = None,
    *,
    device: torch.device | str | None = None,
    curve: bool = False,
    clock: Clock | str = Clock.WALL,
) -> Recorder:
    """Measure an existing training loop: `with bayplan.record("run.json"): ...`.

    Args:
        path: where the record is written when the block is left, also by Ctrl-C; None for nowhere.
        device: whose memory; the first CUDA device if there is one, else the CPU.
        curve: also record live bytes over time (CPU only), at a higher cost.
        clock: of the step times; `cpu` is the processor time of the whole process.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1000))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with record() as recording:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         weight.square().sum().backward()
        ...         optimizer.step()
        >>> len(recording.result.step_seconds)
        3
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Recorder(
        path,
        cache=cache_directory(),
        device=torch.device(device),
        curve=curve,
        clock=Clock.parse(clock),
    )


def granularity_of(device_type: str) -> int:
    """The rounding of a device's allocator, in bytes."""
    return CPU_GRANULARITY_BYTES if device_type == "cpu" else CUDA_GRANULARITY_BYTES
