"""`bayplan.record` around real loops: steps, the true peak, the curve, and what may go wrong.

`SLACK_BYTES` is what Python and torch allocate beside the tensors of a small loop, and what malloc
rounds them up by.
"""

import contextlib
import gc
import time

import pytest
import torch
from torch import nn

import bayplan
from bayplan.data import files
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.record import RunRecord, Source
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.devices.meters import resident_tensor_bytes

MIB = 2**20
SLACK_BYTES = 128 * 1024
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(cache))


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def make_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, torch.randn(32, 256)


def train_one(model, optimizer, inputs) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def test_steps_of_an_optimizer_are_counted_and_timed():
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


def test_steps_by_hand_need_no_optimizer():
    model, _, inputs = make_training()
    with bayplan.record() as recording:
        for _ in range(3):
            with torch.no_grad():
                model(inputs)
            recording.step()
    assert len(recording.result.step_seconds) == 3


def test_steps_by_hand_win_over_an_optimizer():
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


def test_second_optimizer_ends_no_step():
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


def test_written_record_is_the_result(tmp_path):
    model, optimizer, inputs = make_training()
    with bayplan.record(str(tmp_path / "new" / "run.json"), curve=True) as recording:
        train_one(model, optimizer, inputs)
    assert files.read(tmp_path / "new" / "run.json", RunRecord) == recording.result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
def test_loop_that_ends_early_is_recorded_so_far(tmp_path, error):
    model, optimizer, inputs = make_training()

    def train() -> None:
        for index in range(5):
            if index == 2:
                raise error
            train_one(model, optimizer, inputs)

    with pytest.raises(error), bayplan.record(tmp_path / "run.json"):
        train()
    assert len(files.read(tmp_path / "run.json", RunRecord).step_seconds) == 2


def test_nothing_is_listened_to_after_the_block():
    model, optimizer, inputs = make_training()
    with bayplan.record() as recording:
        train_one(model, optimizer, inputs)
    train_one(model, optimizer, inputs)
    assert len(recording.result.step_seconds) == 1


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


def test_nested_recordings_each_see_their_own_peak():
    """Both read one counter, and each resets its peak at its own steps."""
    before = resident_tensor_bytes(CPU)
    with bayplan.record() as outer:
        block(20 * MIB)
        with bayplan.record() as inner:
            block(5 * MIB)
            inner.step()
            block(3 * MIB)
            inner.step()
        outer.step()
        block(2 * MIB)
        outer.step()
    for recording, megabytes in ((outer, (20, 2)), (inner, (5, 3))):
        (device,) = recording.result.devices
        for found, wanted in zip(device.step_peak_bytes, megabytes, strict=True):
            assert abs(found - before - wanted * MIB) < SLACK_BYTES


def test_nested_recordings_both_hear_the_optimizer():
    model, optimizer, inputs = make_training()
    train_one(model, optimizer, inputs)
    with bayplan.record() as outer, bayplan.record() as inner:
        for _ in range(3):
            train_one(model, optimizer, inputs)
            block(8 * MIB)
    peaks = [recording.result.devices[0].step_peak_bytes for recording in (outer, inner)]
    assert len(peaks[0]) == len(peaks[1]) == 3
    # The first step of the outer one also saw how the inner one looked for tensors.
    for one, other in zip(peaks[0][1:], peaks[1][1:], strict=True):
        assert one > 8 * MIB
        assert abs(one - other) < SLACK_BYTES


def test_profile_inside_a_recording_leaves_its_peak_alone():
    """The profiler resets the counter's peak at every operator."""
    before = resident_tensor_bytes(CPU)
    with bayplan.record() as recording:
        block(32 * MIB)
        bayplan.profile(
            nn.Linear(8, 8), torch.ones(2, 8), lambda y: y.sum(), repeats=1, use_cache=False
        )
    assert abs(recording.result.peak_bytes - before - 32 * MIB) < 2 * SLACK_BYTES


def test_curve_runs_forward_in_time_and_reaches_the_peak():
    model, optimizer, inputs = make_training()
    with bayplan.record(curve=True) as recording:
        for _ in range(3):
            train_one(model, optimizer, inputs)
            block(4 * MIB)
    (device,) = recording.result.devices
    curve = device.curve
    assert curve is not None
    assert curve.seconds[0] == 0.0
    assert list(curve.seconds) == sorted(curve.seconds)
    assert len(curve.seconds) > 10
    assert max(curve.total_bytes) <= device.peak_bytes
    assert device.peak_bytes - max(curve.total_bytes) < SLACK_BYTES
    assert recording.result.not_counted == ()


def test_no_curve_unless_asked_for():
    with bayplan.record() as recording:
        block(MIB)
    assert recording.result.devices[0].curve is None


def test_nested_curves_each_have_their_own_part():
    with bayplan.record(curve=True) as outer:
        block(2 * MIB)
        with bayplan.record(curve=True) as inner:
            block(4 * MIB)
        block(8 * MIB)
    wide, narrow = (recording.result.devices[0].curve for recording in (outer, inner))
    assert wide is not None
    assert narrow is not None
    assert len(narrow.seconds) == 2
    assert len(wide.seconds) >= 6
    assert abs(max(wide.total_bytes) - max(narrow.total_bytes) - 4 * MIB) < SLACK_BYTES


def test_cpu_clock_leaves_out_waiting():
    with bayplan.record(clock="cpu") as recording:
        time.sleep(0.2)
        recording.step()
    assert recording.result.clock == "cpu"
    assert recording.result.step_seconds[0] < 0.2
    with pytest.raises(ValueError, match="sundial"):
        bayplan.record(clock="sundial")


@pytest.fixture
def _no_compiler(monkeypatch):
    def refuse(cache):
        raise MeterUnavailable("malloc counter: no C compiler (cc) on PATH")

    monkeypatch.setattr("bayplan.devices.meters.MallocCounter.attach", refuse)


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_storages_are_counted_and_it_is_said(tmp_path):
    before = resident_tensor_bytes(CPU)
    recording = bayplan.record(tmp_path / "run.json", curve=True)
    with pytest.warns(UserWarning, match="tensor storages only.*no C compiler"):
        recording.__enter__()
    with contextlib.ExitStack() as stack:
        stack.push(recording)
        first = block(8 * MIB)
        recording.step()
        del first
        block(4 * MIB)
        recording.step()
    record = files.read(tmp_path / "run.json", RunRecord)
    assert record.method == "storages"
    assert record.not_counted == ("scratch memory of kernels",)
    (device,) = record.devices
    assert device.curve is None
    # The second step starts before the first block is gone.
    assert device.step_peak_bytes == (before + 8 * MIB, before + 8 * MIB)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.filterwarnings("ignore:memory is measured by tensor storages")
def test_without_a_compiler_training_is_the_same():
    losses = []
    for recorded in (False, True):
        model, optimizer, inputs = make_training()
        if recorded:
            with bayplan.record() as recording:
                for _ in range(3):
                    train_one(model, optimizer, inputs)
            assert len(recording.result.step_seconds) == 3
        else:
            for _ in range(3):
                train_one(model, optimizer, inputs)
        losses.append(model(inputs).square().mean().item())
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.filterwarnings("ignore:memory is measured by tensor storages")
def test_without_a_compiler_sparse_gradients_do_not_break_the_loop():
    table = nn.Embedding(100, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with bayplan.record() as recording:
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert len(recording.result.step_seconds) == 1


def test_dropped_changes_of_the_curve_are_confessed(monkeypatch):
    start = MallocCounter.start_curve

    monkeypatch.setattr(
        "bayplan.devices.meters.MallocCounter.start_curve",
        lambda counter: start(counter, capacity=3),
    )
    with bayplan.record(curve=True) as recording:
        for _ in range(4):
            block(MIB)
    assert recording.result.not_counted == ("the curve's last 5 changes",)
    curve = recording.result.devices[0].curve
    assert curve is not None
    assert len(curve.seconds) == 3
