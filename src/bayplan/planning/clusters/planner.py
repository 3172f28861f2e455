"""The planner of clusters: candidates from the cost model, the verdict from the simulation.

Candidates are the best splits of an exact dynamic programme. On up to 32 devices the splits of
PipeDream's optimizer, passed in every way, are simulated beside them, and the fastest of all is
changed a little for as long as that helps; on more devices that would take too long.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from bayplan.data.cluster import Cluster
from bayplan.data.errors import BayplanError, DoesNotFit, UsageError, did_you_mean
from bayplan.data.judgement import Judgement
from bayplan.data.units import format_bytes, format_seconds
from bayplan.planning.clusters.candidates import Estimate, Search, in_columns
from bayplan.planning.clusters.cluster_costs import Chains, ClusterCosts, Memory
from bayplan.planning.clusters.judging import judge, simulated_work, with_interval
from bayplan.planning.clusters.layout import layout_of
from bayplan.planning.clusters.memory import BACKWARD_FIRST, StageSizes, needed_parts
from bayplan.planning.clusters.refining import (
    DATA_PARALLEL,
    EVEN_PIPELINE,
    data_parallel,
    even_pipeline,
    neighbours,
    passings,
    smallest_that_fits,
)
from bayplan.planning.clusters.split import DeviceMemory, Split, Training
from bayplan.planning.clusters.stage_tables import Passing
from bayplan.planning.partitioners.machines import MachineLevel, Machines, machines_of
from bayplan.planning.partitioners.registry import find_partitioner
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import Network

__all__ = ["AUTO", "Candidate", "ClusterPlan", "memory_of", "plan_cluster", "plan_on"]

AUTO = "auto"  # our own search
PLAN = "plan"
_CLOSE_ENOUGH = 1.01  # of the smallest memory that is looked for
_MIB = 2**20

# Work is counted in micro-batches on devices, of which about ten are simulated in a millisecond.
_MOST_WORK = 25_000  # of all candidates of the dynamic programme together
_LEAST_JUDGED = 2
_AS_FAST = 0.001  # by which part of its time one may be slower and still be chosen
_MOST_BY_STAGES = 6  # numbers of stages that get an alternative of their own

# Up to so many devices reference partitioners' splits and small changes are simulated as well, and
# long chains are searched with fewer places to cut: layers times devices.
_MOST_COMPARED = 32
_MOST_SEARCHED = 384
_LEAST_LAYERS = 16
_REFERENCES = ("pipedream", "pipedream-no-transfer")
_QUICK_WORK = 600
_LEAST_WAYS = 3
_FAR = 1.5  # more micro-batches were seen to make a pipeline a third faster, not more
_MOST_CHANGES = 16
_LEAST_CHANGES = 4
_CHANGE_WORK = 5000
_PARTITIONED_COUNTS = (1, 2, 4, 8, 16, 32)  # micro-batches that a named partitioner's split gets


def _refusal(search: Search) -> DoesNotFit:
    """Why nothing was found, and the smallest change that helps."""
    kind, chain = next(iter(search.cluster.chains.items()))
    memory, training = search.cluster.memory[kind], search.cluster.training
    needs = [
        needed_parts(
            StageSizes.of(chain, layer, layer, 1),
            training,
            in_flight=1,
            is_recomputed=search.may_recompute,
        )
        for layer in range(len(chain.layers))
    ]
    kept = [parts.weights + parts.gradients + parts.state for parts in needs]
    largest = max(range(len(needs)), key=lambda layer: needs[layer].total)
    alone_bytes = int(needs[largest].total * (1 + training.allocator_slack)) + 1
    room = f"{format_bytes(memory.usable_bytes)} are usable of {format_bytes(memory.total_bytes)}"
    if alone_bytes > memory.usable_bytes:
        smallest = alone_bytes + memory.context_bytes
        return DoesNotFit(
            f"nothing fits: layer {chain.layers[largest].name} alone needs"
            f" {format_bytes(alone_bytes)} with one sample ({format_bytes(kept[largest])} of it"
            f" weights, gradients and optimizer state), {room}. Fits with devices of"
            f" {format_bytes(smallest)}, or with the layer cut in two",
            smallest_bytes=smallest,
        )
    smallest = _smallest_memory(search, alone_bytes, memory.context_bytes)
    number = search.num_devices
    text = (
        f"nothing fits on {number} device{'s' * (number > 1)}: weights, gradients and optimizer"
        f" state take {format_bytes(sum(map(int, kept)))} in all, and {room} on each."
    )
    if smallest is None:
        return DoesNotFit(f"{text} Try a smaller batch than {search.num_samples}")
    more = -(-number * (smallest - memory.context_bytes) // max(1, memory.usable_bytes))
    return DoesNotFit(
        f"{text} Fits with devices of {format_bytes(smallest)}, or with about"
        f" {max(number + 1, int(more))} of these",
        smallest_bytes=smallest,
    )


def _smallest_memory(search: Search, least_bytes: int, context_bytes: int) -> int | None:
    """About the smallest device memory with which something fits; None if nothing does."""

    def has_any(usable: int) -> bool:
        memory = DeviceMemory(total_bytes=usable + context_bytes, context_bytes=context_bytes)
        by_kind = dict.fromkeys(search.cluster.memory, memory)
        trial = replace(search, cluster=replace(search.cluster, memory=by_kind))
        return any(
            trial.partitioner(unit, trial.counts[0], Passing.ONE_F_ONE_B).has_any()
            for unit in trial.units
            if trial.num_samples // trial.counts[0] >= unit
        )

    low, high = least_bytes, max(2 * least_bytes, _MIB)
    while not has_any(high):
        low, high = high, 2 * high
        if high > 2**50:
            return None
    while high > low * _CLOSE_ENOUGH:
        middle = (low + high) // 2
        low, high = (low, middle) if has_any(middle) else (middle, high)
    return high + context_bytes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A split that was simulated, or that does not fit.

    Attributes:
        name: what it is, in a few words.
        estimate_seconds: its time in the cost model of the dynamic programme; None if that did
            not make it.
    """

    name: str
    split: Split
    judgement: Judgement
    estimate_seconds: float | None = None

    @property
    def is_possible(self) -> bool:
        return self.judgement.fits


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The best split, and what else there is.

    Attributes:
        best: of all that fits, the one whose simulated batches are the fastest; or the split of
            the partitioner that was asked for.
        alternatives: others, the fastest first; then those that do not fit.
    """

    best: Candidate
    alternatives: tuple[Candidate, ...]

    def named(self, name: str) -> Candidate | None:
        everyone = (self.best, *self.alternatives)
        return next((candidate for candidate in everyone if candidate.name == name), None)


def plan_cluster(
    chains: Chains,
    network: Network,
    num_samples: int,
    *,
    num_devices: int,
    kinds: Sequence[str] = (),
    memory: Memory = None,
    training: Training | None = None,
    staleness: int = 0,
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    micro_batches: Sequence[int] = (),
    may_recompute: bool = True,
    num_judged: int = 8,
    tolerance: float = 0.005,
    partitioner: str = AUTO,
) -> ClusterPlan:
    """Find the fastest split that fits.

    Args:
        chains: the model on the one kind of device there is, or by kind.
        network: between devices, which are numbered from 0.
        num_samples: of a batch.
        num_devices: that may be used.
        kinds: by device, the name of its kind; needed where there are several.
        memory: of a device, or by kind; None if it is no concern.
        training: how weights are trained.
        staleness: batches that backward may be behind forward; 0 for numbers as on one device.
        schedules: that may be chosen, of `1f1b` and `gpipe`.
        micro_batches: numbers of them that may be chosen; empty for any.
        may_recompute: whether a stage may keep only its input and repeat its forward.
        num_judged: candidates of the cost model that are simulated.
        tolerance: by what part the cost model's best may be missed.
        partitioner: whose split is planned: `auto` for ours, or a name of `PARTITIONERS`. Then
            ours is the first alternative.

    Raises:
        DoesNotFit: if nothing fits, or not the split that was asked for; tells what binds, and
            what would help.
        UsageError: for figures that make no sense, and a partitioner that is not known or cannot
            be told of this cluster.
    """
    _check(num_samples, num_devices, kinds, staleness, schedules, micro_batches)
    if partitioner != AUTO:
        find_partitioner(partitioner)  # an unknown name is refused before anything is searched
    cluster = ClusterCosts.of(chains, network, kinds=kinds, memory=memory, training=training)
    search = Search(
        cluster=cluster,
        layout=layout_of(network, num_devices, kinds=cluster.kinds),
        num_samples=num_samples,
        staleness=staleness,
        passings=tuple(Passing(name) for name in schedules),
        micro_batches=micro_batches,
        may_recompute=may_recompute,
        tolerance=tolerance,
    )
    return _Planning(search, num_judged).plan(partitioner)


def plan_on(
    chains: Chains, cluster: Cluster, num_samples: int, *, memory: Memory = None, **options: object
) -> ClusterPlan:
    """`plan_cluster` with a cluster's network, kinds and, unless it is given, memory."""
    return plan_cluster(
        chains,
        ClusterNetwork(cluster),
        num_samples,
        num_devices=len(cluster.devices),
        kinds=tuple(device.kind for device in cluster.devices),
        memory=memory_of(cluster) if memory is None else memory,
        **options,  # type: ignore[arg-type]
    )


def memory_of(cluster: Cluster) -> dict[str, DeviceMemory]:
    return {
        name: DeviceMemory(
            total_bytes=int(kind.memory_bytes.value), context_bytes=int(kind.context_bytes.value)
        )
        for name, kind in cluster.kinds.items()
    }


@dataclass(frozen=True)
class _Planning:
    search: Search
    num_judged: int
    _judged: dict[Split, Judgement] = field(default_factory=dict)

    def plan(self, partitioner: str) -> ClusterPlan:
        possible = self._searched()
        references = list(self._references())
        if self._is_small:
            references += self._of_partitioners(min(map(_seconds, possible)))
        possible += [candidate for candidate in references if candidate.is_possible]
        if self._is_small:
            possible += self._changed(_best(possible))
        best = _best(possible)
        ranked = sorted((each for each in possible if each is not best), key=_seconds)
        refused = [candidate for candidate in references if not candidate.is_possible]
        others = (*_distinct(ranked, best), *refused)
        if partitioner == AUTO:
            return ClusterPlan(best=self._with_interval(best, PLAN), alternatives=others)
        asked = self._asked(partitioner, best)
        return ClusterPlan(
            best=self._with_interval(asked, partitioner),
            alternatives=(replace(best, name=AUTO), *others),
        )

    @property
    def _is_small(self) -> bool:
        return self.search.num_devices <= _MOST_COMPARED

    def _searched(self) -> list[Candidate]:
        """What the dynamic programme finds, simulated."""
        search, most = self.search, max(_LEAST_LAYERS, _MOST_SEARCHED // self.search.num_devices)
        if self._is_small and search.cluster.num_layers > most:
            search = search.coarser(most)
        estimates = search.estimates()
        if not estimates and search is not self.search:
            search = self.search  # merged layers may be too large where single ones fit
            estimates = search.estimates()
        if not estimates:
            raise _refusal(self.search)
        judged = list(self._afforded(self._chosen(estimates), _LEAST_JUDGED, _MOST_WORK))
        judged += [moved for candidate in judged[:2] for moved in self._columns(candidate)]
        known = {_devices(candidate.split) for candidate in judged}
        others = (
            estimate
            for estimate in _by_stages(search, estimates)
            if _devices(estimate.split) not in known
        )
        judged += self._afforded(others, 0, _MOST_WORK / 2)
        return [candidate for candidate in judged if candidate.is_possible]

    def _chosen(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """The fastest in the cost model, not too many of one kind."""
        chosen: list[Estimate] = []
        seen: Counter[tuple[int, str]] = Counter()
        for estimate in estimates:
            kind = (len(estimate.split.stages), estimate.split.schedule)
            if seen[kind] < max(1, self.num_judged // 3):
                seen[kind] += 1
                chosen.append(estimate)
        return chosen[: self.num_judged]

    def _afforded(
        self, estimates: Iterable[Estimate], least: int, most_work: float
    ) -> Iterator[Candidate]:
        """Simulations of as many as can be had for some work, but of some in any case."""
        work = 0.0
        for number, estimate in enumerate(estimates):
            work += simulated_work(estimate.split)
            if number >= least and work > most_work:
                return
            yield self._candidate(estimate.split, estimate_seconds=estimate.seconds)

    def _columns(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same with stages close together, where devices are alike."""
        moved = None if self.search.cluster.kinds else in_columns(candidate.split)
        if moved is not None and simulated_work(candidate.split) < _MOST_WORK / 4:
            seconds = candidate.judgement.seconds
            yield self._candidate(moved, "stages close together", estimate_seconds=seconds)

    def _references(self) -> Iterator[Candidate]:
        """What every plan is compared with; maybe it does not fit."""
        search, cluster, row = self.search, self.search.cluster, self.search.layout.order
        for make_split in (data_parallel, even_pipeline):
            split = make_split(cluster.any_chain, row, search.num_samples)
            if split is None:
                continue
            split = cluster.with_shares(split)
            if search.micro_batches:
                split = replace(split, num_micro_batches=min(search.micro_batches))
            least = smallest_that_fits(
                split, search.counts, cluster.fits, may_recompute=search.may_recompute
            )
            yield self._candidate(least, split.partitioner)

    def _of_partitioners(self, to_beat: float) -> Iterator[Candidate]:
        """The splits of others, passed in the fastest way that fits, if any does.

        Ways that take long to simulate are left out where the quick ones are far from `to_beat`.
        """
        search = self.search
        for name in _REFERENCES:
            try:
                split = self._partitioned(name)
            except BayplanError:
                continue  # it knows no way, which is no reason against ours
            ways = passings(split, staleness=search.staleness, micro_batches=search.micro_batches)
            tried: list[Candidate] = []
            for way in sorted(ways, key=simulated_work):
                is_long = simulated_work(way) > _QUICK_WORK and len(tried) >= _LEAST_WAYS
                fastest = min((candidate.judgement.seconds for candidate in tried), default=inf)
                if is_long and fastest > _FAR * to_beat:
                    break
                tried.append(self._candidate(way, name))
            fitting = [candidate for candidate in tried if candidate.is_possible]
            if fitting:
                yield _best(fitting)

    def _partitioned(self, name: str) -> Split:
        """What a partitioner finds; shares of the batch by the speed of devices."""
        cluster, num_samples = self.search.cluster, self.search.num_samples
        partition = find_partitioner(name)
        return cluster.with_shares(
            partition(cluster.any_chain, self._machines(name), num_samples=num_samples)
        )

    def _machines(self, name: str) -> Machines:
        """The cluster as partitioners see it.

        Only PipeDream looks at more than the order of devices, and refuses uneven groups.
        """
        network, row = self.search.cluster.network, self.search.layout.order
        levels = getattr(network, "levels", tuple)()
        try:
            if levels:
                return machines_of(levels)
        except UsageError:
            if name == "straight" or name.startswith("pipedream"):
                raise
        seconds = network.message(row[0], row[-1], _MIB).alone_seconds
        bandwidth = _MIB / seconds if seconds else float(_MIB)
        return Machines((MachineLevel(count=len(row), bandwidth_bytes_per_s=bandwidth),), row)

    def _asked(self, name: str, ours: Candidate) -> Candidate:
        """The split of a partitioner that was asked for, passed in the fastest way that fits."""
        search, split = self.search, self._partitioned(name)
        counts = search.micro_batches or _PARTITIONED_COUNTS
        # Ranks cannot run an old batch's backward first.
        ways = [
            way
            for way in passings(split, staleness=search.staleness, micro_batches=counts)
            if way.schedule != BACKWARD_FIRST
        ]
        if not ways:
            raise UsageError(
                f"{name} has a stage on {max(split.replicas)} devices, more than the samples of a"
                f" micro-batch of {search.num_samples}; give a larger batch, or fewer micro-batches"
            )
        if search.may_recompute and not any(map(search.cluster.fits, ways)):
            ways = [replace(way, recomputed=(True,) * len(way.stages)) for way in ways]
        ways = [way for way in ways if search.cluster.fits(way)] or ways[-1:]
        estimates = (Estimate(way, 0.0) for way in sorted(ways, key=simulated_work))
        tried = list(self._afforded(estimates, _LEAST_JUDGED, _MOST_WORK))
        best = replace(min(tried, key=_seconds), estimate_seconds=None)
        if not best.is_possible:
            index = best.judgement.binding_stage
            need = best.judgement.stages[index].memory
            raise DoesNotFit(
                f"the split of {name} does not fit: stage {index} needs"
                f" {format_bytes(need.total_bytes)}, a device has"
                f" {format_bytes(need.device_bytes)}. Partitioner auto fits and takes"
                f" {format_seconds(ours.judgement.seconds)} for a batch",
                smallest_bytes=need.total_bytes,
            )
        return best

    def _changed(self, best: Candidate) -> list[Candidate]:
        """Neighbours of the best split that are faster than all before them."""
        faster: list[Candidate] = []
        left = min(
            _MOST_CHANGES, max(_LEAST_CHANGES, _CHANGE_WORK // max(1, simulated_work(best.split)))
        )
        while True:
            splits = list(neighbours(best.split, micro_batches=self.search.micro_batches))[:left]
            left -= len(splits)
            fastest = min(map(self._candidate, splits), key=_seconds, default=best)
            if _seconds(fastest) >= _seconds(best):
                return faster
            best = fastest
            faster.append(best)

    def _candidate(
        self, split: Split, name: str = "", *, estimate_seconds: float | None = None
    ) -> Candidate:
        recomputed = split.recomputed if any(split.recomputed) else ()
        key = replace(split, partitioner="", recomputed=recomputed)
        if key not in self._judged:
            self._judged[key] = judge(self.search.cluster, split)
        return Candidate(
            name=name, split=split, judgement=self._judged[key], estimate_seconds=estimate_seconds
        )

    def _with_interval(self, candidate: Candidate, name: str) -> Candidate:
        judgement = with_interval(candidate.judgement, self.search.cluster, candidate.split)
        return replace(candidate, name=candidate.name or name, judgement=judgement)


def _by_stages(search: Search, estimates: Sequence[Estimate]) -> list[Estimate]:
    """The best of some numbers of stages, as the best pipeline passes its batch."""
    like = next((split for split, _ in estimates if len(split.stages) > 1), None)
    if like is None:
        return []
    best = search.by_stages(like)
    for estimate in estimates:
        number = len(estimate.split.stages)
        if number not in best or estimate.seconds < best[number].seconds:
            best[number] = estimate
    return sorted(best.values(), key=attrgetter("seconds"))[:_MOST_BY_STAGES]


def _seconds(candidate: Candidate) -> float:
    return candidate.judgement.seconds if candidate.is_possible else inf


def _best(possible: Sequence[Candidate]) -> Candidate:
    """The fastest; of those as fast, whoever has fresher weights, fewer stages, less memory."""
    least = min(map(_seconds, possible))
    fast = [each for each in possible if _seconds(each) <= least * (1 + _AS_FAST)]

    def taste(candidate: Candidate) -> tuple[float, ...]:
        split = candidate.split
        memory = max(stage.memory.total_bytes for stage in candidate.judgement.stages)
        return (max(split.lags, default=0), len(split.stages), memory, bool(candidate.name))

    return min(fast, key=taste)


def _devices(split: Split) -> object:
    return (
        tuple((stage.first, stage.last, stage.devices) for stage in split.stages),
        split.num_micro_batches,
        split.schedule,
        split.recomputed,
    )


def _distinct(ranked: Sequence[Candidate], best: Candidate) -> Iterator[Candidate]:
    """Each split once, but always plain data parallel and pipelines; all get a name."""
    seen = {_devices(best.split)}
    for candidate in ranked:
        split, number = candidate.split, len(candidate.split.stages)
        if candidate.name in (DATA_PARALLEL, EVEN_PIPELINE) or _devices(split) not in seen:
            seen.add(_devices(split))
            shape = f"{number} stage{'s' * (number > 1)}, {split.schedule}"
            yield replace(candidate, name=candidate.name or shape)


def _check(
    num_samples: int,
    num_devices: int,
    kinds: Sequence[str],
    staleness: int,
    schedules: Sequence[str],
    micro_batches: Sequence[int],
) -> None:
    for name, figure, least in (
        ("num_samples", num_samples, 1),
        ("num_devices", num_devices, 1),
        ("staleness", staleness, 0),
    ):
        if figure < least:
            raise UsageError(f"{name} is {figure}, must be at least {least}")
    if kinds and len(kinds) < num_devices:
        raise UsageError(f"{len(kinds)} kinds for {num_devices} devices; name one for each")
    known = [str(Passing.ONE_F_ONE_B), str(Passing.GPIPE)]
    for name in schedules:
        if name not in known:
            raise UsageError(f"no schedule {name!r} to plan with; {did_you_mean(name, known)}")
    if not schedules:
        raise UsageError("no schedules to choose from; name 1f1b, gpipe or both")
    for count in micro_batches:
        if not 1 <= count <= num_samples:
            raise UsageError(
                f"{count} micro-batches of {num_samples} samples; must be from 1 to {num_samples}"
            )
