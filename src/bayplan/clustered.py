"""Plans for whole clusters: from a model and a description of devices to lists that ranks can run.

The traced step is boiled down to a chain of layers, priced by the figures of each kind of device. A
planner splits it over the devices; then operators, memory inside stages, buckets and actions are
planned as for any other placement, and the result is replayed on the cluster. What it predicts is
in the plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.optimizer_state import state_per_parameter
from bayplan.data.placement import Place, Placement
from bayplan.data.plan import Plan, Request, Stage
from bayplan.data.record import RunRecord
from bayplan.data.why import Why
from bayplan.grounds import Elsewhere
from bayplan.placing import place
from bayplan.planning.clusters.planner import Candidate, ClusterPlan, memory_of, plan_on
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.training import Training
from bayplan.planning.clusters.why import explain
from bayplan.planning.pipelines.policies import SCHEDULES
from bayplan.pricing import derived_prices
from bayplan.questions import Question
from bayplan.running.joint import JointStep, analyse_joint
from bayplan.running.stages.chaining import ChainedStep, chained, with_fixed_parts
from bayplan.running.stages.whole import WholeStep
from bayplan.simulated import simulate_plan
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.spread import compute_spread, link_spread
from bayplan.training import TrainingStep
from bayplan.whole_tracing import num_samples_of, trace_whole
from bayplan.wishes import Wishes

__all__ = ["ClusterQuestion", "Clustered"]

Progress = Callable[[str, int, int], None]
_UPDATE_PASSES = 5  # over the weights' bytes: parameter, gradient and state, read and written


@dataclass(frozen=True)
class Clustered:
    """A plan for a cluster.

    Attributes:
        plan: with what the replay predicts.
        record: of the replay.
        found: all that was looked at, where the split was searched for.
    """

    plan: Plan
    record: RunRecord
    found: ClusterPlan | None = None


def _can_run(one: Candidate) -> bool:
    """Whether ranks can do it: they begin a stale batch with its forward."""
    return one.split.schedule in SCHEDULES


def _priced(whole: WholeStep, kind: DeviceKind) -> JointStep:
    with derived_prices(kind) as price:
        return analyse_joint(
            whole.joint, num_forward_outputs=whole.num_forward_outputs, cost_of=price
        )


@dataclass(frozen=True)
class ClusterQuestion:
    """A step that is to be planned for a cluster.

    Attributes:
        question: the step, without a device of its own.
        cluster: whose devices may be used.
        on_progress: hears what is being done.
    """

    question: Question
    cluster: Cluster
    on_progress: Progress = lambda what, done, total: None

    def planned(
        self, *, staleness: int = 0, micro_batches: Sequence[int] = (), wishes: Wishes | None = None
    ) -> Clustered:
        """The fastest split that fits.

        Args:
            staleness: batches that backward may be behind forward.
            micro_batches: numbers of them that may be chosen; empty for any.
            wishes: what else is wished for in the plan; its placement is not looked at.

        Raises:
            DoesNotFit: nothing does; tells what binds and what would help.
            UsageError: one device is fastest, which needs no plan for many.
        """
        self.on_progress("splitting the model over devices", 0, 3)
        chains = {name: one.chain for name, one in self._chained.items()}
        found = plan_on(
            chains,
            self.cluster,
            self.num_samples,
            training=self._training,
            staleness=staleness,
            micro_batches=micro_batches,
        )
        best = next(
            (one for one in (found.best, *found.alternatives) if one.is_possible and _can_run(one)),
            found.best,
        )
        split = best.split
        if sum(split.replicas) < 2:
            raise UsageError(
                f"one device is fastest for {self.question.target.name} at batch"
                f" {self.num_samples}; plan for it with `bayplan plan --device"
                f" {self.cluster.devices[split.stages[0].devices[0]].kind}`, or give a larger batch"
            )
        rest = tuple(one for one in (found.best, *found.alternatives) if one is not best)
        found = replace(found, best=best, alternatives=rest)
        return replace(self.placed(self._wishes_of(split, wishes)), found=found)

    def placed(self, wishes: Wishes) -> Clustered:
        """The plan for a placement that is given, or was found.

        Raises:
            UsageError: the cluster has no such devices.
            DoesNotFit: a device has less memory than it needs.
        """
        devices = self._devices(wishes.placement)
        try:
            return self._replayed(wishes, devices)
        except DoesNotFit:
            if wishes.limit_bytes is not None:
                raise
        self.on_progress("fitting stages into memory", 2, 3)
        return self._replayed(replace(wishes, limit_bytes=self._usable_bytes), devices)

    def _replayed(self, wishes: Wishes, devices: tuple[int, ...]) -> Clustered:
        question = self.question
        ranks = [wishes.placement.ranks_of(at)[0] for at in range(len(wishes.placement.stages))]
        ground = Elsewhere(self.cluster, devices, tuple(ranks))
        self.on_progress("writing every device's list", 1, 3)
        plan = place(
            self.step,
            wishes,
            request=Request(
                target=question.target.name,
                batch=question.batch,
                optimizer=question.optimizer,
                autocast=question.autocast,
            ),
            optimizer=replace(question, device=ground.kind(0)).optimizer_source(),
            ground=ground,
            on_progress=self.on_progress,
        )
        record = simulate_plan(
            plan, self.cluster, target=question.target.name, on_progress=self.on_progress
        )
        busy = tuple(0.0 if share is None else min(1.0, share) for share in record.busy)
        predicted = msgspec.structs.replace(
            plan,
            predicted_seconds=record.typical_step_seconds,
            predicted_peak_bytes=tuple(device.peak_bytes for device in record.devices),
            predicted_busy=busy,
        )
        return Clustered(predicted, record)

    def _devices(self, placement: Placement) -> tuple[int, ...]:
        """By rank, the cluster's number of its device."""
        numbers = self.cluster.numbers_of(placement)
        at_place = {
            place: number
            for stage, own in zip(placement.stages, numbers, strict=True)
            for place, number in zip(stage, own, strict=True)
        }
        return tuple(at_place[place] for place in placement.places)

    def _wishes_of(self, split: Split, wishes: Wishes | None) -> Wishes:
        places = {
            device: Place(node, at)
            for node, own in enumerate(self.cluster.devices_of_hosts)
            for at, device in enumerate(own)
        }
        firsts = next(iter(self._chained.values())).firsts
        pairs = [
            sorted(zip(map(places.__getitem__, stage.devices), stage.shares, strict=True))
            for stage in split.stages
        ]
        placement = Placement(tuple(tuple(place for place, _ in own) for own in pairs))
        given = Wishes(placement=placement.without_gaps()) if wishes is None else wishes
        return replace(
            given,
            placement=placement.without_gaps(),
            firsts=tuple(firsts[stage.first] for stage in split.stages),
            batch_shares=tuple(tuple(share for _, share in own) for own in pairs),
            num_micro_batches=split.num_micro_batches,
            schedule=split.schedule,
            versions=tuple(lag + 1 for lag in split.lags) if any(split.lags) else (),
            state_per_parameter=state_per_parameter(self.question.optimizer),
            limit_bytes=self._usable_bytes if any(split.recomputed) else given.limit_bytes,
        )

    @cached_property
    def step(self) -> TrainingStep:
        """On tensors without memory."""
        return self.question.without_memory()

    @cached_property
    def num_samples(self) -> int:
        """Of the whole batch."""
        return num_samples_of(self.step.batch)

    def why(self, made: Clustered) -> Why:
        """Take a plan apart: what binds it, and where its gain over data parallel comes from."""
        plan, devices = made.plan, self._devices(Placement.parse(made.plan.placement))
        chains = self._chains_with([stage.first for stage in plan.stages])
        firsts = next(iter(chains.values())).firsts
        begins = [firsts.index(stage.first) for stage in plan.stages]
        ends = [*(begin - 1 for begin in begins[1:]), len(firsts) - 1]
        split = Split(
            stages=tuple(
                Stage(
                    first=begin,
                    last=end,
                    devices=tuple(devices[rank] for rank in stage.devices),
                    shares=stage.shares,
                )
                for begin, end, stage in zip(begins, ends, plan.stages, strict=True)
            ),
            num_samples=self.num_samples,
            num_micro_batches=plan.num_micro_batches,
            schedule=plan.schedule,
            lags=plan.lags,
        )
        self.on_progress("taking the plan apart", 0, 1)
        return explain(
            {name: one.chain for name, one in chains.items()},
            split,
            ClusterNetwork(self.cluster),
            num_devices=len(self.cluster.devices),
            kinds=tuple(device.kind for device in self.cluster.devices),
            memory=memory_of(self.cluster),
            training=self._training,
            plan=made.found,
        )

    @cached_property
    def _chained(self) -> dict[str, ChainedStep]:
        """By kind of device, the step as layers."""
        return self._chains_with(())

    def _chains_with(self, also: Sequence[int]) -> dict[str, ChainedStep]:
        """The same with layers that begin with some operators in any case."""

        def at(name: str, whole: WholeStep, step: JointStep) -> ChainedStep:
            return chained(
                whole,
                step,
                name=self.question.target.name,
                device=name,
                source="derived from the device's figures",
                spread=compute_spread([self.cluster.kinds[name]]),
                also=also,
            )

        large, small = self._wholes
        return {
            name: with_fixed_parts(at(name, large, more), at(name, small, less))
            for name, (more, less) in self._priced.items()
        }

    @cached_property
    def _wholes(self) -> tuple[WholeStep, WholeStep]:
        """At the samples that each device has if all share the batch, and at fewer."""
        large = max(4, self.num_samples // len(self.cluster.devices))
        self.on_progress("tracing", 0, 2)
        return (
            trace_whole(self.step, num_samples=large),
            trace_whole(self.step, num_samples=max(2, large // 4)),
        )

    @cached_property
    def _priced(self) -> dict[str, tuple[JointStep, JointStep]]:
        """By kind of device, both."""
        found: dict[str, tuple[JointStep, JointStep]] = {}
        for name in dict.fromkeys(device.kind for device in self.cluster.devices):
            large, small = self._wholes
            self.on_progress(f"pricing operators on {name}", 0, 1)
            kind = self.cluster.kinds[name]
            found[name] = (_priced(large, kind), _priced(small, kind))
        return found

    @property
    def _training(self) -> Training:
        slowest = min(kind.bandwidth_bytes_per_s.value for kind in self._kinds)
        return Training(
            state_per_parameter=state_per_parameter(self.question.optimizer),
            update_seconds_per_byte=_UPDATE_PASSES / slowest,
            link_spread=link_spread(self.cluster),
        )

    @property
    def _kinds(self) -> list[DeviceKind]:
        names = dict.fromkeys(device.kind for device in self.cluster.devices)
        return [self.cluster.kinds[name] for name in names]

    @property
    def _usable_bytes(self) -> int:
        """Of the device with the least memory."""
        return int(min(kind.memory_bytes.value - kind.context_bytes.value for kind in self._kinds))
