"""What cannot be written leaves what was written alone; what cannot be trusted is refused."""

import contextlib
import os
import random
import resource
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

from bayplan.data.errors import FileFault, UsageError
from bayplan.running.checkpoints import folders
from bayplan.running.checkpoints.folders import newest_whole, saved_steps
from bayplan.running.checkpoints.saving import Saver
from bayplan.running.checkpoints.storage import CheckpointReader
from bayplan.running.checkpoints.training_state import Saved, TrainingState
from bayplan.step import TrainingStep

NUMBERS = {"model.weight": torch.arange(1 << 16, dtype=torch.float32)}


def saved(**more):
    made = Saved(dict(NUMBERS))
    made.put("random", more)
    return made


def save(saver, step, **more):
    return saver.save(saved(**more), step=step, aliases={})


@contextlib.contextmanager
def files_up_to(size_bytes):
    """Let no file of this process grow larger, as a full quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_of_and_the_last_checkpoint_stays(tmp_path):
    lines = []
    saver = Saver(tmp_path, tell=lines.append)
    save(saver, 1).result()
    with files_up_to(1 << 16), pytest.raises(FileFault, match=r"step 2 .*File too large") as caught:
        save(saver, 2).result()
    assert lines == [str(caught.value)]
    assert lines[0].endswith("the last one is step-00000001")
    assert {entry.name for entry in tmp_path.iterdir()} == {".lock", "step-00000001"}
    found = newest_whole(tmp_path, lines.append)
    assert found is not None
    assert torch.equal(CheckpointReader(*found).tensor("model.weight"), NUMBERS["model.weight"])
    save(saver, 3).result()
    assert list(saved_steps(tmp_path)) == [3, 1]


def test_a_full_file_system_is_told_of_too(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a file system can be mounted here by nobody")
    try:
        saver = Saver(tmp_path)
        save(saver, 1).result()
        with pytest.raises(
            FileFault, match="No space left on device; the last one is step-0000000"
        ):
            save(saver, 2).result()
        assert list(saved_steps(tmp_path)) == [1]
        assert newest_whole(tmp_path, print) is not None
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


class Room:
    """Two ranks of one process."""

    num_ranks = 2

    def __init__(self, told, rank):
        self._told, self.rank = told, rank

    def tell(self, key, content):
        self._told[key] = content

    def heard(self, key):
        return self._told.get(key)

    def forget(self, key):
        self._told.pop(key, None)


def test_ranks_end_alike_where_one_cannot_write(tmp_path, monkeypatch):
    told = {}
    savers = [Saver(tmp_path, meeting=Room(told, rank)) for rank in range(2)]
    for saver in savers:
        saver._key = "same"  # in two processes they are
    parts = [saved(), Saved({"model.other": torch.ones(3)})]
    begun = [saver.save(own, step=1, aliases={}) for saver, own in zip(savers, parts, strict=True)]
    assert begun[0].result() == begun[1].result()
    assert set(folders.read_manifest(begun[0].result()).tensors) == {"model.weight", "model.other"}
    parts[1] = Saved({"model.other": torch.ones(3, dtype=torch.complex32)})
    begun = [saver.save(own, step=2, aliases={}) for saver, own in zip(savers, parts, strict=True)]
    for done in begun:
        with pytest.raises(FileFault, match=r"rank 1: model\.other is of torch\.complex32"):
            done.result()
    assert list(saved_steps(tmp_path)) == [1]


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    with folders.locked(tmp_path), pytest.raises(FileFault, match="another run writes"):
        save(Saver(tmp_path), 1).result()


def test_training_goes_on_while_it_is_written(tmp_path):
    """What is saved are the numbers at the call, whatever becomes of them."""
    saver = Saver(tmp_path)
    numbers = torch.zeros(1 << 20)
    begun = saver.save(Saved({"model.weight": numbers}, {"random": {}}), step=1, aliases={})
    numbers.fill_(1)
    folder = begun.result()
    assert not CheckpointReader(folder).tensor("model.weight").any()


def test_what_was_being_replaced_when_the_run_was_killed_is_found(tmp_path):
    save(Saver(tmp_path), 4).result()
    (tmp_path / "step-00000004").rename(tmp_path / ".step-00000004.replaced")
    found = newest_whole(tmp_path, print)
    assert found is not None
    assert found[1].step == 4
    save(Saver(tmp_path), 5).result()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".lock",
        "step-00000004",
        "step-00000005",
    ]


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(tmp_path, what):
    folder = save(Saver(tmp_path), 1).result()
    path = folder / "model-00000.safetensors"
    shutil.move(path, tmp_path / "elsewhere")
    if what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    lines = []
    with pytest.raises(FileFault, match="no checkpoint in"):
        newest_whole(tmp_path, lines.append)
    assert "model-00000.safetensors" in lines[0]


def test_what_could_only_be_pickled_is_refused_by_name():
    with pytest.raises(UsageError, match=r"parts\.scheduler\.lambdas\.0 is a function"):
        Saved().put("parts", {"scheduler": {"lambdas": [lambda: 1]}})


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {"random": 1},
        {"random": {"dict": [["torch", 3]]}},
        {"random": {"dict": [["torch", {"tensor": "model.weight"}], ["python", {"tuple": [3]}]]}},
        {"random": {"tensor": "nowhere"}},
        {"random": {"pickle": "gASV"}},
        {"random": {"dict": [[[], 1]]}},
        {"random": {"dict": []}, "groups": [1]},
        {"random": {"float": "one"}},
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, state):
    model = torch.nn.Linear(2, 1, bias=False)
    step = TrainingStep(model=model, batch=torch.ones(2, 2), loss_fn=torch.sum)
    kept = TrainingState(step, None)
    saver = Saver(tmp_path)
    made = kept.saved(lambda name: True, lambda name: True, is_first=True, parts={}, data=None)
    folder = saver.save(made, step=1, aliases={}).result()
    checkpoint = msgspec.structs.replace(folders.read_manifest(folder), state=state)
    before = random.getstate()

    def load():
        kept.check(checkpoint, ())
        kept.restore(folder, checkpoint, holds=lambda name: True, parts={})

    with pytest.raises(FileFault, match=r"checkpoint|no tensor 'nowhere'"):
        load()
    random.setstate(before)


@pytest.mark.parametrize("place", [".", "step-00000001", "step-00000001/manifest.json"])
def test_what_others_can_write_is_neither_written_to_nor_read(tmp_path, place):
    # Whoever may change a checkpoint decides what is trained on: its digests lie beside it.
    root = tmp_path / "shared"
    saver = Saver(root)
    save(saver, 1).result()
    (root / place).chmod(0o777)
    lines = []
    if place == ".":
        with pytest.raises(FileFault, match="shared may be written by everybody"):
            save(saver, 2).result()
        assert list(saved_steps(root)) == [1]
    else:
        with pytest.raises(FileFault, match=r"no checkpoint in .* is whole"):
            newest_whole(root, lines.append)
        assert "may be written by everybody" in lines[0]


def test_a_save_without_memory_for_its_copy_leaves_training_alone(tmp_path):
    # The copy was made outside of what is caught: a run that was saved ended by it.
    lines = []
    saver = Saver(tmp_path, tell=lines.append)
    save(saver, 1).result()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    huge = Saved({"model.weight": torch.empty(1).expand(1 << 34)})
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), limits[1]))
    try:
        begun = saver.save(huge, step=2, aliases={})
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    with pytest.raises(FileFault, match=r"no checkpoint of step 2 .*: Cannot allocate memory"):
        begun.result()
    assert lines[0].endswith("the last one is step-00000001")
    save(saver, 3).result()
    assert list(saved_steps(tmp_path)) == [3, 1]
