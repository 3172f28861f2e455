"""Holding and averaging tensors, in a group of this process alone; `whole_runs` has several."""

import pytest
import torch
from torch import distributed, nn

from bayplan.running.ranks.gradients import average
from bayplan.running.ranks.starting import Holdings


@pytest.fixture
def lonely_group(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_average_keeps_shapes_and_values_of_a_single_replica(lonely_group):
    buffers = [torch.arange(6.0).view(2, 3), torch.tensor(7.0)]
    expected = [buffer.clone() for buffer in buffers]
    average(buffers, lonely_group)
    assert all(map(torch.equal, buffers, expected))


def test_what_others_hold_is_released_and_has_its_shape_again_when_collected(lonely_group):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    holders = {"0.weight": (0,), "0.bias": (0,), "1.weight": (1,), "1.bias": (1,)}
    holdings = Holdings(model, holders, rank=0)
    mine = model[0].weight.detach().clone()
    holdings.release()
    assert model[1].weight.numel() == 0
    assert torch.equal(model[0].weight, mine)
    holdings.release()  # twice is once
    holdings.collect()
    assert model[1].weight.shape == (5, 4)
    assert model[1].bias.shape == (5,)
