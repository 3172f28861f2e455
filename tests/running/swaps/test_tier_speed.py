"""Measuring a tier: figures that can be true, and nothing left behind."""

import math

import pytest
import torch

from bayplan.running.swaps.lanes import TierError
from bayplan.running.swaps.swap_space import measure_tier
from bayplan.running.swaps.tier import open_tier

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize("num_copies", [1, 8], ids=["room for one", "room for many"])
def test_every_figure_is_measured(tmp_path, num_copies):
    num_threads = torch.get_num_threads()
    with open_tier(CPU, capacity_bytes=num_copies * 4 * MIB, directory=tmp_path) as tier:
        speed = measure_tier(tier, size_bytes=4 * MIB)
        assert tier.used_bytes == 0
        assert tier.num_out == tier.num_in > 3
    assert 0 < speed.out_bytes_per_second < math.inf
    assert 0 < speed.in_bytes_per_second < math.inf
    assert 0 < speed.latency_seconds < math.inf
    assert 1 <= speed.slowdown < math.inf
    assert torch.get_num_threads() == num_threads


def test_tier_without_room_says_so(tmp_path):
    with (
        open_tier(CPU, capacity_bytes=MIB, directory=tmp_path) as tier,
        pytest.raises(TierError, match=r"needs 2\.0 MiB"),
    ):
        measure_tier(tier, size_bytes=2 * MIB)
