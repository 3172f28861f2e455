"""A real model planned for clusters that are not here, searched for and as given."""

from dataclasses import replace

import msgspec
import pytest

from bayplan.clustered import ClusterQuestion
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.placement import Placement
from bayplan.data.record import Source
from bayplan.planning.pipelines.whole_plan import check_rank_plan
from bayplan.profiling.cluster_catalogue import read_cluster
from bayplan.questions import Question
from bayplan.reporting.why import why_text
from bayplan.targets import resolve_target
from bayplan.wishes import SharesBy, Wishes

BATCH = 64


def asked(cluster="rtx-4090-4", **changes):
    question = Question(target=resolve_target("alexnet"), batch=BATCH, optimizer="sgd")
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
    return ClusterQuestion(question, described)


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
    best = made.found.best.judgement.seconds
    possible = [one for one in made.found.alternatives if one.is_possible]
    assert any(one.name == "pure data parallel" for one in possible)
    assert all(one.judgement.seconds >= 0.99 * best for one in possible)


def test_layers_and_operators_agree_about_its_time(found):
    _, made = found
    assert made.found.best.judgement.seconds == pytest.approx(made.plan.predicted_seconds, rel=0.25)


def test_it_beats_data_parallel_when_replayed(found):
    question, made = found
    parallel = question.placed(Wishes(placement=Placement.parse("0:0-3")))
    assert parallel.plan.predicted_seconds > made.plan.predicted_seconds
    assert parallel.found is None


def test_it_explains_itself(found):
    question, made = found
    text = why_text(question.why(made))
    assert "bound by" in text
    assert "pure data parallel takes" in text
    assert "removed sums" in text


def test_a_cut_by_operators_is_explained_as_what_it_is():
    question = asked("titanv-8")
    wishes = Wishes(
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
    wishes = Wishes(placement=Placement.parse("0:0.0:1"), state_per_parameter=1.0)
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
        asked().placed(Wishes(placement=Placement.parse("0:0-8")))


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
