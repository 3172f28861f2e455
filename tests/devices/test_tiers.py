"""Opening tiers, and two of them as one."""

from contextlib import nullcontext

import pytest
import torch

from bayplan.data.errors import UsageError
from bayplan.devices.file_lane import FileLane
from bayplan.devices.lanes import TierError
from bayplan.devices.pinned_lane import PinnedLane
from bayplan.devices.swap_tier import Tier
from bayplan.devices.tiers import TieredStore, open_tier

CPU = torch.device("cpu")
KIB = 2**10


@pytest.fixture
def store(tmp_path):
    def ordinary_memory(size_bytes):
        return nullcontext(torch.empty(size_bytes, dtype=torch.uint8))

    first = Tier(PinnedLane(CPU, capacity_bytes=64 * KIB, allocate=ordinary_memory))
    second = Tier(FileLane(CPU, capacity_bytes=128 * KIB, directory=tmp_path))
    with TieredStore(first, second) as store:
        yield store


def block(size_bytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((size_bytes,), value, dtype=torch.uint8)


def test_cpu_swaps_to_a_file(tmp_path):
    with open_tier(CPU, capacity_bytes=64 * KIB, directory=tmp_path) as tier:
        assert isinstance(tier, Tier)
        assert (tier.name, tier.capacity_bytes) == ("file", 64 * KIB)
    with open_tier(CPU, capacity_bytes=64 * KIB) as tier:  # somewhere
        assert tier.has_room(block(64 * KIB))


def test_device_that_cannot_swap_is_named():
    with pytest.raises(UsageError, match="cannot swap from a meta device"):
        open_tier(torch.device("meta"), capacity_bytes=KIB)


def test_second_tier_takes_what_the_first_has_no_room_for(store):
    tickets = [store.begin_out(block(40 * KIB, value)) for value in range(4)]
    assert [ticket.tier.name for ticket in tickets] == ["pinned", "file", "file", "file"]
    assert not store.has_room(block(40 * KIB))
    small = store.begin_out(block(20 * KIB, 9))
    assert small.tier.name == "pinned"
    with pytest.raises(TierError, match=r"needs 40\.0 KiB.* free of 128\.0 KiB"):
        store.begin_out(block(40 * KIB))
    for ticket in (*tickets, small):
        store.end_out(ticket)
    for ticket, value in zip((*tickets, small), (0, 1, 2, 3, 9), strict=True):
        new = store.begin_in(ticket)
        store.end_in(ticket)
        assert bool((new == value).all())
    assert store.begin_out(block(40 * KIB)).tier.name == "pinned"


def test_statistics_are_of_both(store):
    tickets = [store.begin_out(block(40 * KIB)) for _ in range(2)]
    for ticket in tickets:
        store.end_out(ticket)
    store.begin_in(tickets[1])
    store.end_in(tickets[1])
    store.drop(tickets[0])
    counted = store.statistics
    assert (counted.num_out, counted.num_in) == (2, 1)
    assert (counted.out_bytes, counted.in_bytes) == (80 * KIB, 40 * KIB)
    assert counted.peak_bytes == 80 * KIB
    assert counted.busy_seconds > 0


def test_both_are_closed(store):
    store.close()
    store.close()
    for size_bytes in (KIB, 100 * KIB):
        with pytest.raises(AssertionError, match="closed"):
            store.begin_out(block(size_bytes))
