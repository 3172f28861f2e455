"""What is said of a run on data: what it learned, and whether it waited for its samples."""

import re

import pytest
from msgspec import structs

from bayplan.data import files
from bayplan.data.record import Evaluation, InputRecord, RunRecord, Source
from bayplan.reporting.html import Report, page_of
from bayplan.reporting.inputs import evaluation_text, input_text, losses_text
from bayplan.reporting.text import record_text

GIVEN = InputRecord(
    kind="images",
    source="pictures",
    num_workers=2,
    dropped_samples=4,
    wait_seconds=(0.0, 0.02),
    made_samples=64,
    making_seconds=0.5,
)
RECORD = RunRecord(
    source=Source.MEASURED,
    method="malloc",
    step_seconds=(0.2, 0.1, 0.1),
    devices=(),
    num_samples=16,
    epoch_samples=100,
    input=GIVEN,
    evaluations=(Evaluation(epoch=0, num_samples=20, loss=0.5, accuracy=0.75, seconds=0.1),),
)


def waiting(seconds, making_seconds):
    given = structs.replace(GIVEN, wait_seconds=(seconds, seconds), making_seconds=making_seconds)
    return "\n".join(input_text(structs.replace(RECORD, input=given)))


def test_speed_and_epoch_count_the_waits():
    assert GIVEN.samples_per_second == 2 * 64 / 0.5
    assert RECORD.samples_per_second == pytest.approx(16 / 0.11)
    assert RECORD.epoch_seconds == pytest.approx(100 * 0.11 / 16)
    text = record_text(RECORD)
    assert "images of pictures: 100 samples an epoch, 4 of them left out" in text
    assert "epoch 1: loss 0.5000, accuracy 75.00% on 20 samples" in text
    assert "145.5 samples/s, waits included; an epoch takes 68" in text


def test_a_run_that_waits_is_called_data_bound():
    slow = waiting(0.05, making_seconds=1.5)
    assert slow.splitlines()[2].startswith("data-bound: a step waits 50.0 ms")
    assert "33% of the time" in slow
    assert "gives 85.33 samples/s with 2 workers, the step alone could take 160" in slow
    assert "try more --workers" in slow
    assert "try more --workers" not in waiting(0.05, making_seconds=0.5)
    assert "data-bound" not in waiting(0.01, making_seconds=0.5)


def page_waiting(seconds, making_seconds):
    given = structs.replace(GIVEN, wait_seconds=(seconds, seconds), making_seconds=making_seconds)
    page = page_of(Report.of(structs.replace(RECORD, input=given)))
    return " ".join(re.sub(r"<[^>]+>", " ", page.partition("<script")[0]).split())


def test_page_names_a_data_bound_run_with_the_rate_of_its_input():
    """The page had the step's speed alone, so a run that starved looked like a slow model."""
    slow = page_waiting(0.05, making_seconds=1.5)
    assert "It ran, data-bound" in slow
    assert "33 % of the time waits for data input gives 85.33 samples/s" in slow
    assert "the input gives 85.33 samples/s with 2 workers" in slow
    assert "the step alone could take 160 samples/s" in slow
    assert "The run is data-bound: try more --workers." in slow
    assert "accuracy samples seconds 1 0.5000 75.00% 20 0.1" in slow
    quick = page_waiting(0.01, making_seconds=0.5)
    assert "data-bound" not in quick
    assert "the input gives 256 samples/s with 2 workers" in quick


def test_page_of_a_run_without_data_says_nothing_of_an_input():
    page = page_of(Report.of(structs.replace(RECORD, input=None, evaluations=())))
    assert "The input" not in page


def test_samples_that_could_not_be_read_are_told():
    given = structs.replace(GIVEN, num_skipped=3, skipped=("cat/1.jpg is no image",))
    text = "\n".join(input_text(structs.replace(RECORD, input=given)))
    assert "3 samples could not be read, such as\n  cat/1.jpg is no image" in text


def test_an_evaluation_without_numbers_is_told():
    assert "loss no number on 7" in evaluation_text(Evaluation(epoch=0, num_samples=7, loss=None))
    text = Evaluation(epoch=1, num_samples=7, loss=2.0, perplexity=7.389)
    assert evaluation_text(text).startswith("epoch 2: loss 2.0000, perplexity 7.389 on 7")


def test_many_losses_are_cut_short():
    assert losses_text([1.0, 0.5]) == "losses 1.0000, 0.5000"
    many = losses_text([float(number) for number in range(100)])
    assert many.startswith("losses 0.0000, 1.0000,")
    assert ", …, 94.0000," in many


def test_record_with_data_is_written_and_read(tmp_path):
    files.write(tmp_path / "run.json", RECORD)
    assert files.read(tmp_path / "run.json", RunRecord) == RECORD
