"""A tier's promises on real lanes: bits come back, memory goes when it should, slots are reused.

The pinned lane runs on the CPU here, with ordinary memory in place of pinned memory.
"""

import gc
import random
import weakref

import pytest
import torch

from bayplan.data.errors import ExitCode
from bayplan.devices.malloc_counter import MallocCounter
from bayplan.devices.meters import StorageMeter
from bayplan.running.swaps.lanes import FileLane, PinnedLane, TierError
from bayplan.running.swaps.tier import SwapStore, TicketState

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(params=["file", "pinned"])
def tier(request, tmp_path):
    if request.param == "file":
        lane = FileLane(CPU, capacity_bytes=4 * MIB, directory=tmp_path)
    else:
        lane = PinnedLane(CPU, capacity_bytes=4 * MIB)
    with SwapStore(lane) as tier:
        yield tier
        assert tier.used_bytes == 0, "a test leaves no slot behind"


def swap_out(tier, tensor):
    ticket = tier.begin_out(tensor)
    tier.end_out(ticket)
    return ticket


def swap_in(tier, ticket):
    tensor = tier.begin_in(ticket)
    tier.end_in(ticket)
    return tensor


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


GENERATOR = torch.Generator().manual_seed(0)
NOISE = torch.randint(0, 256, (24 * 36,), dtype=torch.uint8, generator=GENERATOR)
TENSORS = {
    "float32": NOISE.view(torch.float32),  # NaNs of every kind among them
    "bfloat16": NOISE.view(torch.bfloat16),
    "float8": NOISE.view(torch.float8_e4m3fn),
    "int64": NOISE.view(torch.int64),
    "bool": NOISE > 127,
    "complex": NOISE.view(torch.complex64),
    "transposed": NOISE.view(24, 36).t(),
    "permuted": NOISE.view(2, 12, 4, 9).permute(2, 0, 3, 1),
    "channels last": torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last),
    "with gaps": NOISE.view(torch.int16).view(12, 36)[1:9:2, 5:20:3],
    "expanded": NOISE.view(24, 36)[3:4].expand(50, 36),
    "overlapping": NOISE.unfold(0, 10, 3),
    "part of a storage": NOISE[101:202],
    "scalar": torch.tensor(3.25),
    "empty": torch.empty(0),
    "empty with sizes": torch.empty(3, 0, 5),
    "one long dimension": torch.rand(700_001),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bits_shape_strides_and_dtype_come_back(tier, name):
    tensor = TENSORS[name]
    new = swap_in(tier, swap_out(tier, tensor))
    assert (new.shape, new.stride(), new.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(bits(new), bits(tensor))
    if tensor.numel():
        assert new.data_ptr() != tensor.data_ptr()


def test_lazy_conjugate_and_negative_come_back_as_values(tier):
    tensor = torch.rand(5, dtype=torch.complex64).conj()
    assert tensor.is_conj()
    assert tensor.imag.is_neg()
    for lazy in (tensor, tensor.imag):
        new = swap_in(tier, swap_out(tier, lazy))
        assert torch.equal(new, lazy)


def test_tensors_of_autograd_and_of_inference_come_back_without_it(tier):
    weight = torch.rand(10, requires_grad=True)
    with torch.inference_mode():
        inference = torch.rand(10)
    for tensor in (weight, weight * 2, inference):
        new = swap_in(tier, swap_out(tier, tensor))
        assert not new.requires_grad
        assert torch.equal(new, tensor)


def test_meter_of_storages_sees_each_tensor_once(tier):
    with StorageMeter() as meter:
        ticket = swap_out(tier, torch.ones(MIB, dtype=torch.uint8))
        assert meter.live_bytes == 0
        tensor = swap_in(tier, ticket)
        assert meter.live_bytes == meter.peak_bytes == MIB
        assert bool(tensor.all())


def test_many_tensors_in_any_order(tier):
    order = random.Random(0)
    wanted = [torch.rand(order.randrange(20_000)) for _ in range(40)]
    outside = {}
    for _ in range(400):
        index = order.randrange(len(wanted))
        if index in outside:
            assert torch.equal(swap_in(tier, outside.pop(index)), wanted[index])
        elif tier.has_room(wanted[index]):
            outside[index] = swap_out(tier, wanted[index])
    assert len(outside) > 5
    for ticket in outside.values():
        tier.drop(ticket)


def test_copies_overlap_and_are_ended_in_any_order(tier):
    tensors = [torch.full((50_000,), float(index)) for index in range(8)]
    tickets = [tier.begin_out(tensor) for tensor in tensors]
    for ticket in reversed(tickets):
        tier.end_out(ticket)
    new = [tier.begin_in(ticket) for ticket in tickets]
    for ticket in reversed(tickets):
        tier.end_in(ticket)
    assert all(torch.equal(one, other) for one, other in zip(new, tensors, strict=True))


def test_ticket_holds_the_tensor_while_a_copy_runs_and_no_longer(tier):
    tensor = torch.rand(1000)
    watched = weakref.ref(tensor)
    ticket = tier.begin_out(tensor)
    assert ticket.tensor is tensor
    del tensor
    assert watched() is not None
    tier.end_out(ticket)
    assert ticket.tensor is None
    assert watched() is None
    new = tier.begin_in(ticket)
    assert ticket.tensor is new
    tier.end_in(ticket)
    assert ticket.tensor is None


def test_memory_is_free_when_out_ends_and_taken_when_in_begins(tier, tmp_path):
    gc.collect()
    slack_bytes = 64 * 1024
    with MallocCounter.attach(tmp_path / "cache") as counter:
        for _ in range(20):  # a lane that lets go too late would show in some
            before = counter.live_bytes
            ticket = tier.begin_out(torch.ones(MIB, dtype=torch.uint8))
            tier.end_out(ticket)
            assert abs(counter.live_bytes - before) < slack_bytes
            counter.reset_peak()
            tensor = tier.begin_in(ticket)
            assert abs(counter.live_bytes - before - MIB) < slack_bytes
            tier.end_in(ticket)
            assert counter.peak_bytes - before < MIB + slack_bytes
            assert bool(tensor.all())
            del tensor


def test_full_tier_says_both_numbers_and_keeps_what_it_has(tier):
    held = swap_out(tier, torch.ones(3 * MIB, dtype=torch.uint8))
    too_large = torch.ones(2 * MIB, dtype=torch.uint8)
    assert not tier.has_room(too_large)
    with pytest.raises(TierError, match=r"needs 2\.0 MiB .*1\.0 MiB free of 4\.0 MiB") as caught:
        tier.begin_out(too_large)
    assert "--swap-size" in str(caught.value)
    assert caught.value.exit_code == ExitCode.PLAN_BROKEN
    assert bool(swap_in(tier, held).all())
    assert tier.has_room(too_large)


def test_ticket_can_be_dropped_in_every_state(tier):
    tensor = torch.rand(1000)
    going = tier.begin_out(tensor)
    outside = swap_out(tier, tensor)
    coming = swap_out(tier, tensor)
    tier.begin_in(coming)
    done = swap_out(tier, tensor)
    swap_in(tier, done)
    for ticket in (going, outside, coming, done, going):
        tier.drop(ticket)
        assert ticket.state is TicketState.DONE
        assert ticket.tensor is None
    assert tier.used_bytes == 0


def test_steps_out_of_order_are_bugs(tier):
    ticket = tier.begin_out(torch.rand(10))
    with pytest.raises(AssertionError, match="going out, must be outside"):
        tier.begin_in(ticket)
    tier.end_out(ticket)
    with pytest.raises(AssertionError, match="outside, must be going out"):
        tier.end_out(ticket)
    with pytest.raises(AssertionError, match="outside, must be coming in"):
        tier.end_in(ticket)
    tier.drop(ticket)
    with pytest.raises(AssertionError, match="meta tensor, cpu tier"):
        tier.begin_out(torch.empty(3, device="meta"))


def test_copies_and_the_peak_are_counted(tier):
    tickets = [swap_out(tier, torch.ones(size)) for size in (1024, 4096)]
    swap_in(tier, tickets[1])
    tier.drop(tickets[0])
    assert (tier.num_out, tier.num_in) == (2, 1)
    assert tier.peak_bytes == 5 * 4096


def test_closed_tier_takes_nothing(tier):
    ticket = swap_out(tier, torch.rand(10))
    tier.close()
    tier.close()
    with pytest.raises(AssertionError, match="closed"):
        tier.begin_out(torch.rand(10))
    with pytest.raises(AssertionError, match="closed"):
        tier.begin_in(ticket)
    tier.drop(ticket)
