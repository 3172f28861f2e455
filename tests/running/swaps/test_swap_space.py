"""Where swapped activations go: measured, of a limited size, and never in memory."""

from pathlib import Path

import pytest
import torch

from bayplan.data.errors import BayplanError, UsageError
from bayplan.running.swaps.lanes import lies_in_memory
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.swaps import Tier

CPU = torch.device("cpu")
TIER = Tier(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


def test_store_has_room_for_what_was_asked_and_leaves_no_file(tmp_path):
    with SwapSpace(CPU, tmp_path, TIER).open(8192) as store:
        ticket = store.begin_out(torch.ones(2048))
        store.end_out(ticket)
        assert not list(tmp_path.iterdir())
        tensor = store.begin_in(ticket)
        store.end_in(ticket)
        assert torch.equal(tensor, torch.ones(2048))


def test_plan_that_swaps_more_than_is_allowed_is_refused(tmp_path):
    space = SwapSpace(CPU, tmp_path, TIER, max_bytes=4096)
    space.open(4096).close()
    with pytest.raises(
        UsageError, match=r"swaps 8.0 KiB, --swap-size allows 4.0 KiB; .* allow 8192 bytes"
    ):
        space.open(8192)


def test_directory_in_memory_is_refused():
    memory = Path("/dev/shm")
    if not (memory.is_dir() and lies_in_memory(memory)):
        pytest.skip("no file system in memory here")
    with pytest.raises(UsageError, match="lies in memory"):
        SwapSpace.measured(CPU, memory)


def test_missing_directory_is_refused(tmp_path):
    with pytest.raises(BayplanError, match="nowhere"):
        SwapSpace.measured(CPU, tmp_path / "nowhere")


def test_speed_is_measured_where_there_is_a_disk(tmp_path):
    if lies_in_memory(tmp_path):
        pytest.skip("the tests' folder lies in memory")
    tier = SwapSpace.measured(CPU, tmp_path).tier
    assert tier.out_bytes_per_second > 0
    assert tier.in_bytes_per_second > 0
    assert tier.slowdown >= 1
    assert 0 < tier.call_seconds < 1
    assert not list(tmp_path.iterdir())
