"""`fit`: will this step fit, how fast will it be, and what would make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from bayplan.api import profile_step, simulate
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.data.units import format_bytes
from bayplan.data.verdict import Verdict
from bayplan.devices.machine import available_memory_bytes
from bayplan.planning.verdict import judge, largest_batch
from bayplan.profiling.catalogue import device_names, load_device
from bayplan.profiling.probe import probe_cpu
from bayplan.profiling.roofline import derive_profile
from bayplan.profiling.scaling import scale_profile
from bayplan.questions import Question
from bayplan.simulating.memory import replay_memory

__all__ = ["Progress", "fit", "profile_question"]

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many

# A step of about this much arithmetic takes seconds on a few cores: long enough to measure well.
_MEASURED_FLOPS = 1.5e11
_MEASURED_REPEATS = 2


def fit(
    question: Question,
    *,
    memory_bytes: int | None = None,
    profile: Profile | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> Verdict:
    """Answer a question.

    Args:
        question: the step and the device.
        memory_bytes: the limit; what the device has free by default.
        profile: measured before; otherwise the step runs here at a batch size small enough to be
            measured in seconds, or is derived for the question's device.
        on_progress: hears what is being done.
    """
    on_progress("capturing", 0, 1)
    graph = question.capture()
    on_progress("capturing", 1, 1)
    if profile is None:
        profile = _best_profile(question, graph, on_progress)
    record = simulate(graph, profile, device=question.device)
    limit_bytes = memory_bytes or _memory_bytes(question)
    changes: tuple[str, ...] = ()
    if record.peak_bytes > limit_bytes:
        changes = tuple(
            _changes(question, graph, profile, record.peak_bytes, limit_bytes, on_progress)
        )
    return judge(
        record,
        graph,
        limit_bytes=limit_bytes,
        batch=question.samples,
        optimizer=question.optimizer,
        time_origin=profile.origin,
        would_fit=changes,
    )


def profile_question(
    question: Question,
    graph: StepGraph,
    *,
    repeats: int,
    clock: Clock = Clock.WALL,
    use_cache: bool = True,
    on_progress: Progress,
) -> Profile:
    """Measure the question's step here, or derive it for its device."""
    if question.device is not None:
        return derive_profile(graph, question.device)
    return profile_step(
        question.build(),
        graph,
        repeats=repeats,
        clock=clock,
        use_cache=use_cache,
        on_progress=partial(on_progress, "running the step"),
    )


def _memory_bytes(question: Question) -> int:
    if question.device is not None:
        return int(question.device.memory_bytes.value - question.device.context_bytes.value)
    return available_memory_bytes(_device_here())


def _device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _best_profile(question: Question, graph: StepGraph, on_progress: Progress) -> Profile:
    """Measured at the largest batch that is quick and surely fits here, scaled to this one."""
    if question.device is not None:
        return derive_profile(graph, question.device)
    small = question
    if question.samples is not None:
        flops = sum(node.flops for node in graph.nodes)
        quick = int(question.samples * _MEASURED_FLOPS / max(flops, 1))
        small = question.at(max(1, min(question.samples, quick)))
    small_graph = graph if small.samples == question.samples else small.capture()
    needed_bytes = replay_memory(small_graph, [0] * len(small_graph.nodes)).peak_bytes
    if needed_bytes * 1.5 > available_memory_bytes(_device_here()):
        return derive_profile(graph, probe_cpu())  # cannot run here even at its smallest
    measured = profile_question(
        small, small_graph, repeats=_MEASURED_REPEATS, on_progress=on_progress
    )
    return scale_profile(measured, small_graph, graph)


def _changes(
    question: Question,
    graph: StepGraph,
    profile: Profile,
    peak_bytes: int,
    limit_bytes: int,
    on_progress: Progress,
) -> Iterator[str]:
    """Changes that would make it fit, each tried on a capture of its own, the smallest first."""
    num_tried = 0

    def peak_of(changed: Question) -> int:
        nonlocal num_tried
        num_tried += 1
        on_progress("looking for what would fit", num_tried, num_tried + 1)
        other = changed.capture()
        if profile.origin is Origin.DERIVED and question.device is not None:
            costs = derive_profile(other, question.device)
        elif [node.op for node in other.nodes] == [node.op for node in graph.nodes]:
            costs = scale_profile(profile, graph, other)
        else:  # other operators, as under autocast: their workspace here is not known
            return replay_memory(other, [0] * len(other.nodes)).peak_bytes
        return simulate(other, costs, device=question.device).peak_bytes

    if question.samples is not None and question.samples > 1:
        batch = largest_batch(
            lambda samples: peak_of(question.at(samples)),
            limit_bytes=limit_bytes,
            batch=question.samples,
            peak_bytes=peak_bytes,
        )
        if batch:
            yield f"--batch {batch}"
    if question.autocast == "none" and peak_of(replace(question, autocast="bf16")) <= limit_bytes:
        yield "--autocast bf16"
    if question.optimizer.startswith("adam"):
        lighter = replace(question, optimizer="sgd")
        if peak_of(lighter) <= limit_bytes:
            yield "--optimizer sgd"
    if question.device is not None:
        yield from _larger_devices(peak_bytes)
    yield f"--memory {_rounded_up(peak_bytes)}"


def _larger_devices(peak_bytes: int) -> Iterator[str]:
    """The smallest device of the catalogue that would hold it."""
    kinds = [load_device(name) for name in device_names()]
    enough = [
        kind for kind in kinds if kind.memory_bytes.value - kind.context_bytes.value >= peak_bytes
    ]
    if enough:
        smallest = min(enough, key=lambda kind: kind.memory_bytes.value)
        yield f"--device {smallest.name} ({format_bytes(smallest.memory_bytes.value)})"


def _rounded_up(size_bytes: int) -> str:
    """A limit to type that is no smaller than the size."""
    mebibytes = -(-size_bytes // 2**20)
    return f"{mebibytes}MiB"
