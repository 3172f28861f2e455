"""A real model planned for clusters that are not here, searched for and as given."""

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from bayplan.costing.catalogue import read_cluster
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.placement import Placement
from bayplan.data.plan import Choice
from bayplan.data.record import Source
from bayplan.models.targets import resolve_target
from bayplan.planning.clusters.cluster_step import (
    Clustered,
    ClusterQuestion,
    data_parallel_placement,
)
from bayplan.planning.pipelines import placing
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy
from bayplan.planning.pipelines.stage_orders import StageSearch
from bayplan.preparing.stages import PreparedStages
from bayplan.preparing.step import PreparedStep
from bayplan.reporting.clusters import why_text
from bayplan.running.swaps.swap_space import planned_swap_bytes
from bayplan.simulating.checking import check_rank_plan
from bayplan.step import TrainingStep

BATCH = 64


def asked(cluster="rtx-4090-4", **changes):
    question = PreparedStep(target=resolve_target("alexnet"), batch=BATCH, optimizer="sgd")
    described = read_cluster(cluster)
    if changes:
        kinds = {
            name: msgspec.structs.replace(
                kind,
                **{
                    field: msgspec.structs.replace(getattr(kind, field), value=value)
                    for field, value in changes.items()
                },
            )
            for name, kind in described.kinds.items()
        }
        described = msgspec.structs.replace(described, kinds=kinds)
    return ClusterQuestion(PreparedStages.of(question), described)


@pytest.fixture(scope="module")
def found():
    question = asked()
    return question, question.planned()


def test_the_plan_can_be_run_and_says_what_its_replay_says(found):
    question, made = found
    check_rank_plan(made.plan)
    assert made.plan.cluster_fingerprint == question.cluster.fingerprint
    assert made.record.source is Source.SIMULATED
    assert made.plan.predicted_seconds == made.record.typical_step_seconds > 0
    peaks = tuple(device.peak_bytes for device in made.record.devices)
    assert made.plan.predicted_peak_bytes == peaks
    assert all(0 < share <= 1 for share in made.plan.predicted_busy)


def test_it_is_the_fastest_of_what_was_looked_at(found):
    _, made = found
    best = made.searched.best.judgement.seconds
    possible = [one for one in made.searched.alternatives if one.is_possible]
    assert any(one.name == "pure data parallel" for one in possible)
    assert all(one.judgement.seconds >= 0.99 * best for one in possible)


def test_layers_and_operators_agree_about_its_time(found):
    _, made = found
    assert made.searched.best.judgement.seconds == pytest.approx(
        made.plan.predicted_seconds, rel=0.25
    )


def test_it_beats_data_parallel_when_replayed(found):
    question, made = found
    parallel = question.placed(RankPlanOptions(placement=Placement.parse("0:0-3")))
    assert parallel.plan.predicted_seconds > made.plan.predicted_seconds
    assert parallel.searched is None


def test_it_explains_itself(found):
    question, made = found
    text = why_text(question.why(made))
    assert "bound by" in text
    assert "pure data parallel takes" in text
    assert "removed sums" in text


@pytest.mark.slow
def test_a_cut_by_operators_is_explained_as_what_it_is():
    question = asked("titanv-8")
    wishes = RankPlanOptions(
        placement=Placement.parse("0:0-6.0:7"),
        shares=(15, 1),
        shares_by=SharesBy.OPS,
        staleness=1,
        state_per_parameter=1.0,
    )
    text = why_text(question.why(question.placed(wishes)))
    assert "this is 7-way data parallel" in text
    assert "1 device idle" in text


def test_stages_that_do_not_fit_as_they_are_are_planned_to_fit():
    wishes = RankPlanOptions(
        placement=Placement.parse("0:0.0:1"), state_per_parameter=1.0, time_limit_seconds=1.0
    )
    plain = asked().placed(wishes)
    peak_bytes = max(plain.plan.predicted_peak_bytes)
    context_bytes = asked().cluster.kinds["rtx-4090"].context_bytes.value
    smaller = asked(memory_bytes=context_bytes + peak_bytes - 4e6).placed(wishes)
    assert plain.plan.stage_orders == ()
    assert max(smaller.plan.predicted_peak_bytes) < peak_bytes
    assert smaller.plan.stage_orders != ()


def test_nothing_fits_into_too_little():
    with pytest.raises(DoesNotFit):
        asked(memory_bytes=0.6e9).planned()


def test_a_device_that_the_cluster_lacks_is_named():
    with pytest.raises(UsageError, match="rtx-4090-4"):
        asked().placed(RankPlanOptions(placement=Placement.parse("0:0-8")))


def test_one_device_alone_needs_no_plan_for_many():
    question = asked()
    alone = replace(
        question,
        cluster=msgspec.structs.replace(
            question.cluster, devices=question.cluster.devices[:1], joints=()
        ),
    )
    with pytest.raises(UsageError, match="one device is fastest"):
        alone.planned()


def test_the_plan_has_one_time_and_alternatives_compare_with_it(found):
    # The split was judged to take 162 ms, its replay 170 ms, and both were shown.
    question, made = found
    why = question.why(made)
    assert why.judgement.seconds == pytest.approx(made.plan.predicted_seconds)
    estimate = made.searched.best.judgement.seconds
    assert why.estimate_factor == pytest.approx(made.plan.predicted_seconds / estimate, rel=0.01)
    shown = next(one for one in why.alternatives if one.name == "pure data parallel")
    judged = made.searched.named("pure data parallel").judgement.seconds
    assert shown.seconds == pytest.approx(why.estimate_factor * judged)
    gained = sum(gain.seconds for gain in why.gains)
    assert why.data_parallel_seconds - gained == pytest.approx(made.plan.predicted_seconds)
    assert "multiplied by" in why_text(why)


def test_data_parallel_is_all_devices_of_all_hosts_or_the_first_ones():
    two_hosts = read_cluster("titanv-2x8")
    assert str(data_parallel_placement(two_hosts)) == "0:0-7,1:0-7"
    assert str(data_parallel_placement(two_hosts, 10)) == "0:0-7,1:0-1"
    assert str(data_parallel_placement(read_cluster("rtx-4090-4"), 2)) == "0:0-1"
    with pytest.raises(UsageError, match="--ranks is 17, cluster titanv-2x8 has 16 devices"):
        data_parallel_placement(two_hosts, 17)


TWO = RankPlanOptions(placement=Placement.parse("0:0.0:1"), time_limit_seconds=2.0)


@pytest.fixture(scope="module")
def large():
    """Layers whose activations are most of what they need, on hosts that copy fast."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout()) for _ in range(6)]
        step = TrainingStep(
            model=nn.Sequential(*layers),
            batch=torch.empty(16384, 1024),
            loss_fn=lambda y: y.square().mean(),
        )
    question = asked()
    (host,) = question.cluster.hosts
    assert host.copy_bytes_per_s is not None
    rate = msgspec.structs.replace(host.copy_bytes_per_s, value=1e12)
    hosts = (msgspec.structs.replace(host, copy_bytes_per_s=rate),)
    cluster = msgspec.structs.replace(question.cluster, hosts=hosts)
    return ClusterQuestion(PreparedStages(step=step), cluster)


def choices(made):
    return {one.choice for stage in made.plan.stage_orders for one in stage.decisions}


def with_memory(question, limit_bytes):
    kind = question.cluster.kinds["rtx-4090"]
    memory = msgspec.structs.replace(
        kind.memory_bytes, value=kind.context_bytes.value + limit_bytes
    )
    kinds = {"rtx-4090": msgspec.structs.replace(kind, memory_bytes=memory)}
    return replace(question, cluster=msgspec.structs.replace(question.cluster, kinds=kinds))


def test_options_about_memory_reach_the_stages_of_a_cluster(large):
    peak_bytes = max(large.placed(TWO).plan.predicted_peak_bytes)
    small = with_memory(large, int(0.7 * peak_bytes))
    assert Choice.PACK in choices(small.placed(TWO))
    unpacked = small.placed(replace(TWO, may_pack=False))
    assert choices(unpacked) == {Choice.RECOMPUTE}
    swapped = small.placed(replace(TWO, may_pack=False, max_swap_bytes=2**34))
    assert Choice.SWAP in choices(swapped)
    assert swapped.plan.predicted_seconds < unpacked.plan.predicted_seconds
    little = small.placed(replace(TWO, may_pack=False, max_swap_bytes=2**20))
    assert max(planned_swap_bytes(little.plan)) <= 2**20 < max(planned_swap_bytes(swapped.plan))


def test_the_time_limit_and_the_hosts_speed_reach_the_search_of_stages(large, monkeypatch):
    searches = []
    monkeypatch.setattr(
        placing, "StageSearch", lambda **given: searches.append(given) or StageSearch(**given)
    )
    large.placed(replace(TWO, limit_bytes=2**40, max_swap_bytes=2**30))
    (search,) = searches
    assert search["time_limit_seconds"] == 2.0
    assert search["tier"].out_bytes_per_second == 1e12 / 2  # two ranks share the host


def test_options_reach_a_plan_whose_split_is_searched_for(monkeypatch):
    given = RankPlanOptions(
        placement=Placement.parse("0:0-3"),
        staleness=1,  # of the search, which asks for fresh weights
        may_pack=False,
        time_limit_seconds=3.0,
        max_swap_bytes=5,
    )
    placed = []
    monkeypatch.setattr(
        ClusterQuestion, "placed", lambda self, options: placed.append(options) or Clustered(0, 0)
    )
    asked().planned(options=given)
    (options,) = placed
    assert (options.may_pack, options.time_limit_seconds, options.max_swap_bytes) == (False, 3.0, 5)
    assert options.lags == ()


def test_a_host_that_does_not_say_how_fast_it_copies_cannot_be_swapped_to():
    question = asked()
    hosts = tuple(
        msgspec.structs.replace(host, copy_bytes_per_s=None) for host in question.cluster.hosts
    )
    mute = replace(question, cluster=msgspec.structs.replace(question.cluster, hosts=hosts))
    with pytest.raises(UsageError, match="has no copy_bytes_per_s"):
        mute.placed(replace(TWO, limit_bytes=2**40, max_swap_bytes=2**30))
