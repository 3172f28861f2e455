"""Our plan, the reference partitioners' splits, and small changes to the best, all simulated.

The dynamic programme is exact in a cost model that knows no events: who waits for whom, and which
messages meet on a wire, shows only in the simulation. So what it finds is not the last word. Other
partitioners' splits, passed as well as any, are simulated as well; then the fastest is changed a
little, a cut by a layer, a device from a stage to the next, micro-batches by one step, for as long
as that makes it faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from bayplan.data.chain import Chain
from bayplan.data.errors import BayplanError, DoesNotFit
from bayplan.data.judgement import Judgement
from bayplan.data.plan import Stage
from bayplan.planning.clusters.judging import judge
from bayplan.planning.clusters.memory import BACKWARD_FIRST
from bayplan.planning.clusters.planner import Candidate, ClusterPlan, plan_cluster
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.timing import simulated_work
from bayplan.planning.clusters.training import DeviceMemory, Training
from bayplan.planning.coarsening import coarsened
from bayplan.planning.partitioners import PARTITIONERS, Machines
from bayplan.simulating.network import Network

__all__ = ["Contest", "passings"]

# More micro-batches only take longer to simulate; they are tried where nothing fits with these.
_SEARCHED_COUNTS = (1, 2, 4, 8, 16)
_MOST_PIECES = 128  # micro-batches times devices that are searched
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
_STALE_COUNTS = (1, 2, 3, 4, 8, 16)
_MOST_UNDER_WAY = 64  # micro-batches in the first stage; more hide nothing
_SYNCHRONOUS_COUNTS = (1, 8, 24)
_MOST_SIMULATED = 64  # micro-batches; the time of more follows from these
_STEPS = (-1, 1, -3, 3)  # layers; a residual branch is about three long
# Layers that are searched, times devices; then cuts are moved layer by layer.
_MOST_SEARCHED = 384
_LEAST_LAYERS = 16
# In micro-batches on devices, of which about ten are simulated in a millisecond.
_QUICK_WORK = 600
_CHANGE_WORK = 5000
_LEAST_CHANGES = 4
_LEAST_WAYS = 3
_FAR = 1.5  # more micro-batches were seen to make a pipeline a third faster, not more
_REFERENCES = ("pipedream", "pipedream-no-transfer")
_STALE = "one-by-one"


def passings(split: Split, *, staleness: int) -> Iterator[Split]:
    """The ways for batches to pass the stages of a split.

    Args:
        split: whose stages stay as they are.
        staleness: batches that a backward may be behind its forward.
    """
    num_stages = len(split.stages)
    most = split.num_samples // max(split.replicas)
    lags = tuple(range(num_stages - 1, -1, -1))
    for count in _SYNCHRONOUS_COUNTS:
        if count <= most and (num_stages > 1 or count == 1):
            yield replace(split, num_micro_batches=count, schedule="1f1b", lags=())
    if 1 < num_stages <= staleness + 1:
        for count in _STALE_COUNTS:
            if count <= most and count * lags[0] <= _MOST_UNDER_WAY:
                yield replace(split, num_micro_batches=count, schedule=_STALE, lags=lags)
        yield replace(split, num_micro_batches=1, schedule=BACKWARD_FIRST, lags=lags)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Whose split is the fastest that fits.

    Attributes:
        chain: the model.
        network: between devices.
        machines: the same as groups of groups, for the reference partitioners.
        num_samples: of a batch.
        memory: of a device.
        training: how weights are trained.
        staleness: batches that a backward may be behind its forward.
        seeds: further splits that take part; their stages are passed in every way.
        num_judged: of the dynamic programme's candidates, how many are simulated.
        num_changes: simulations that changes of the best may take.
    """

    chain: Chain
    network: Network
    machines: Machines
    num_samples: int
    memory: DeviceMemory | None = None
    training: Training = field(default_factory=Training)
    staleness: int = 0
    seeds: Sequence[Split] = ()
    num_judged: int = 5
    num_changes: int = 16
    _judged: dict[Split, Judgement] = field(default_factory=dict)

    def plan(self) -> ClusterPlan:
        """The winner first, then the others.

        Raises:
            DoesNotFit: if nothing fits.
        """
        most = min(self.num_samples, max(8, _MOST_PIECES // len(self.machines.devices)))
        try:
            own = self._own([count for count in _SEARCHED_COUNTS if count <= most])
        except DoesNotFit:
            own = self._own(())
        ranked = [one for one in (own.best, *own.alternatives) if one.is_possible]
        to_beat = min(map(_seconds, ranked))
        ranked += [one for one in self.references(to_beat) if one.is_possible]
        refused = [one for one in own.alternatives if not one.is_possible]
        return self._ranked(ranked, refused)

    def plan_from_seeds(self) -> ClusterPlan | None:
        """The same without a search of our own; None if none of them fits."""
        given = [self.best_passing(split) for split in self.seeds]
        possible = [one for one in given if one.is_possible]
        refused = [one for one in given if not one.is_possible]
        return self._ranked(possible, refused) if possible else None

    def _ranked(self, possible: list[Candidate], refused: list[Candidate]) -> ClusterPlan:
        changed = self._changed(min(possible, key=_seconds))
        everyone = sorted([*possible, *changed], key=_seconds)
        return ClusterPlan(best=everyone[0], alternatives=(*everyone[1:], *refused))

    def _own(self, micro_batches: Sequence[int]) -> ClusterPlan:
        """Our search, on fewer cuts of a long model; what it finds is then of the whole one."""
        num_devices = len(self.machines.devices)
        most = max(_LEAST_LAYERS, _MOST_SEARCHED // num_devices)
        short, lasts = coarsened(self.chain, most=most)
        found = plan_cluster(
            short,
            self.network,
            self.num_samples,
            num_devices=num_devices,
            memory=self.memory,
            training=self.training,
            staleness=self.staleness,
            micro_batches=micro_batches,
            num_judged=self.num_judged,
        )
        if len(lasts) == len(self.chain.layers):
            return found
        return ClusterPlan(
            best=_on_all_layers(found.best, lasts),
            alternatives=tuple(_on_all_layers(one, lasts) for one in found.alternatives),
        )

    def references(self, to_beat: float = inf) -> Iterator[Candidate]:
        """What the other partitioners find, passed in the fastest way that fits, if any does."""
        for name in _REFERENCES:
            try:
                split = PARTITIONERS[name](self.chain, self.machines, num_samples=self.num_samples)
            except BayplanError:
                continue  # it knows no way, which is no reason against ours
            yield self.best_passing(split, to_beat)
        for split in self.seeds:
            yield self.best_passing(split, to_beat)

    def best_passing(self, split: Split, to_beat: float = inf) -> Candidate:
        """The fastest way to pass that fits; where none fits, the fastest.

        Args:
            split: whose stages stay as they are.
            to_beat: seconds; where the ways that are quickly simulated are far from them, the
                others are not looked at.
        """
        ways = sorted(passings(split, staleness=self.staleness), key=_work)
        found: list[Candidate] = []
        for one in ways:
            is_long = _work(one) > _QUICK_WORK and len(found) >= _LEAST_WAYS
            if is_long and min(map(_seconds, found)) > _FAR * to_beat:
                break
            found.append(self._candidate(one))
        return min(found, key=lambda one: (not one.is_possible, _seconds(one)))

    def judge(self, split: Split) -> Judgement:
        """Simulate a split, once, whoever made it."""
        known = replace(split, partitioner="")
        if known not in self._judged:
            self._judged[known] = judge(
                self.chain,
                split,
                self.network,
                memory=self.memory,
                training=self.training,
                has_interval=False,
                most_micro_batches=_MOST_SIMULATED,
            )
        return self._judged[known]

    def _candidate(self, split: Split, name: str = "") -> Candidate:
        judgement = self.judge(split)
        return Candidate(
            name=name or split.partitioner,
            split=split,
            judgement=judgement,
            refusal="" if judgement.fits else "does not fit",
        )

    def _changed(self, best: Candidate) -> list[Candidate]:
        """Whatever was faster than all before it."""
        found: list[Candidate] = []
        left = min(self.num_changes, max(_LEAST_CHANGES, _CHANGE_WORK // _work(best.split)))
        while True:
            neighbours = [one for one in _neighbours(best.split) if _has_samples(one)][:left]
            left -= len(neighbours)
            tried = [self._candidate(one, "plan") for one in neighbours]
            possible = [one for one in tried if one.is_possible]
            if not possible or min(map(_seconds, possible)) >= _seconds(best):
                return found
            best = min(possible, key=_seconds)
            found.append(best)


def _neighbours(split: Split) -> Iterator[Split]:
    """A cut by a layer, a device to the next stage, micro-batches by a step."""
    stages = split.stages
    for at, (before, after) in enumerate(pairwise(stages)):
        for moved in _STEPS:
            last = before.last + moved
            if before.first <= last < after.last:
                yield _with(split, at, _cut(before, after, last))
        if len(before.devices) > 1:
            yield _with(split, at, _moved(before, after, len(before.devices) - 1))
        if len(after.devices) > 1:
            yield _with(split, at, _moved(before, after, len(before.devices) + 1))
    counts = sorted({*_COUNTS, split.num_micro_batches})
    place = counts.index(split.num_micro_batches)
    if len(stages) > 1 and split.schedule != BACKWARD_FIRST:
        for other in (place - 1, place + 1):
            if 0 <= other < len(counts):
                yield replace(split, num_micro_batches=counts[other])


def _has_samples(split: Split) -> bool:
    """Whether every replica has a sample of every micro-batch."""
    return split.num_samples // split.num_micro_batches >= max(split.replicas)


def _with(split: Split, at: int, both: Sequence[Stage]) -> Split:
    return replace(
        split,
        stages=(*split.stages[:at], *both, *split.stages[at + 2 :]),
        partitioner="bayplan",
    )


def _cut(before: Stage, after: Stage, last: int) -> tuple[Stage, Stage]:
    return (
        Stage(first=before.first, last=last, devices=before.devices, shares=before.shares),
        Stage(first=last + 1, last=after.last, devices=after.devices, shares=after.shares),
    )


def _moved(before: Stage, after: Stage, number: int) -> tuple[Stage, Stage]:
    """With so many of both stages' devices in the first."""
    devices = (*before.devices, *after.devices)
    return (
        Stage(first=before.first, last=before.last, devices=devices[:number], shares=(1,) * number),
        Stage(
            first=after.first,
            last=after.last,
            devices=devices[number:],
            shares=(1,) * (len(devices) - number),
        ),
    )


def _on_all_layers(one: Candidate, lasts: Sequence[int]) -> Candidate:
    stages = tuple(
        Stage(
            first=lasts[stage.first - 1] + 1 if stage.first else 0,
            last=lasts[stage.last],
            devices=stage.devices,
            shares=stage.shares,
        )
        for stage in one.split.stages
    )
    return replace(one, split=replace(one.split, stages=stages))


def _work(split: Split) -> int:
    return simulated_work(split, _MOST_SIMULATED)


def _seconds(one: Candidate) -> float:
    return one.judgement.seconds
