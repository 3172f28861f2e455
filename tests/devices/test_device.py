"""What is asked of a device; accelerators are asked on the test accelerator."""

import pytest
import torch

from bayplan.devices.device import GPU, HOST, accelerators_here, default_device, device_of


def test_a_device_is_found_by_any_of_its_names():
    assert device_of("cpu") is device_of(torch.device("cpu")) is HOST
    assert device_of("cuda:1").where == torch.device("cuda", 1)
    assert type(device_of("cuda:1")) is type(GPU)
    assert type(device_of("xpu")) is not type(GPU)
    assert device_of("xpu").is_accelerator


def test_figures_of_a_gpu_are_known_without_one():
    """Steps are traced for devices that are not here."""
    assert (GPU.granularity_bytes, GPU.generator_state_bytes, GPU.reserves) == (512, 16, True)
    assert GPU.has_pinned_copies
    assert GPU.object_bytes == (0, None, 0)
    assert GPU.group_backend == "cpu:gloo,cuda:nccl"
    assert not GPU.holds(torch.ones(1))


def test_the_host():
    assert HOST.name == "cpu"
    assert 2**20 < HOST.free_bytes < HOST.total_bytes < 2**50
    assert HOST.holds(torch.ones(1))
    assert HOST.of_rank(5) is HOST
    assert HOST.num_devices >= 1
    assert HOST.has_autocast


def test_the_state_of_the_generator_is_put_back():
    state = HOST.generator_state()
    assert state.numel() == HOST.generator_state_bytes
    with HOST.forked_generators():
        first = torch.rand(3)
        HOST.set_generator_state(state)
        assert torch.rand(3).equal(first)
    assert HOST.generator_state().equal(state)


def test_events_of_the_host_tell_time():
    begin, end = HOST.new_event(is_timed=True), HOST.new_event(is_timed=True)
    begin.record(HOST.current_stream())
    with HOST.on_stream(HOST.new_stream()):
        end.record()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0 >= end.elapsed_time(begin)


def test_without_an_accelerator_the_host_is_the_default():
    if accelerators_here():
        pytest.skip("there is an accelerator")
    assert default_device() is HOST
