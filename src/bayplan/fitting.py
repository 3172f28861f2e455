"""`fit`: will this step fit, how fast will it be, and what would make it fit."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from bayplan.api import granularity_of, profile_step, simulate
from bayplan.capturing.explain import explained
from bayplan.data.device import DeviceKind
from bayplan.data.errors import BayplanError, CaptureError, DoesNotFit, ForeignPlan, UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.limit import Limit
from bayplan.data.plan import Choice
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.data.units import format_bytes
from bayplan.data.verdict import PlanSummary, Verdict
from bayplan.devices.machine import available_memory_bytes
from bayplan.planner import Planner
from bayplan.planning.verdict import judge, largest_batch
from bayplan.profiling.catalogue import device_names, load_device
from bayplan.profiling.probe import probe_cpu
from bayplan.profiling.roofline import derive_profile
from bayplan.profiling.scaling import same_operators, scale_profile
from bayplan.questions import Question
from bayplan.simulating.memory import replay_memory

__all__ = ["Progress", "fit", "profile_question"]

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many

# A step of about this much arithmetic takes seconds on a few cores: long enough to measure well.
_MEASURED_FLOPS = 1.5e11
_MEASURED_REPEATS = 2
_MAX_RETRIES = 4  # of a suggested batch; each may run the step


def fit(
    question: Question,
    *,
    memory_bytes: int | None = None,
    profile: Profile | None = None,
    planner: Planner | None = None,
    use_cache: bool = True,
    on_progress: Progress = lambda what, done, total: None,
) -> Verdict:
    """Answer a question.

    Args:
        question: the step and the device.
        memory_bytes: the limit; what the device has free by default.
        profile: measured before; otherwise the step runs here at a batch size small enough to be
            measured in seconds, or is derived for the question's device.
        planner: of the same question; looks for a plan where the plain step does not fit.
        use_cache: False measures anew, and replaces what the cache has of these steps.
        on_progress: hears what is being done.
    """
    if profile is not None:
        _check_device(profile, question)
    profiles = _Profiles(use_cache, on_progress)
    on_progress("capturing", 0, 1)
    graph = question.capture()
    on_progress("capturing", 1, 1)
    if profile is None:
        profile = profiles.best(question, graph)
    record = simulate(graph, profile, device=question.device)
    limit_bytes = memory_bytes or _memory_bytes(question, profile)
    changes: list[str] = []
    planned: PlanSummary | None = None
    smallest_bytes: int | None = None
    if record.peak_bytes > limit_bytes and planner is not None:
        planned, smallest_bytes = _planned(planner, limit_bytes)
    if record.peak_bytes > limit_bytes and planned is None:
        search = _Changes(question, graph, profile, profiles, limit_bytes, on_progress)
        changes += search.of_the_step(record.peak_bytes)
        if smallest_bytes is not None and memory_bytes is not None:
            changes.append(f"--memory {_rounded_up(smallest_bytes)} and a plan")
        changes += (
            [f"--memory {_rounded_up(record.peak_bytes)}"]
            if memory_bytes is not None
            else search.of_the_device(record.peak_bytes)
        )
    return judge(
        record,
        graph,
        limit_bytes=limit_bytes,
        batch=question.samples,
        optimizer=question.optimizer,
        time_origin=profile.origin,
        would_fit=tuple(changes),
        planned=planned,
    )


def _planned(planner: Planner, limit_bytes: int) -> tuple[PlanSummary | None, int | None]:
    """A plan within the limit; or None, and the smallest limit found that has one."""
    try:
        order = planner.order(Limit(size_bytes=limit_bytes))
    except DoesNotFit as refusal:
        return None, refusal.smallest_bytes
    except CaptureError:  # captured, but not traceable as one graph: then there is no plan
        return None, None
    chosen = Counter(one.choice for one in planner.plan(order).decisions)
    summary = PlanSummary(
        peak_bytes=order.peak_bytes,
        time_ratio=order.time_ratio,
        num_recomputed=chosen[Choice.RECOMPUTE],
        num_packed=chosen[Choice.PACK],
        num_swapped=chosen[Choice.SWAP],
    )
    return summary, None


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
    num_threads = torch.get_num_threads()
    if clock is Clock.CPU:
        torch.set_num_threads(1)  # that clock sees no other
    try:
        with explained():  # values that no capture looks at may be wrong, like a class too high
            return profile_step(
                question.build(),
                graph,
                repeats=repeats,
                clock=clock,
                use_cache=use_cache,
                on_progress=partial(on_progress, "running the step"),
            )
    finally:
        torch.set_num_threads(num_threads)


def _check_device(profile: Profile, question: Question) -> None:
    """Refuse a profile of another device than the one asked about."""
    asked = None if question.device is None else question.device.name
    if asked is None and profile.origin is Origin.DERIVED:
        raise ForeignPlan(
            f"the profile is derived for {profile.device}, which is not here; add --device"
            f" {profile.device}, or measure here with `bayplan profile`"
        )
    if asked is not None and profile.device != asked:
        raise ForeignPlan(
            f"the profile is of {profile.device}, --device asks about {asked}; leave one out"
        )


def _memory_bytes(question: Question, profile: Profile) -> int:
    """What the device asked about has to give; that of the profile where none is named."""
    if question.device is not None:
        return _usable_bytes(question.device)
    if profile.device == "cpu":
        return available_memory_bytes(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise UsageError(f"no {profile.device} is here to ask for its memory; say it with --memory")
    return available_memory_bytes(torch.device("cuda"))


def _half_precision(kind: DeviceKind | None, profile: Profile) -> str | None:
    """The mixed precision to offer: bf16 needs no loss scaling, but older GPUs cannot compute it.

    A processor takes bf16, slowly where it has no instructions for it.
    """
    if kind is not None:
        known = (("bfloat16", "bf16"), ("float16", "fp16"))
        return next((word for dtype, word in known if dtype in kind.flops_per_s), None)
    if profile.device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16"


def _usable_bytes(kind: DeviceKind) -> int:
    return int(kind.memory_bytes.value - kind.context_bytes.value)


def _free_bytes_here() -> int:
    """Of whichever device a target's builder may use."""
    names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return min(available_memory_bytes(torch.device(name)) for name in names)


class _Profiles:
    """What steps cost, for one answer: each is measured only once, also without the cache."""

    def __init__(self, use_cache: bool, on_progress: Progress) -> None:
        self._use_cache, self._on_progress = use_cache, on_progress
        self._measured: dict[str, Profile] = {}  # by the fingerprint of its graph

    def best(self, question: Question, graph: StepGraph) -> Profile:
        """Measured at the largest batch that is quick and surely fits here, scaled to this one."""
        if question.device is not None:
            return derive_profile(graph, question.device)
        small, small_graph = _quick(question, graph)
        needed_bytes = replay_memory(small_graph, [0] * len(small_graph.nodes)).peak_bytes
        if needed_bytes * 1.5 > _free_bytes_here():
            return derive_profile(graph, probe_cpu())  # cannot run here even at its smallest
        return scale_profile(self._measure(small, small_graph), small_graph, graph)

    def _measure(self, question: Question, graph: StepGraph) -> Profile:
        if graph.fingerprint not in self._measured:
            self._measured[graph.fingerprint] = profile_question(
                question,
                graph,
                repeats=_MEASURED_REPEATS,
                use_cache=self._use_cache,
                on_progress=self._on_progress,
            )
        return self._measured[graph.fingerprint]


def _quick(question: Question, graph: StepGraph) -> tuple[Question, StepGraph]:
    """The question at a batch that runs in seconds, and whose profile can be carried over."""
    if question.samples is None:
        return question, graph
    flops = sum(node.flops for node in graph.nodes)
    samples = max(1, int(question.samples * _MEASURED_FLOPS / max(flops, 1)))
    while samples < question.samples:
        small = question.at(samples)
        try:
            small_graph = small.capture()
        except BayplanError:  # too few samples, as for batch normalization of a single one
            small_graph = None
        if small_graph is not None and same_operators(small_graph, graph):
            return small, small_graph
        samples *= 2
    return question, graph


class _Changes:
    """The search for changes that would make a step fit, each tried before it is named."""

    def __init__(
        self,
        question: Question,
        graph: StepGraph,
        profile: Profile,
        profiles: _Profiles,
        limit_bytes: int,
        on_progress: Progress,
    ) -> None:
        self._question, self._graph = question, graph
        self._profile, self._profiles = profile, profiles
        self._limit_bytes, self._on_progress = limit_bytes, on_progress
        self._num_tried = 0

    def of_the_step(self, peak_bytes: int) -> Iterator[str]:
        """The largest batch, mixed precision, and a lighter optimizer."""
        question = self._question
        batch = self._largest_batch(peak_bytes)
        if batch:
            yield f"--batch {batch}"
        half = _half_precision(question.device, self._profile)
        if half and question.autocast == "none" and self._fits(replace(question, autocast=half)):
            yield f"--autocast {half}"
        if question.optimizer.startswith("adam") and self._fits(replace(question, optimizer="sgd")):
            yield "--optimizer sgd"

    def of_the_device(self, peak_bytes: int) -> Iterator[str]:
        """The smallest device of the catalogue that would hold it."""
        if self._question.device is None:
            yield f"a machine with {format_bytes(peak_bytes)} free"
            return
        kinds = [load_device(name) for name in device_names()]
        for kind in sorted(kinds, key=lambda kind: kind.memory_bytes.value):
            larger = replace(self._question, device=kind)
            limit_bytes = _usable_bytes(kind)
            if limit_bytes >= peak_bytes and self._fits(larger, limit_bytes):
                yield f"--device {kind.name}"
                return

    def _largest_batch(self, peak_bytes: int) -> int:
        """Found by scaling the profile, which is quick, and then held against one of its own."""
        samples = self._question.samples
        if samples is None:
            return 0
        batch = largest_batch(
            lambda size: self._estimate(self._question.at(size)),
            limit_bytes=self._limit_bytes,
            batch=samples,
            peak_bytes=peak_bytes,
        )
        for _ in range(_MAX_RETRIES):
            if not batch or self._fits(self._question.at(batch)):
                return batch
            batch -= max(1, batch // 16)  # scaled workspace is off by a little, never by much
        return 0

    def _estimate(self, changed: Question) -> int | None:
        graph = self._capture(changed)
        if graph is None:
            return None
        if self._profile.origin is Origin.DERIVED or not same_operators(graph, self._graph):
            return self._peak_without_workspace(graph)
        costs = scale_profile(self._profile, self._graph, graph)
        return simulate(graph, costs, device=changed.device).peak_bytes

    def _fits(self, changed: Question, limit_bytes: int | None = None) -> bool:
        """Whether `fit` will say so when asked; the profile it makes for that is kept for then."""
        limit_bytes = limit_bytes or self._limit_bytes
        graph = self._capture(changed)
        if graph is None or self._peak_without_workspace(graph) > limit_bytes:
            return False
        try:
            costs = self._profiles.best(changed, graph)
        except BayplanError:  # captured, but a kernel refuses it: a dtype it does not know
            return False
        return simulate(graph, costs, device=changed.device).peak_bytes <= limit_bytes

    def _capture(self, changed: Question) -> StepGraph | None:
        self._num_tried += 1
        self._on_progress("looking for what would fit", self._num_tried, self._num_tried + 1)
        try:
            return changed.capture()
        except BayplanError:  # some models take only some batch sizes, or no mixed precision
            return None

    def _peak_without_workspace(self, graph: StepGraph) -> int:
        kind = self._question.device
        granularity_bytes = (
            granularity_of("cpu") if kind is None else kind.allocation_granularity_bytes
        )
        no_workspace = [0] * len(graph.nodes)
        return replay_memory(graph, no_workspace, granularity_bytes=granularity_bytes).peak_bytes


def _rounded_up(size_bytes: int) -> str:
    """A limit to type that is no smaller than the size."""
    return f"{-(-size_bytes // 2**20)}MiB"
