"""A recording by each of its meters: the curve, the clock, and storages without a compiler."""

import contextlib
import time

import numpy
import pytest
import torch
from torch import nn

import bayplan
from bayplan.data import files
from bayplan.data.record import RunRecord
from bayplan.devices import meters
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.devices.meters import resident_tensor_bytes

MIB = 2**20
# What Python and torch allocate beside a small loop's tensors, and what malloc rounds them up by.
SLACK_BYTES = 128 * 1024
CPU = torch.device("cpu")


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_curve_runs_forward_in_time_and_reaches_the_peak(make_training, train_one):
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
    meters._warn_of_storages.cache_clear()  # as in a process that has not warned yet


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
def test_without_a_compiler_training_is_the_same(make_training, train_one):
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


def test_loop_that_frees_what_is_no_tensor_is_recorded():
    """Its curve falls below the tensors at its start, and no peak below zero."""
    others = numpy.ones(resident_tensor_bytes(CPU) // 8 + 4 * MIB)
    with bayplan.record(curve=True) as recording:
        recording.step()
        del others
        recording.step()
        recording.step()
    (device,) = recording.result.devices
    assert device.curve is not None
    assert device.curve.total_bytes[-1] < -20 * MIB
    assert min(device.step_peak_bytes) >= 0
