"""Stand-ins: as asked for, made once, and no memory by any measure."""

import torch

from bayplan.devices.meters import leave_out, resident_tensor_bytes, stand_in

SHAPE = (64, 100, 90)
STRIDES = {"contiguous": (9000, 90, 1), "transposed": (9000, 1, 100), "with gaps": (20000, 200, 2)}


def test_it_has_the_geometry_that_was_asked_for():
    for stride in STRIDES.values():
        made = stand_in(SHAPE, stride, torch.bfloat16)
        assert (tuple(made.shape), made.stride(), made.dtype) == (SHAPE, stride, torch.bfloat16)
        assert not made.any()  # may be read, all the same


def test_whoever_asks_for_the_same_gets_the_same():
    first = stand_in(SHAPE, STRIDES["contiguous"], torch.float32)
    assert stand_in(SHAPE, STRIDES["contiguous"], torch.float32) is first
    assert stand_in(SHAPE, STRIDES["transposed"], torch.float32) is not first


def test_it_counts_for_nobody(counter):
    """They outlive a step: taken for memory in use, they let a run break its plan."""
    device, before = torch.device("cpu"), resident_tensor_bytes(torch.device("cpu"))
    live_bytes = counter.live_bytes
    made = stand_in((3, 1 << 20), (1 << 20, 1), torch.float64)
    assert counter.live_bytes - live_bytes < 1 << 16
    assert resident_tensor_bytes(device) == before
    assert made.shape == (3, 1 << 20)


def test_only_what_is_marked_is_left_out():
    device, before = torch.device("cpu"), resident_tensor_bytes(torch.device("cpu"))
    ours, theirs = leave_out(torch.ones(1000)), torch.ones(500)
    assert resident_tensor_bytes(device) - before == theirs.nbytes
    assert ours.nbytes == 4000
