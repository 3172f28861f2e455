"""A run on data that is resumed reads on where it was saved, and has the bits of a single run."""

from bayplan.data.units import Limit
from bayplan.devices.machine import cache_directory
from bayplan.planning.memory.planner import Planner
from bayplan.running.checkpoints.folders import read_manifest, saved_steps
from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions
from bayplan.running.checkpoints.training_state import place_of
from bayplan.running.inputs.feed import FeedOptions
from bayplan.running.inputs.sources import open_data
from bayplan.running.runner import run_plan


def test_resumed_in_the_middle_of_an_epoch(classifier, image_folder, tmp_path):
    planner = Planner(classifier, cache=cache_directory(), time_limit_seconds=1.0)
    limit = Limit(share=0.8)
    plan = planner.plan(planner.order(limit), limit=limit)
    data, heard = open_data(str(image_folder)), []

    def run(name, **options):
        given = CheckpointOptions(folder=tmp_path / name, every=2, resume=True)
        feed = FeedOptions(workers=1, **options)
        done = run_plan(
            plan,
            classifier,
            num_steps=0,
            data=data,
            options=feed,
            checkpoints=given,
            on_step=lambda step: heard.append((step.done, step.total)),
        )
        newest = read_manifest(next(iter(saved_steps(tmp_path / name).values())))
        return list(done.losses), newest, given

    whole, wanted, _ = run("whole", epochs=2)
    assert len(whole) == 6
    heard.clear()
    first, saved, _ = run("parts", epochs=2, steps=4)
    assert place_of(saved) == {"seed": 0, "epoch": 1, "index": 8}  # a batch
    second, last, given = run("parts", epochs=2)
    assert first + second == whole
    assert last.files == wanted.files
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4), (5, 6), (6, 6)]
    assert given.is_done(None, 2)
    assert not given.is_done(None, 3)
