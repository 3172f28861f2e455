"""The pinned lane's memory; its streams are tested on the test accelerator."""

from contextlib import contextmanager

import torch

from bayplan.devices.device import Cpu
from bayplan.devices.meters import StorageMeter
from bayplan.running.swaps.lanes import PinnedLane
from bayplan.running.swaps.tier import SwapStore

CPU = torch.device("cpu")


def test_memory_is_taken_once_and_given_back_once(monkeypatch):
    events = []

    @contextmanager
    def watched_memory(device, size_bytes: int):
        events.append(size_bytes)
        yield torch.empty(size_bytes, dtype=torch.uint8)
        events.append("given back")

    monkeypatch.setattr(Cpu, "pinned", watched_memory)
    with SwapStore(PinnedLane(CPU, capacity_bytes=1000)) as tier:
        assert tier.capacity_bytes == 1024
        for _ in range(3):
            tickets = [tier.begin_out(torch.ones(100)) for _ in range(2)]
            for ticket in tickets:
                tier.drop(ticket)
        assert events == [1024]
    tier.close()
    assert events == [1024, "given back"]


def test_bytes_lie_in_the_given_memory(monkeypatch):
    memory = torch.zeros(2048, dtype=torch.uint8)

    @contextmanager
    def given_memory(device, size_bytes: int):
        yield memory[:size_bytes]

    monkeypatch.setattr(Cpu, "pinned", given_memory)
    with SwapStore(PinnedLane(CPU, capacity_bytes=2048)) as tier:
        tickets = [tier.begin_out(torch.full((300,), value, dtype=torch.uint8)) for value in (5, 7)]
        assert [ticket.offset_bytes for ticket in tickets] == [0, 512]
        assert memory.unique(return_counts=True)[1].tolist() == [2048 - 600, 300, 300]
        assert memory[512:812].tolist() == [7] * 300


def test_lane_holds_memory_that_a_copy_may_still_use():
    tier = SwapStore(PinnedLane(CPU, capacity_bytes=2048))
    with StorageMeter() as meter:
        tier.begin_out(torch.ones(100))  # a ticket that is lost at once
        assert meter.live_bytes == 400
        tier.end_out(tier.begin_out(torch.ones(100)))
        assert meter.live_bytes == 400
        tier.close()
        assert meter.live_bytes == 0
