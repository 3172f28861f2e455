"""Recordings within recordings read one counter, and each sees its own."""

import torch
from torch import nn

import bayplan
from bayplan.devices.meters import resident_tensor_bytes

MIB = 2**20
# What Python and torch allocate beside a small loop's tensors, and what malloc rounds them up by.
SLACK_BYTES = 128 * 1024
CPU = torch.device("cpu")


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


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


def test_nested_recordings_both_hear_the_optimizer(make_training, train_one):
    model, optimizer, inputs = make_training()
    train_one(model, optimizer, inputs)
    with bayplan.record() as outer, bayplan.record() as inner:
        for _ in range(3):
            train_one(model, optimizer, inputs)
            block(8 * MIB)
    peaks = [recording.result.devices[0].step_peak_bytes for recording in (outer, inner)]
    assert len(peaks[0]) == len(peaks[1]) == 3
    assert min(peaks[0][1:]) > 8 * MIB  # each block comes after its step's end
    for one, other in zip(*peaks, strict=True):
        assert abs(one - other) < SLACK_BYTES


def test_profile_inside_a_recording_leaves_its_peak_alone():
    """The profiler resets the counter's peak at every operator."""
    before = resident_tensor_bytes(CPU)
    with bayplan.record() as recording:
        block(32 * MIB)
        bayplan.profile(nn.Linear(8, 8), torch.ones(2, 8), lambda y: y.sum(), repeats=1, again=True)
    assert abs(recording.result.peak_bytes - before - 32 * MIB) < 2 * SLACK_BYTES


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


def test_an_inner_recording_adds_nothing_to_the_outer_one_however_many_objects_live():
    """A list of all objects of the process would take eight bytes for each."""
    objects = [[] for _ in range(500_000)]
    before = resident_tensor_bytes(CPU)
    with bayplan.record() as outer:
        block(MIB)
        with bayplan.record() as inner:
            block(2 * MIB)
    assert len(objects) * 8 > 2 * MIB + SLACK_BYTES
    for recording in (outer, inner):
        assert abs(recording.result.peak_bytes - before - 2 * MIB) < SLACK_BYTES
