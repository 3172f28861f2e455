"""Models learn real data, and a plan changes no bit of it."""

import json
import signal
import subprocess

import psutil
import pytest
import torch

from bayplan.data import files
from bayplan.data.errors import BayplanError, PlanBroken
from bayplan.data.record import DataPosition, RunRecord
from bayplan.data.units import Limit
from bayplan.devices.device import HOST
from bayplan.devices.machine import cache_directory
from bayplan.planning.memory.planner import Planner
from bayplan.running.inputs.feed import FeedOptions
from bayplan.running.inputs.sources import open_data
from bayplan.running.inputs.training import feed_of, form_of, train_on
from bayplan.running.recorder import Recorder
from bayplan.running.runner import run_plan

OBJECTS_BYTES = 64 << 10  # of Python, which count beside models as small as these
FOLDERS = {"images": "image_folder", "tar shards": "shard_folder", "tokens": "token_folder"}


def plan_of(prepared, share):
    planner = Planner(prepared, cache=cache_directory(), time_limit_seconds=1.0)
    limit = Limit(share=share)
    return planner.plan(planner.order(limit), limit=limit)


def train_plainly(prepared, data, options, *, seed=0):
    form = form_of(prepared)  # the target's builder runs for this, too
    torch.manual_seed(seed)
    step = prepared.build()
    feed = feed_of(data, step, form, options)
    recorder = Recorder(None, cache=cache_directory(), device=HOST.where, curve=False, clock="wall")
    return train_on(feed, step, recorder).record


@pytest.fixture
def data_of(request):
    return lambda kind: open_data(str(request.getfixturevalue(FOLDERS[kind])))


@pytest.mark.parametrize("kind", FOLDERS)
def test_planned_training_learns_and_has_the_bits_of_plain_training(
    kind, data_of, classifier, reader
):
    data, prepared = data_of(kind), reader if kind == "tokens" else classifier
    assert data.kind == kind
    plan = plan_of(prepared, 1.0 if kind == "tokens" else 0.8)
    options = FeedOptions(epochs=5, workers=1)
    run = run_plan(plan, prepared, num_steps=0, data=data, options=options)
    beside = run.measured.steady_peak_bytes - run.predicted.peak_bytes
    assert abs(beside) < OBJECTS_BYTES
    plain = train_plainly(prepared, data, options)
    assert run.losses == plain.losses
    assert len(run.losses) == 5 * (3 if kind != "tokens" else 24)
    planned = run.measured
    pairs = list(zip(planned.evaluations, plain.evaluations, strict=True))
    assert len(pairs) == 5
    for ours, theirs in pairs:
        assert (ours.epoch, ours.loss, ours.accuracy) == (
            theirs.epoch,
            theirs.loss,
            theirs.accuracy,
        )
    last = planned.evaluations[-1]
    if kind == "tokens":
        assert last.accuracy is None
        assert last.perplexity is not None
        assert last.perplexity < 8.5  # half of what guessing among 17 gives
    else:
        assert last.num_samples == 9
        assert last.accuracy is not None
        assert last.accuracy > 0.6  # chance is a third


def test_workers_change_nothing(image_folder, classifier):
    data = open_data(str(image_folder))
    runs = [
        train_plainly(classifier, data, FeedOptions(epochs=2, workers=workers))
        for workers in (0, 1, 2)
    ]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert {each.evaluations[-1].loss for each in runs} == {runs[0].evaluations[-1].loss}
    assert [each.input.num_workers for each in runs] == [0, 1, 2]


def test_another_seed_is_another_order(image_folder, classifier):
    data = open_data(str(image_folder))
    losses = [
        train_plainly(
            classifier, data, FeedOptions(workers=0, position=DataPosition(seed=seed))
        ).losses
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_record_tells_where_the_data_are_and_how_fast_they_came(image_folder, classifier, tmp_path):
    data = open_data(str(image_folder))
    plan = plan_of(classifier, 1.0)
    path = tmp_path / "run.json"
    options = FeedOptions(steps=5, workers=0)
    run = run_plan(plan, classifier, num_steps=0, path=path, data=data, options=options)
    measured = run.measured
    assert files.read(path, RunRecord) == measured
    assert (measured.num_samples, measured.epoch_samples) == (8, 24)
    assert len(measured.losses) == 5
    assert len(measured.step_seconds) == len(measured.input.wait_seconds) == 4
    assert measured.input.position == DataPosition(epoch=1, index=16)
    assert measured.input.made_samples == 40
    assert measured.input.samples_per_second > 0
    assert [each.epoch for each in measured.evaluations] == [0]
    waited = measured.input.typical_wait_seconds + measured.typical_step_seconds
    assert measured.samples_per_second == pytest.approx(8 / waited)


def test_ctrl_c_keeps_what_was_done(image_folder, classifier, tmp_path):
    def stop(step):
        if step.done == 4:
            raise KeyboardInterrupt

    path = tmp_path / "run.json"
    run = run_plan(
        plan_of(classifier, 1.0),
        classifier,
        num_steps=0,
        path=path,
        data=open_data(str(image_folder)),
        options=FeedOptions(epochs=9, workers=1),
        on_step=stop,
    )
    assert run.stopped_by == signal.SIGINT
    kept = json.loads(path.read_text())
    assert len(kept["losses"]) == 4
    assert len(kept["evaluations"]) == 1
    assert kept["input"]["position"] == {"seed": 0, "epoch": 1, "index": 0}


def test_synthetic_samples_make_as_many_steps_and_read_nothing(image_folder, classifier):
    data = open_data(str(image_folder)).synthetic()
    record = train_plainly(classifier, data, FeedOptions(epochs=2))
    assert len(record.losses) == 6
    assert record.input.samples_per_second is None
    assert not record.evaluations
    assert record.losses[-1] < record.losses[0]  # the same batch again and again
    counted = train_plainly(classifier, open_data("synthetic:24"), FeedOptions(epochs=2))
    assert counted.losses == record.losses


def test_worker_that_is_killed_ends_the_run_with_words(image_folder, classifier):
    def kill(step):
        for child in psutil.Process().children():
            child.kill()

    data, options = open_data(str(image_folder)), FeedOptions(epochs=40, workers=1)
    with pytest.raises(PlanBroken, match=r"reads samples has died: .*use fewer --workers"):
        run_plan(
            plan_of(classifier, 1.0),
            classifier,
            num_steps=0,
            data=data,
            options=options,
            on_step=kill,
        )


def test_worker_ends_by_the_signal_of_its_own_run_only(image_folder, classifier):
    """SIGTERM of a scheduler goes to all processes of a job; a run that was to save died of that.

    Workers still take that of the run, which would wait for ever at its end for those that do not.
    """

    def of_others(step):
        for child in psutil.Process().children() if step.done == 1 else ():
            subprocess.run(["kill", "-TERM", str(child.pid)], check=True)

    def of_its_own(step):
        for child in psutil.Process().children():
            child.terminate()
            child.wait(60)

    plan, data = plan_of(classifier, 1.0), open_data(str(image_folder))
    options, end = FeedOptions(epochs=4, workers=1), []

    def train(on_step):
        run_plan(
            plan,
            classifier,
            num_steps=0,
            data=data,
            options=options,
            on_step=lambda step: (on_step(step), end.append(step.done == step.total)),
        )

    train(of_others)
    assert end[-1]
    with pytest.raises(BayplanError):  # of a batch that is missing
        train(of_its_own)


def test_frozen_parts_stay_frozen_through_an_evaluation(image_folder, classifier):
    step, form = classifier.build(), form_of(classifier)
    frozen = step.model.norms[0].eval()
    options = FeedOptions(workers=0)
    feed = feed_of(open_data(str(image_folder)), step, form, options)
    recorder = Recorder(None, cache=cache_directory(), device=HOST.where, curve=False, clock="wall")
    assert train_on(feed, step, recorder).record.evaluations
    assert not frozen.training
    assert step.model.training
