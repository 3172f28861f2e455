"""A rank's swap files: room for all in flight, within what is allowed, and nothing left of them."""

import os
from pathlib import Path

import pytest
import torch

from bayplan.data.errors import PlanBroken, UsageError
from bayplan.running.swaps.lanes import lies_in_memory
from bayplan.running.swaps.swap_space import RankSwap, check_swap_room

CPU = torch.device("cpu")


@pytest.fixture
def disk(tmp_path):
    if lies_in_memory(tmp_path):
        pytest.skip("the tests' folder lies in memory")
    return tmp_path


def test_several_micro_batches_are_away_at_once_and_come_back_as_they_were(disk):
    swapper = RankSwap(1, disk).swapper(CPU, 3 * 2 * 8192)
    rng = torch.Generator().manual_seed(0)
    waiting = []
    for number in range(9):  # as in 1F1B: the oldest comes back when the fourth is to leave
        pair = [torch.randn(2048, generator=rng), torch.randn(1025, generator=rng)]
        tokens = [swapper.swap_out(tensor) for tensor in pair]
        for token, tensor in zip(tokens, pair, strict=True):
            swapper.swap_away(token, tensor)
        waiting.append((pair, tokens))
        if number >= 2:
            pair, tokens = waiting.pop(0)
            for wanted, token in zip(pair[::-1], tokens[::-1], strict=True):
                back = swapper.swap_here(swapper.swap_back(token), token, is_last=True)
                assert torch.equal(back, wanted)
    assert swapper.store.peak_bytes == 3 * 2 * 8192  # none stayed in memory
    assert list(disk.iterdir()) == []


def test_all_files_of_a_rank_count_together(disk):
    swap = RankSwap(2, disk, max_bytes=16384)
    swap.swapper(CPU, 8192)
    swap.swapper(CPU, 8192)
    message = r"16.0 KiB; plan with this --swap-size, or allow 20480 bytes"
    with pytest.raises(
        UsageError, match=rf"swaps 20.0 KiB on rank 2, --swap-size allows {message}"
    ):
        swap.swapper(CPU, 4096)
    swap.close()
    swap.close()


def test_a_place_that_cannot_be_used_is_named_with_its_rank(disk):
    with pytest.raises(UsageError, match=r"4.0 KiB on rank 3; say where to"):
        RankSwap(3).swapper(CPU, 4096)
    with pytest.raises(
        PlanBroken, match=r"rank 3 cannot swap: no swap file of 4.0 KiB in .*nowhere"
    ):
        RankSwap(3, disk / "nowhere").swapper(CPU, 4096)
    with pytest.raises(PlanBroken, match=r"rank 3 cannot swap: no space .* needs 1024.0 TiB"):
        RankSwap(3, disk).swapper(CPU, 2**50)


def test_a_place_in_memory_is_refused():
    memory = Path("/dev/shm")
    if not (memory.is_dir() and lies_in_memory(memory)):
        pytest.skip("no file system in memory here")
    with pytest.raises(UsageError, match="lies in memory"):
        RankSwap(0, memory).swapper(CPU, 4096)


def test_room_is_looked_for_before_ranks_are_started(tmp_path):
    check_swap_room((0, 0), None)
    check_swap_room((4096, 8192), tmp_path, max_bytes=8192)
    with pytest.raises(UsageError, match=r"swaps 8.0 KiB on rank 1; say where to, with --swap-dir"):
        check_swap_room((4096, 8192), None)
    with pytest.raises(UsageError, match=r"8.0 KiB on rank 1, --swap-size allows 4.0 KiB"):
        check_swap_room((4096, 8192), tmp_path, max_bytes=4096)
    with pytest.raises(UsageError, match="nowhere is not a directory that can be written"):
        check_swap_room((4096, 8192), tmp_path / "nowhere")
    with pytest.raises(
        UsageError, match=r"512.0 TiB on rank 0 and 1024.0 TiB on all 2, but .* free"
    ):
        check_swap_room((2**49, 2**49), tmp_path)


def test_a_folder_without_rights_is_refused_before_ranks_are_started(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("this user may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="no directory that can be written"):
        check_swap_room((4096,), tmp_path)
