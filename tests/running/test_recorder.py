"""`bayplan.record` around real loops: its steps, the true peak, and what may go wrong."""

import gc

import pytest
import torch
from torch import nn

import bayplan
from bayplan.data import files
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.record import RunRecord, Source
from bayplan.devices.meters import resident_tensor_bytes

MIB = 2**20
# What Python and torch allocate beside a small loop's tensors, and what malloc rounds them up by.
SLACK_BYTES = 128 * 1024
CPU = torch.device("cpu")


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_steps_of_an_optimizer_are_counted_and_timed(make_training, train_one):
    model, optimizer, inputs = make_training()
    with bayplan.record() as recording:
        for _ in range(4):
            train_one(model, optimizer, inputs)
    record = recording.result
    assert record.source is Source.MEASURED
    assert len(record.step_seconds) == len(record.devices[0].step_peak_bytes) == 4
    assert all(seconds > 0 for seconds in record.step_seconds)
    assert record.peak_bytes >= max(record.devices[0].step_peak_bytes)
    assert record.devices[0].device == "cpu"
    assert record.versions["torch"] == torch.__version__


def test_peak_is_exact_for_a_known_pattern():
    kept = block(3 * MIB)
    gc.collect()
    before = resident_tensor_bytes(CPU)
    assert before >= 3 * MIB
    with bayplan.record() as recording:
        first = block(8 * MIB)
        passing = block(4 * MIB)
        del passing
        recording.step()
        second = block(2 * MIB)
        recording.step()
        del first, second
        recording.step()
    del kept
    assert recording.result.method == "malloc"
    (device,) = recording.result.devices
    expected = [before + 12 * MIB, before + 10 * MIB, before + 10 * MIB]
    for found, wanted in zip(device.step_peak_bytes, expected, strict=True):
        assert abs(found - wanted) < SLACK_BYTES
    assert device.peak_bytes == max(device.step_peak_bytes)


def test_formulas_that_a_state_keeps_are_there_when_a_recording_starts():
    """A recurrent model whose state keeps its formulas was measured 1 % below its true peak.

    The next forward frees formulas that were there before, which the meter sees as memory less.
    """
    weight = nn.Parameter(torch.ones(16))
    state = []

    def step():
        value = weight
        for _ in range(2000):
            value = value + 1
        state[:] = [value]
        value.sum().backward()
        weight.grad = None

    def last_peak():
        with bayplan.record() as recording:
            for _ in range(3):
                step()
                recording.step()
        return recording.result.devices[0].step_peak_bytes[-1]

    without, with_state = last_peak(), last_peak()
    assert without > 400 * 2000  # what is kept
    assert abs(with_state - without) < 0.2 * without


def test_peak_after_the_last_step_counts():
    before = resident_tensor_bytes(CPU)
    with bayplan.record() as recording:
        recording.step()
        block(16 * MIB)
    (device,) = recording.result.devices
    assert abs(device.peak_bytes - before - 16 * MIB) < SLACK_BYTES
    assert device.step_peak_bytes[0] < before + SLACK_BYTES


def test_peak_counts_what_kernels_allocate_inside():
    values = torch.randn(MIB)
    before = resident_tensor_bytes(CPU)
    with bayplan.record() as recording:
        ordered = values.sort()
    tensors = before + sum(part.untyped_storage().nbytes() for part in ordered)
    assert recording.result.peak_bytes > tensors + MIB


def test_gradients_that_nobody_looked_at_are_there_at_the_start():
    """Autograd holds a fresh gradient in C++ only; it must count all the same, for it can die."""
    weight = nn.Parameter(torch.ones(2 * MIB))
    weight.sum().backward()
    with bayplan.record() as recording:
        recording.step()
    assert recording.result.peak_bytes >= 2 * weight.nbytes


def test_shared_storage_is_counted_once():
    base = block(5 * MIB)
    before = resident_tensor_bytes(CPU)
    views = [base[index:] for index in range(10)]
    assert resident_tensor_bytes(CPU) == before
    del base
    gc.collect()
    assert resident_tensor_bytes(CPU) == before
    del views
    assert resident_tensor_bytes(CPU) <= before - 5 * MIB


def test_steps_by_hand_need_no_optimizer(make_training):
    model, _, inputs = make_training()
    with bayplan.record() as recording:
        for _ in range(3):
            with torch.no_grad():
                model(inputs)
            recording.step()
    assert len(recording.result.step_seconds) == 3


def test_steps_by_hand_win_over_an_optimizer(make_training, train_one):
    """A loop with both is one step per mark, and its first step reaches back to the start."""
    model, optimizer, inputs = make_training()
    with bayplan.record() as recording:
        block(16 * MIB)
        for _ in range(3):
            for _ in range(2):
                train_one(model, optimizer, inputs)
            recording.step()
    (device,) = recording.result.devices
    assert len(recording.result.step_seconds) == 3
    assert device.step_peak_bytes[0] == device.peak_bytes >= 16 * MIB
    assert device.step_peak_bytes[1] < device.peak_bytes - 15 * MIB


def test_what_lies_between_steps_is_left_out():
    with bayplan.record() as recording:
        assert recording.last_step_peak_bytes == 0
        for _ in range(2):
            passing = block(8 * MIB)  # an evaluation
            del passing
            recording.begin_step()
            kept = block(2 * MIB)
            recording.step()
            del kept
    (device,) = recording.result.devices
    assert recording.last_step_peak_bytes == device.step_peak_bytes[-1]
    assert len(device.step_peak_bytes) == len(recording.result.step_seconds) == 2
    start_bytes = resident_tensor_bytes(CPU)
    for found in (*device.step_peak_bytes, device.peak_bytes):
        assert abs(found - start_bytes - 2 * MIB) < SLACK_BYTES


def test_second_optimizer_ends_no_step(make_training, train_one):
    model, optimizer, inputs = make_training()
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with bayplan.record() as recording:
        for _ in range(2):
            train_one(model, optimizer, inputs)
            other.step()
    assert len(recording.result.step_seconds) == 2


def test_no_steps_at_all_is_a_record_too(tmp_path):
    with bayplan.record(tmp_path / "run.json"):
        pass
    record = files.read(tmp_path / "run.json", RunRecord)
    assert record.step_seconds == ()
    assert record.typical_step_seconds == 0.0


def test_written_record_is_the_result(tmp_path, make_training, train_one):
    model, optimizer, inputs = make_training()
    with bayplan.record(str(tmp_path / "new" / "run.json"), curve=True) as recording:
        train_one(model, optimizer, inputs)
    assert files.read(tmp_path / "new" / "run.json", RunRecord) == recording.result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
def test_loop_that_ends_early_is_recorded_so_far(tmp_path, error, make_training, train_one):
    model, optimizer, inputs = make_training()

    def train() -> None:
        for index in range(5):
            if index == 2:
                raise error
            train_one(model, optimizer, inputs)

    with pytest.raises(error), bayplan.record(tmp_path / "run.json"):
        train()
    assert len(files.read(tmp_path / "run.json", RunRecord).step_seconds) == 2


def test_nothing_is_listened_to_after_the_block(make_training, train_one):
    model, optimizer, inputs = make_training()
    with bayplan.record() as recording:
        train_one(model, optimizer, inputs)
    train_one(model, optimizer, inputs)
    assert len(recording.result.step_seconds) == 1


def test_step_begins_inside_the_block():
    with pytest.raises(UsageError, match="inside the `with` block"):
        bayplan.record().begin_step()


def test_recording_out_of_its_block_is_refused():
    recording = bayplan.record()
    with pytest.raises(UsageError, match="inside the `with` block"):
        recording.step()
    with pytest.raises(UsageError, match="still running"), recording:
        _ = recording.result
    with pytest.raises(UsageError, match="inside the `with` block"):
        recording.step()
    with pytest.raises(UsageError, match=r"call bayplan.record\(\) for another"), recording:
        pass


def test_unwritable_path_is_refused_before_the_loop(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "run.json", tmp_path):
        with pytest.raises(FileFault, match="cannot write"), bayplan.record(path):
            pytest.fail("the loop ran")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_path_that_breaks_meanwhile_hides_no_error_of_the_loop(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()

    def block_folder() -> None:
        folder.rmdir()
        folder.write_text("in the way")

    def fail() -> None:
        block_folder()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, bayplan.record(folder / "run.json"):
        fail()
    assert "cannot write" in caught.value.__notes__[0]
    folder.unlink()
    folder.mkdir()
    with (
        pytest.raises(FileFault, match="cannot write"),
        bayplan.record(folder / "run.json") as recording,
    ):
        block_folder()
    assert recording.result.step_seconds == ()
