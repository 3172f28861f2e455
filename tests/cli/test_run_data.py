"""`bayplan run` of a target, with and without data, as a user types it."""

import json
import re

import msgspec
import numpy
import pytest
from PIL import Image

from bayplan.data import files
from bayplan.data.record import RunRecord
from bayplan.running.checkpoints.folders import saved_steps

PICTURES = """\
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images):
        return images + torch.relu(self.norm(self.conv(images)))


def pictures(batch_size=16, num_classes=10):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        *(Block(16) for _ in range(5)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )
    batch = torch.randn(batch_size, 3, 40, 40), torch.randint(num_classes, (batch_size,))
    return model, batch, nn.CrossEntropyLoss()
"""
QUICK = ("--memory", "90%", "--time-limit", 1)


@pytest.fixture
def picture_project(project, add_to_project):
    """The folder with `train:pictures`, and pictures of two classes: bright and dark."""
    add_to_project(PICTURES)
    drawn = numpy.random.default_rng(0)
    for part, count in (("train", 20), ("val", 5)):
        for name, light in (("bright", 150), ("dark", 20)):
            folder = project / "pictures" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(light, light + 90, (50, 60, 3)).astype(numpy.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return project


def test_target_is_planned_and_trained_on_a_folder_at_once(picture_project, run_alone):
    data = ("--data", "pictures", "--epochs", 3, "--workers", 1)
    ended = run_alone(picture_project, "train:pictures", *QUICK, *data, "-o", "run.json")
    assert ended.returncode == 0, ended.stderr
    out = ended.stdout
    assert re.search(r"^planned peak .* \(\d+% of plain\)", out)
    assert "images of pictures: 40 samples an epoch, 8 of them left out" in out
    assert len(re.findall(r"^epoch \d: loss .*, accuracy .* on 10 samples", out, re.M)) == 3
    assert re.search(r"a step waits .* for its samples, \d+% of the time; the input gives", out)
    measured = files.read(picture_project / "run.json", RunRecord)
    assert len(measured.losses) == 6
    accuracy, given = measured.evaluations[-1].accuracy, measured.input
    assert accuracy is not None
    assert accuracy > 0.7
    assert given is not None
    assert given.num_workers == 1
    # The head has as many outputs as the data have classes.
    twice = run_alone(picture_project, "train:pictures,num_classes=2", *QUICK, *data, "--json")
    assert msgspec.json.decode(twice.stdout, type=RunRecord).losses == measured.losses


def test_plan_file_is_trained_on_data(picture_project, bayplan, run_alone, check_refusal):
    target = "train:pictures,num_classes=2"
    assert bayplan("plan", target, *QUICK, "-o", "p.json").code == 0
    options = ("--target", target, "--data", "pictures", "--steps", 3)
    ended = run_alone(picture_project, "p.json", *options)
    assert ended.returncode == 0, ended.stderr
    assert "epoch 1: loss" in ended.stdout
    would = bayplan("run", "p.json", *options, "--epochs", 1, "--dry-run")
    assert would.out.startswith("would run 2 steps: planned peak")
    ten = bayplan("plan", "train:pictures,num_classes=1", *QUICK, "-o", "ten.json")
    assert ten.code == 0, ten.err
    refused = bayplan(
        "run", "ten.json", "--target", "train:pictures,num_classes=1", "--data", "pictures"
    )
    check_refusal(refused, 2, "pictures has 2 classes, and the model tells 1 apart")


def test_synthetic_samples_run_as_many_steps(picture_project, run_alone):
    options = ("--data", "synthetic:50", "--json")
    ended = run_alone(picture_project, "train:pictures", *QUICK, *options)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)
    assert len(record["losses"]) == 3
    assert record["input"]["kind"] == "synthetic"
    like = ("--data", "pictures", "--synthetic", "--epochs", 2)
    ended = run_alone(picture_project, "train:pictures", *QUICK, *like)
    assert "synthetic: 40 samples an epoch" in ended.stdout
    assert "nothing is read" in ended.stdout


def test_target_without_data_runs_on_its_own_batch(picture_project, run_alone):
    ended = run_alone(picture_project, "train:pictures", "--time-limit", 1, "--steps", 2)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^losses \d\.\d{4}, \d\.\d{4}$", ended.stdout, re.M)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("train:pictures", "--epochs", 2), ("about --data", "--data synthetic:1281167")),
        (("train:pictures", "--data", "nowhere"), ("cannot read nowhere", "No such file")),
        (("train:pictures", "--data", "pictures", "--epochs", 0), ("--epochs is 0",)),
        (("train:pictures", "--data", "pictures", "--workers", -1), ("--workers is -1",)),
        (("train:pictures", "--data", "pictures", "-b", 64), ("batch of 64", "the 40 samples")),
        (("train:pictures", "--data", "pictures", "--optimizer", "none"), ("needs an optimizer",)),
        (("train:pictures", "--target", "train:pictures"), ("--target", "says it twice")),
        (("train:pictures,depth=3",), ("no parameter 'depth'",)),
        (("train:pictures,batch_size=3",), ("use --batch",)),
        (("resnet18,image_side=64",), ("resnet18 has no 'image_side'", "'image_size'")),
        (("resnet18,64",), ("name=number", "resnet18,image_size=64,num_classes=10")),
        (("alexnet-oneflow,image_size=64",), ("6400 features",)),
        (("resnet5O",), ("no reference model 'resnet5O'", "resnet50")),
        (("plan.json", "--memory", "1GiB"), ("--memory 1GiB needs a target",)),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(
    picture_project, bayplan, check_refusal, options, words
):
    check_refusal(bayplan("run", *options), 2, *words)


@pytest.mark.alone
def test_ranks_are_trained_and_evaluated_on_the_same_samples(picture_project, bayplan, run_alone):
    data = ("--data", "pictures", "--epochs", 2, "--workers", 1, "--json")
    one = msgspec.json.decode(
        run_alone(picture_project, "train:pictures", "--time-limit", 1, *data).stdout,
        type=RunRecord,
    )
    placed = ("--placement", "0:0.0:1", "--shares-by", "ops")
    for more in ((), ("--staleness", 1)):
        answer = bayplan("run", "train:pictures", *placed, *more, *data)
        assert answer.code == 0, answer.err
        ranks = msgspec.json.decode(answer.out, type=RunRecord)
        assert len(ranks.losses) == 4
        assert ranks.input.position == one.input.position
        assert [each.num_samples for each in ranks.evaluations] == [10, 10]
        if not more:  # else weights are old
            assert ranks.losses == pytest.approx(one.losses, rel=1e-4)
            ours = [each.loss for each in ranks.evaluations]
            assert ours == pytest.approx([each.loss for each in one.evaluations], rel=1e-3)
    assert "epoch 2: loss" in bayplan("run", "train:pictures", *placed, *data[:-1]).out


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--staleness", 1)], ids=["synchronous", "stale"])
def test_ranks_read_on_where_they_were_saved(bayplan, picture_project, more):
    placed = ("--placement", "0:0.0:1", "--shares-by", "ops", *more)
    data = ("--data", "pictures", "--epochs", 2, "--workers", 1, "--json")

    def run(folder, *arguments):
        saved = ("--checkpoint", folder, "--every", 1)
        answer = bayplan("run", "train:pictures", *placed, *data, *saved, *arguments)
        assert answer.code == 0, answer.err
        assert "no checkpoint of" not in answer.err
        return msgspec.json.decode(answer.out, type=RunRecord)

    whole = run("whole")
    first, second = run("parts", "--steps", 3), run("parts", "--resume")
    assert len(whole.losses) == 4
    # Batches in flight end with a run, so their losses are in both.
    assert second.losses == whole.losses[-len(second.losses) :]
    assert first.losses == whole.losses[: len(first.losses)]
    assert second.input.position == whole.input.position
    last = next(iter(saved_steps(picture_project / "parts")))
    assert last == 4
    done = bayplan("run", "train:pictures", *placed, *data, "--checkpoint", "parts", "--resume")
    assert "nothing left to do" in done.out, done.err
