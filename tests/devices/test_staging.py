"""Staging between a device and a file; a CPU stands for the device, as its copies are real too."""

import pytest
import torch

from bayplan.devices import staging
from bayplan.devices.file_lane import FileLane
from bayplan.devices.staging import Staging
from bayplan.devices.swap_tier import Tier

CPU = torch.device("cpu")


@pytest.mark.parametrize("size_bytes", [0, 1, 999, 1000, 1001, 5500])
def test_pieces_make_the_whole(tmp_path, monkeypatch, size_bytes):
    monkeypatch.setattr(staging, "_PIECE_BYTES", 1000)
    lane = FileLane(CPU, capacity_bytes=3 * 8192, directory=tmp_path)
    lane._staging = Staging(CPU)  # as for any other device
    with Tier(lane) as tier:
        before, tensor, after = (
            torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (5000, size_bytes, 5000)
        )
        tickets = [tier.begin_out(one) for one in (before, tensor, after)]
        for ticket in tickets:
            tier.end_out(ticket)
        for ticket, wanted in zip(tickets, (before, tensor, after), strict=True):
            new = tier.begin_in(ticket)
            tier.end_in(ticket)
            assert torch.equal(new, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_gpu_tensor_goes_to_a_file_and_back(tmp_path):
    device = torch.device("cuda")
    with Tier(FileLane(device, capacity_bytes=2**26, directory=tmp_path)) as tier:
        tensor = torch.rand(5_000_000, device=device)
        ticket = tier.begin_out(tensor * 2)
        tier.end_out(ticket)
        new = tier.begin_in(ticket)
        tier.end_in(ticket)
        assert torch.equal(new, tensor * 2)
