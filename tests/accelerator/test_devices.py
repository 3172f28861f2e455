"""What is asked of a device, of one that is neither the CPU nor CUDA.

Each test runs in a process that has the test accelerator registered (`own_process.py`).
"""

import time

import bay
import pytest
import torch
from device_here import DEVICE

from bayplan.costing.measure import clock_function
from bayplan.data.errors import UsageError
from bayplan.data.profile import Clock
from bayplan.devices.choosing import device_for_ranks
from bayplan.devices.device import HOST, accelerators_here, default_device, device_of
from bayplan.devices.meters import SharedMeter, open_meter, resident_tensor_bytes

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well

MIB = 2**20
BAY = "bay:0"


def block(size_bytes: int, device: str = BAY) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def test_it_is_the_default():
    assert default_device() is device_of("bay:0")
    assert [device.where.index for device in accelerators_here()] == [0, 1]
    own = default_device()
    assert own.name == "Bay test accelerator"
    assert own.is_accelerator
    assert own.has_pinned_copies
    assert own.has_bf16
    assert own.has_autocast


def test_memory_is_counted_as_its_allocator_does(tmp_path):
    own = device_of(BAY)
    before, free = own.live, own.free_bytes
    with open_meter(torch.device(BAY), tmp_path) as meter:
        assert (meter.method, meter.live_bytes, meter.peak_bytes) == ("bay-allocator", 0, 0)
        kept = block(4 * MIB + 1)
        block(3 * MIB)
        assert meter.live_bytes == 4 * MIB + 512
        assert meter.peak_bytes == 7 * MIB + 512
        assert own.live.requested - before.requested == 4 * MIB + 1
        assert own.live.reserved - before.reserved >= 7 * MIB
        assert own.peak.allocated >= own.live.allocated
        assert free - own.free_bytes == 4 * MIB + 512  # what is kept for later is free
        assert isinstance(meter, SharedMeter)
        meter.start_curve()  # it has none, and says so by giving none
        assert meter.take_curve() is None
        with open_meter(torch.device(BAY), tmp_path) as inner:
            assert (inner.live_bytes, inner.peak_bytes) == (0, 0)
            inner.reset_peak()
        assert meter.peak_bytes == 7 * MIB + 512
        del kept
        assert meter.live_bytes == 0
    assert own.total_bytes == 2 << 30


def test_devices_do_not_count_what_lies_on_another():
    here = resident_tensor_bytes(torch.device(BAY))
    there = [block(MIB, "bay:1"), torch.empty(MIB)]
    assert resident_tensor_bytes(torch.device(BAY)) == here
    mine = block(MIB)
    assert (
        resident_tensor_bytes(torch.device(BAY))
        == resident_tensor_bytes(torch.device("bay"))
        == here + MIB
    )
    assert device_of("bay:1").holds(there[0])
    assert HOST.holds(there[1])
    assert device_of("bay").holds(mine)
    assert not device_of("bay").holds(there[0])


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_clocks_wait_for_what_was_begun(clock):
    """Without that, an operator would be as quick as its launch."""
    now = clock_function(Clock.parse(clock), torch.device(BAY))
    one = torch.ones(1, device=BAY)
    with bay.slow(kernel_seconds=0.05):
        begun = now()
        one.add_(1)
        assert now() - begun >= 0.05


def test_events_tell_the_time_of_the_device():
    own = device_of(BAY)
    begin, end = own.new_event(is_timed=True), own.new_event(is_timed=True)
    one = torch.ones(1, device=BAY)
    with bay.slow(kernel_seconds=0.05):
        launched = time.perf_counter()
        begin.record(own.current_stream())
        one.add_(1)
        end.record(own.current_stream())
        assert not end.query()
        end.synchronize()
        assert begin.elapsed_time(end) >= 50
        assert time.perf_counter() - launched >= 0.05


@pytest.mark.gpu
def test_the_state_of_its_generator_is_put_back():
    own = device_of(DEVICE)
    state, host = own.generator_state(), HOST.generator_state()
    assert state.numel() == own.generator_state_bytes == 16
    with own.forked_generators():
        first = torch.rand(3, device=DEVICE).cpu()
        torch.rand(3)
        own.set_generator_state(state)
        assert torch.rand(3, device=DEVICE).cpu().equal(first)
    assert own.generator_state().equal(state)
    assert HOST.generator_state().equal(host)


@pytest.mark.gpu
def test_pinned_memory_is_pinned():
    with device_of(DEVICE).pinned(MIB) as memory:
        assert memory.is_pinned()
        assert memory.numel() == MIB


def test_ranks_have_devices_of_their_own():
    assert device_of("bay").of_rank(1) is device_of("bay:1")
    assert torch.accelerator.current_device_index() == 1
    device_of("bay").of_rank(0)
    assert device_for_ranks("bay", 2) is device_of("bay")
    assert device_for_ranks("cpu", 100) is HOST
    with pytest.raises(
        UsageError, match="3 ranks need as many bay devices, and this machine has 2"
    ):
        device_for_ranks(None, 3)
    with pytest.raises(UsageError, match="no process group for bay"):
        _ = device_of("bay").group_backend
