"""The planner of clusters: candidates from the cost model, the verdict from the simulation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bayplan.data.chain import Chain
from bayplan.data.cluster import Cluster
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.judgement import Judgement, MemoryNeed
from bayplan.planning.clusters.candidates import Estimate, Search, in_columns
from bayplan.planning.clusters.judging import Chains, Memory, chain_finder, judge, split_memory
from bayplan.planning.clusters.layout import layout_of
from bayplan.planning.clusters.references import (
    DATA_PARALLEL,
    EVEN_PIPELINE,
    data_parallel,
    even_pipeline,
    smallest_that_fits,
)
from bayplan.planning.clusters.refusing import refusal
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.stage_tables import Passing
from bayplan.planning.clusters.timing import simulated_work
from bayplan.planning.clusters.training import DeviceMemory, Training
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import Network

__all__ = ["Candidate", "ClusterPlan", "memory_of", "plan_cluster", "plan_on"]

PLAN = "plan"
_MOST_MICRO_BATCHES = 32  # that are simulated; the time of more follows from these
_MOST_WORK = 25_000  # micro-batches on devices that candidates may have simulated together
_LEAST_JUDGED = 2
_AS_FAST = 0.001  # by which part of its time one may be slower and still be chosen
_MOST_BY_STAGES = 6  # numbers of stages that get an alternative of their own


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A split that was simulated, or that does not fit.

    Attributes:
        name: what it is, in a few words.
        judgement: None if nothing of the kind fits.
        estimate_seconds: its time in the cost model of the dynamic programme; None if that did
            not make it.
        refusal: why it is no choice; empty if it is one.
    """

    name: str
    split: Split
    judgement: Judgement
    estimate_seconds: float | None = None
    refusal: str = ""

    @property
    def is_possible(self) -> bool:
        """Whether it could be chosen."""
        return not self.refusal


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The best split, and what else there is.

    Attributes:
        best: of all that fits, the one whose simulated batches are the fastest.
        alternatives: others, the fastest first; then those that do not fit.
    """

    best: Candidate
    alternatives: tuple[Candidate, ...]

    def named(self, name: str) -> Candidate | None:
        """An alternative by its name; the best itself if that is what it is."""
        return next((one for one in (self.best, *self.alternatives) if one.name == name), None)


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

    Raises:
        DoesNotFit: if nothing fits; tells what binds, and what would help.
        UsageError: for figures that make no sense.
    """
    _check(num_samples, num_devices, kinds, staleness, schedules, micro_batches)
    by_kind, used_kinds, memory_by_kind = _by_kind(chains, kinds, memory)
    search = Search(
        chains=by_kind,
        kinds=used_kinds,
        memory=memory_by_kind,
        layout=layout_of(network, num_devices, kinds=used_kinds),
        training=training or Training(),
        num_samples=num_samples,
        staleness=staleness,
        passings=tuple(Passing(name) for name in schedules),
        micro_batches=micro_batches,
        may_recompute=may_recompute,
        tolerance=tolerance,
    )
    return _Planning(search, network, num_judged).plan()


def plan_on(
    chains: Chains, cluster: Cluster, num_samples: int, *, memory: Memory = None, **wishes: object
) -> ClusterPlan:
    """The same for a described cluster.

    Args:
        chains: by the names of the cluster's kinds, or one for all.
        cluster: whose devices may be used.
        num_samples: of a batch.
        memory: if not the devices' own.
        wishes: as for `plan_cluster`.
    """
    return plan_cluster(
        chains,
        ClusterNetwork(cluster),
        num_samples,
        num_devices=len(cluster.devices),
        kinds=tuple(device.kind for device in cluster.devices),
        memory=memory_of(cluster) if memory is None else memory,
        **wishes,  # type: ignore[arg-type]
    )


def memory_of(cluster: Cluster) -> dict[str, DeviceMemory]:
    """The memory of each kind of device."""
    return {
        name: DeviceMemory(
            total_bytes=int(kind.memory_bytes.value), context_bytes=int(kind.context_bytes.value)
        )
        for name, kind in cluster.kinds.items()
    }


@dataclass(frozen=True)
class _Planning:
    search: Search
    network: Network
    num_judged: int

    def plan(self) -> ClusterPlan:
        estimates = self.search.estimates()
        if not estimates:
            raise refusal(self.search)
        judged = list(self._afforded(self._chosen(estimates), _LEAST_JUDGED, _MOST_WORK))
        judged += [one for each in judged[:2] for one in self._columns(each)]
        known = {_devices(one.split) for one in judged}
        others = (one for one in self._by_stages(estimates) if _devices(one.split) not in known)
        judged += self._afforded(others, 0, _MOST_WORK / 2)
        references = list(self._references())
        possible = [one for one in (*judged, *references) if one.is_possible]
        best = _best(possible)
        ranked = sorted((one for one in possible if one is not best), key=_seconds)
        refused = [one for one in references if not one.is_possible]
        return ClusterPlan(
            best=self._with_interval(best),
            alternatives=(*map(_named, _distinct(ranked, best)), *refused),
        )

    def _chosen(self, estimates: Sequence[Estimate]) -> Iterator[Estimate]:
        """The fastest in the cost model, not too many of one kind."""
        seen: dict[object, int] = {}
        number = 0
        for one in estimates:
            kind = (len(one.split.stages), one.split.schedule)
            if number < self.num_judged and seen.get(kind, 0) < max(1, self.num_judged // 3):
                seen[kind] = seen.get(kind, 0) + 1
                number += 1
                yield one

    def _afforded(
        self, estimates: Iterable[Estimate], least: int, most_work: float
    ) -> Iterator[Candidate]:
        """Simulations of as many as can be had for some work, but of some in any case."""
        work = 0.0
        for number, one in enumerate(estimates):
            work += simulated_work(one.split, _MOST_MICRO_BATCHES)
            if number >= least and work > most_work:
                return
            yield self._judged(one, "")

    def _columns(self, one: Candidate) -> Iterator[Candidate]:
        """The same with stages close together, where devices are alike."""
        moved = None if self.search.kinds else in_columns(one.split)
        is_cheap = simulated_work(one.split, _MOST_MICRO_BATCHES) < _MOST_WORK / 4
        if moved is not None and is_cheap:
            yield self._judged(Estimate(moved, one.judgement.seconds), "stages close together")

    def _by_stages(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """The best of some numbers of stages, as the best pipeline passes its batch."""
        like = next((one.split for one in estimates if len(one.split.stages) > 1), None)
        if like is None:
            return []
        found = self.search.by_stages(like)
        for one in estimates:
            number = len(one.split.stages)
            if number not in found or one.seconds < found[number].seconds:
                found[number] = one
        return sorted(found.values(), key=lambda one: one.seconds)[:_MOST_BY_STAGES]

    def _references(self) -> Iterator[Candidate]:
        """What a plan is compared with; maybe it does not fit."""
        search = self.search
        chain, row = next(iter(search.chains.values())), search.layout.order
        plain = (
            (
                DATA_PARALLEL,
                data_parallel(chain, row, search.num_samples, shares=search.shares(row)),
            ),
            (EVEN_PIPELINE, even_pipeline(chain, row, search.num_samples)),
        )
        for name, split in plain:
            if split is not None:
                if search.micro_batches:
                    split = replace(split, num_micro_batches=min(search.micro_batches))
                least = smallest_that_fits(
                    split,
                    search.counts,
                    lambda one: all(need.fits for need in self._memory(one)),
                    may_recompute=search.may_recompute,
                )
                yield self._judged(Estimate(least, 0.0), name, is_estimate=False)

    def _memory(self, split: Split) -> tuple[MemoryNeed, ...]:
        return split_memory(
            self._chains,
            split,
            kinds=self.search.kinds,
            memory=self.search.memory or None,
            training=self.search.training,
        )

    @property
    def _chains(self) -> Mapping[str, Chain]:
        return self.search.chains

    def _judged(self, one: Estimate, name: str, *, is_estimate: bool = True) -> Candidate:
        judgement = self._judge(one.split, has_interval=False)
        return Candidate(
            name=name,
            split=one.split,
            judgement=judgement,
            estimate_seconds=one.seconds if is_estimate else None,
            refusal="" if judgement.fits else "does not fit",
        )

    def _with_interval(self, one: Candidate) -> Candidate:
        return replace(
            one, name=one.name or PLAN, judgement=self._judge(one.split, has_interval=True)
        )

    def _judge(self, split: Split, *, has_interval: bool) -> Judgement:
        return judge(
            self._chains,
            split,
            self.network,
            kinds=self.search.kinds,
            memory=self.search.memory or None,
            training=self.search.training,
            has_interval=has_interval,
            most_micro_batches=_MOST_MICRO_BATCHES,
        )


def _seconds(one: Candidate) -> float:
    return one.judgement.seconds if one.is_possible else float("inf")


def _best(possible: Sequence[Candidate]) -> Candidate:
    """The fastest; of those as fast, whoever has fresher weights, fewer stages, less memory."""
    least = min(map(_seconds, possible))
    fast = [one for one in possible if _seconds(one) <= least * (1 + _AS_FAST)]

    def taste(one: Candidate) -> tuple[float, ...]:
        memory = max(stage.memory.total_bytes for stage in one.judgement.stages)
        return (max(one.split.lags, default=0), len(one.split.stages), memory, bool(one.name))

    return min(fast, key=taste)


def _devices(split: Split) -> object:
    return (
        tuple((stage.first, stage.last, stage.devices) for stage in split.stages),
        split.num_micro_batches,
        split.schedule,
        split.recomputed,
    )


def _distinct(ranked: Sequence[Candidate], best: Candidate) -> Iterator[Candidate]:
    """Each split once, but always what has a name."""
    seen = {_devices(best.split)}
    for one in ranked:
        key = _devices(one.split)
        if one.name in (DATA_PARALLEL, EVEN_PIPELINE) or key not in seen:
            seen.add(key)
            yield one


def _named(one: Candidate) -> Candidate:
    """With a name, if it has none."""
    if one.name:
        return one
    number = len(one.split.stages)
    return replace(one, name=f"{number} stage{'s' * (number > 1)}, {one.split.schedule}")


def _by_kind(
    chains: Chains, kinds: Sequence[str], memory: Memory
) -> tuple[Mapping[str, Chain], Sequence[str], Mapping[str, DeviceMemory]]:
    """Everything by kind, and nothing by kind where there is only one."""
    used = sorted(set(kinds))
    if len(used) < 2 or (isinstance(chains, Chain) and not isinstance(memory, Mapping)):
        chain = chain_finder(chains, kinds)(0)
        if isinstance(memory, Mapping):
            memory = next(iter(memory.values())) if len(memory) == 1 else memory[used[0]]
        return {"": chain}, (), {} if memory is None else {"": memory}
    finder = chain_finder(chains, kinds)
    by_kind = {kind: finder(list(kinds).index(kind)) for kind in used}
    if memory is None:
        return by_kind, kinds, {}
    own = memory if isinstance(memory, Mapping) else dict.fromkeys(used, memory)
    return by_kind, kinds, {kind: own[kind] for kind in used}


def _check(
    num_samples: int,
    num_devices: int,
    kinds: Sequence[str],
    staleness: int,
    schedules: Sequence[str],
    micro_batches: Sequence[int],
) -> None:
    for name, figure in (("num_samples", num_samples), ("num_devices", num_devices)):
        if figure < 1:
            raise UsageError(f"{name} is {figure}, must be at least 1")
    if kinds and len(kinds) < num_devices:
        raise UsageError(f"{len(kinds)} kinds for {num_devices} devices; name one for each")
    if staleness < 0:
        raise UsageError(f"staleness is {staleness}, must be 0 or more")
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
