"""What a plan for many ranks promises, moment by moment: memory and timeline of each rank."""

from collections.abc import Iterable, Mapping, Sequence

from bayplan.data.actions import Action
from bayplan.data.graph import StorageKind
from bayplan.data.plan import RankPlan
from bayplan.data.record import (
    AllReduce,
    DeviceRecord,
    Event,
    Lane,
    MemoryCurve,
    RunRecord,
    Source,
    message_classes,
    waited_seconds,
)
from bayplan.planning.clusters.split import state_per_parameter
from bayplan.planning.pipelines.rank_costs import RankNeeds, RankSeconds
from bayplan.planning.pipelines.rank_peaks import RankPeaks
from bayplan.planning.pipelines.stage_fits import keys_of, peak_bytes
from bayplan.planning.pipelines.stage_orders import Fit, StageSearch
from bayplan.planning.pipelines.step_source import CutSource, StepSource
from bayplan.simulating.checking import check_actions
from bayplan.simulating.clock import StepTimes, step_times
from bayplan.simulating.network import Network
from bayplan.simulating.pipeline import pipeline_of
from bayplan.simulating.rank_memory import Key, RankMemory, rank_totals

__all__ = ["all_reduces_of", "fits_as_planned", "predicted_on_ranks", "rank_curve"]

_HERE = ("this machine",)


def predicted_on_ranks(plan: RankPlan, source: StepSource, network: Network | None) -> RunRecord:
    """Replay a plan with the prices of this machine, which planning has measured.

    Args:
        plan: that was checked.
        network: between the ranks; None where nothing is known of it, and so nothing of time.
    """
    pipeline = pipeline_of(plan, num_samples=source.num_samples)
    actions = [[Action.parse(text) for text in texts] for texts in plan.actions]
    cut = source.cut(tuple(stage.first for stage in plan.stages))
    widest = max(len(stage.devices) for stage in plan.stages)
    needs = RankNeeds(
        plan=plan,
        pipeline=pipeline,
        cut=cut,
        values=cut.values(max(2, source.num_samples // plan.num_micro_batches // widest)),
        state_per_parameter=state_per_parameter(source.optimizer_name),
        batch_bytes=source.batch_bytes,
    )
    proof = check_actions(pipeline, actions, has_tags=True)
    memory = [needs.memory(rank, actions[rank], proof) for rank in pipeline.ranks]
    fits = fits_as_planned(plan, cut, memory, StageSearch(cache=source.cache))
    times = None
    if network is not None:
        costs = RankSeconds(needs=needs, fits=fits).costs(network, num_cores=source.num_cores)
        times = step_times(pipeline, actions, costs, lags=plan.lags)
    devices, peaks = [], RankPeaks(cut, fits)
    for rank in pipeline.ranks:
        stages, peak = pipeline.stages_of(rank), peaks.of(memory[rank])
        events = () if times is None else times.events[rank]
        sums = () if times is None else all_reduces_of(times, rank)
        devices.append(
            DeviceRecord(
                device=f"rank {rank}, stage {'+'.join(map(str, stages))}",
                stages=stages,
                places=_HERE,
                peak_bytes=peak_bytes(memory[rank], fits),
                curve=rank_curve(memory[rank], fits, needs.staying_by_kind(stages), events),
                peak_place=peak.place,
                largest=peak.largest,
                events=events,
                all_reduces=sums,
                messages=message_classes((own.size_bytes, own.seconds) for own in sums),
            )
        )
    return RunRecord(
        source=Source.SIMULATED,
        method="liveness",
        model=plan.model,
        step_seconds=() if times is None else (times.seconds,),
        devices=tuple(devices),
        versions={"torch": source.torch_version},
        num_samples=source.num_samples,
        limit_bytes=plan.limit_bytes,
    )


def fits_as_planned(
    plan: RankPlan, cut: CutSource, ranks: Iterable[RankMemory], search: StageSearch
) -> dict[Key, Fit]:
    """How stages run as the plan says: in its order, or with everything kept."""
    planned = {(given.stage, given.num_samples): given.order for given in plan.stage_orders}
    keys = dict.fromkeys(key for rank in ranks for key in keys_of(rank))
    return {
        key: search.ordered(cut.traced(*key), planned[key])
        if key in planned
        else search.plain(cut.traced(*key))
        for key in keys
    }


def rank_curve(
    rank: RankMemory, fits: Mapping[Key, Fit], staying: Mapping[str, int], events: Sequence[Event]
) -> MemoryCurve | None:
    """The highest moment of each action, when it begins; None where times are not known.

    Args:
        staying: what is there through the whole step, by kind.
        events: of the step, which say when actions begin.
    """
    if not events:
        return None
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for event in events:
        began.setdefault(event.name, event.start_seconds)
        ended[event.name] = event.start_seconds + event.seconds
    stages = {key: fits[key].memory for key in keys_of(rank)}
    now, rows = 0.0, list[tuple[float, int, int]]()
    for action, (total, gradients) in zip(rank.actions, rank_totals(rank, stages), strict=True):
        name = str(action)
        now = max(now, began.get(name, now))
        rows.append((now, total, gradients))
        now = max(now, ended.get(name, now))  # what takes no time of its own comes behind
    end = max(event.start_seconds + event.seconds for event in events)
    rows.append((max(now, end), rows[-1][1], rows[-1][2]))
    seconds, totals, gradients = zip(*rows, strict=True)
    by_kind = {kind: (size,) * len(rows) for kind, size in staying.items() if size}
    shared = staying.get(StorageKind.GRADIENT, 0)
    by_kind[StorageKind.GRADIENT] = tuple(shared + own for own in gradients)
    rest = rank.staying_bytes
    by_kind[StorageKind.ACTIVATION] = tuple(total - rest - own for _, total, own in rows)
    return MemoryCurve(seconds=seconds, total_bytes=totals, by_kind=by_kind)


def all_reduces_of(times: StepTimes, rank: int) -> tuple[AllReduce, ...]:
    """The sums that a rank took part in, with how long it did nothing but wait for each."""
    return tuple(
        AllReduce(
            bucket=moved.bucket or 0,
            size_bytes=int(moved.size_bytes),
            start_seconds=moved.start_seconds,
            seconds=moved.seconds,
            exposed_seconds=waited_seconds(
                times.events[rank], moved.start_seconds, moved.start_seconds + moved.seconds
            ),
        )
        for moved in times.moved
        if moved.lane is Lane.REDUCE and rank in moved.ranks
    )
