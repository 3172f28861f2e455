"""The pinned lane's memory, and on a machine with a GPU all of it."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from bayplan.devices.meters import StorageMeter
from bayplan.running.swaps.lanes import PinnedLane
from bayplan.running.swaps.tier import SwapStore, open_tier

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_memory_is_taken_once_and_given_back_once():
    events = []

    @contextmanager
    def watched_memory(size_bytes: int):
        events.append(size_bytes)
        yield torch.empty(size_bytes, dtype=torch.uint8)
        events.append("given back")

    with SwapStore(PinnedLane(CPU, capacity_bytes=1000, allocate=watched_memory)) as tier:
        assert tier.capacity_bytes == 1024
        for _ in range(3):
            tickets = [tier.begin_out(torch.ones(100)) for _ in range(2)]
            for ticket in tickets:
                tier.drop(ticket)
        assert events == [1024]
    tier.close()
    assert events == [1024, "given back"]


def test_bytes_lie_in_the_given_memory():
    memory = torch.zeros(2048, dtype=torch.uint8)

    @contextmanager
    def given_memory(size_bytes: int):
        yield memory[:size_bytes]

    with SwapStore(PinnedLane(CPU, capacity_bytes=2048, allocate=given_memory)) as tier:
        tickets = [tier.begin_out(torch.full((300,), value, dtype=torch.uint8)) for value in (5, 7)]
        assert [ticket.offset_bytes for ticket in tickets] == [0, 512]
        assert memory.unique(return_counts=True)[1].tolist() == [2048 - 600, 300, 300]
        assert memory[512:812].tolist() == [7] * 300


def test_lane_holds_memory_that_a_copy_may_still_use():
    def ordinary_memory(size_bytes: int):
        return nullcontext(torch.empty(size_bytes, dtype=torch.uint8))

    tier = SwapStore(PinnedLane(CPU, capacity_bytes=2048, allocate=ordinary_memory))
    with StorageMeter() as meter:
        tier.begin_out(torch.ones(100))  # a ticket that is lost at once
        assert meter.live_bytes == 400
        tier.end_out(tier.begin_out(torch.ones(100)))
        assert meter.live_bytes == 400
        tier.close()
        assert meter.live_bytes == 0


@needs_gpu
def test_gpu_memory_is_reused_behind_the_copy(tmp_path):
    device = torch.device("cuda")
    with open_tier(device, capacity_bytes=256 * 2**20, directory=tmp_path) as tier:
        for value in range(10):
            tensor = torch.full((2**24,), float(value), device=device)
            ticket = tier.begin_out(tensor)
            del tensor
            tier.end_out(ticket)
            garbage = torch.full((2**24,), -1.0, device=device)  # in the same memory
            new = tier.begin_in(ticket)
            tier.end_in(ticket)
            assert bool((new == value).all())
            del garbage, new
        assert tier.num_out == tier.num_in == 10
