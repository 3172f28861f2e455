"""Opening the tier of a device."""

import pytest
import torch

from bayplan.data.errors import UsageError
from bayplan.running.swaps.lanes import FileLane
from bayplan.running.swaps.tier import open_tier

KIB = 2**10


def test_cpu_swaps_to_a_file(tmp_path):
    cpu, whole = torch.device("cpu"), torch.ones(64 * KIB, dtype=torch.uint8)
    with open_tier(cpu, capacity_bytes=64 * KIB, directory=tmp_path) as tier:
        assert isinstance(tier._lane, FileLane)
        assert tier.capacity_bytes == 64 * KIB
        assert tier.has_room(whole)


def test_device_that_cannot_swap_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot swap from a meta device"):
        open_tier(torch.device("meta"), capacity_bytes=KIB, directory=tmp_path)
