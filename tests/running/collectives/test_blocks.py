"""Blocks opened several times in one process: its threads stand for ranks."""

import os
import threading

import pytest
import torch

from bayplan.running.collectives import blocks as blocks_module
from bayplan.running.collectives.blocks import Block, Blocks, RankLost, load

NUM_RANKS = 3
DATA_BYTES = 1 << 16
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return load(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def ranks(library):
    """For each rank, its own view of all blocks."""
    return opened_by_all(library, NUM_RANKS)


def opened_by_all(library, number):
    made = [Block.make(DATA_BYTES) for _ in range(number)]
    views = [
        [made[at] if at == own else opened(made[at]) for at in range(number)]
        for own in range(number)
    ]
    return [
        Blocks(library, view, own, patience_seconds=PATIENCE_SECONDS)
        for own, view in enumerate(views)
    ]


def opened(block):
    return Block.of_other(os.getpid(), block.file, block.size_bytes)


def on_all(ranks, do):
    """Call on every rank at once."""
    errors = []

    def guarded(rank):
        try:
            do(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 1000, 4097])
def test_every_block_has_the_sum_in_the_order_of_blocks(ranks, dtype, count):
    torch.manual_seed(count)
    offset = 128
    for _ in range(3):
        given = [torch.randn(count, dtype=dtype) for _ in ranks]
        for rank, numbers in zip(ranks, given, strict=True):
            rank.own.tensor(offset, count, dtype).copy_(numbers)
        on_all(
            ranks,
            lambda rank: rank.sum(
                rank.begin_turn(), rank.own.tensor(offset, count, dtype), num_into=NUM_RANKS
            ),
        )
        wanted = given[0] + given[1] + given[2]
        for rank in ranks:
            assert torch.equal(rank.own.tensor(offset, count, dtype), wanted)


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("is_into_all", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_multiplied_before_they_are_added(library, number, is_into_all, dtype):
    """Rounded after each, as torch does, whether there are few blocks or more than are unrolled."""
    torch.manual_seed(number)
    ranks, count, factor = opened_by_all(library, number), 2100, 1 / number
    given = [torch.randn(count, dtype=dtype) for _ in ranks]
    for rank, numbers in zip(ranks, given, strict=True):
        rank.own.tensor(0, count, dtype).copy_(numbers)
    num_into = number if is_into_all else 1
    on_all(
        ranks,
        lambda rank: rank.sum(
            rank.begin_turn(),
            rank.own.tensor(0, count, dtype),
            num_into=num_into,
            factor=factor,
        ),
    )
    wanted = given[0] * factor
    for numbers in given[1:]:
        wanted += numbers * factor
    for at, rank in enumerate(ranks):
        found = rank.own.tensor(0, count, dtype)
        assert torch.equal(found, wanted if at < num_into else given[at])


def test_what_lies_beside_the_numbers_is_left_alone(ranks):
    for rank in ranks:
        rank.own.tensor(0, 256, torch.float32).fill_(1.0)

    def sum_some(rank):
        rank.sum(rank.begin_turn(), rank.own.tensor(64, 35, torch.float32), num_into=NUM_RANKS)

    on_all(ranks, sum_some)
    for rank in ranks:
        found = rank.own.tensor(0, 256, torch.float32)
        assert (found == 3).nonzero().flatten().tolist() == list(range(16, 16 + 35))
        assert (found == 1).sum() == 256 - 35


def test_the_first_block_s_numbers_are_given_to_all(ranks):
    for at, rank in enumerate(ranks):
        rank.own.tensor(0, 10, torch.float64).fill_(at + 7)
    on_all(
        ranks,
        lambda rank: rank.spread(rank.begin_turn(), rank.own.tensor(0, 10, torch.float64)),
    )
    for rank in ranks:
        assert rank.own.tensor(0, 10, torch.float64).tolist() == [7.0] * 10


def test_a_rank_that_does_not_come_is_named(library):
    made = [Block.make(64) for _ in range(2)]
    alone = Blocks(library, made, 0, patience_seconds=0)
    with pytest.raises(RankLost, match="2 processes of this host timed out: number 1 has not come"):
        alone.sum(alone.begin_turn(), alone.own.tensor(0, 1, torch.float32), num_into=2)


def test_counts_of_turns_wrap(ranks, monkeypatch):
    for rank in ranks:
        rank._turn = 2**32 - 2
        for line in range(3):  # the flags of a sum
            flag = blocks_module.ctypes.c_uint32.from_address(rank.own.address + 64 * line)
            flag.value = 2**32 - 2
    for wanted in (3, 9, 27):
        for rank in ranks:
            if wanted == 3:
                rank.own.tensor(0, 1, torch.float32).fill_(1.0)
        on_all(
            ranks,
            lambda rank: rank.sum(
                rank.begin_turn(), rank.own.tensor(0, 1, torch.float32), num_into=NUM_RANKS
            ),
        )
        assert all(rank.own.tensor(0, 1, torch.float32).item() == wanted for rank in ranks)


def test_a_file_of_another_size_is_no_block():
    block = Block.make(64)
    with pytest.raises(OSError, match=r"has \d+ bytes, not \d+"):
        Block.of_other(os.getpid(), block.file, block.size_bytes + 4096)


def test_memory_stays_when_the_file_is_closed():
    block = Block.make(64)
    numbers = block.tensor(0, 4, torch.float32)
    block.close_file()
    del block
    numbers.fill_(3.0)
    assert numbers.tolist() == [3.0] * 4


def test_a_block_too_large_for_the_machine_is_refused():
    with pytest.raises(OSError, match=r"1024\.0 TiB to share"):
        Block.make(1 << 50)


@pytest.mark.parametrize("count", [1, 16_383, 16_384, 16_399, 50_001])
@pytest.mark.parametrize(("begin", "offset"), [(0, 0), (1, 3), (7, 16)])
def test_numbers_are_put_where_they_belong_and_nowhere_else(ranks, count, begin, offset):
    """Many go past the caches, in lines of 64 bytes; neither end need be at one."""
    room = torch.zeros(count + 32)
    numbers = torch.arange(count + 16.0)[begin : begin + count]
    ranks[0].put([(room[offset : offset + count], numbers)])
    assert torch.equal(room[offset : offset + count], numbers)
    assert not room[:offset].any()
    assert not room[offset + count :].any()


def test_many_pieces_are_put_at_once(ranks):
    sizes = (1, 300, 40_000, 7)
    room = torch.zeros(sum(sizes))
    numbers = [torch.full((size,), at + 1.0) for at, size in enumerate(sizes)]
    numbers[1] = numbers[1].double()  # is not the same bytes
    ranks[0].put(list(zip(room.split(sizes), numbers, strict=True)))
    assert torch.equal(room, torch.cat([one.float() for one in numbers]))


@pytest.mark.parametrize(
    "change",
    [
        lambda numbers: numbers.double(),
        lambda numbers: numbers.t().contiguous().t(),
        lambda numbers: numbers[:1].expand(256, 256),
        torch._neg_view,
    ],
    ids=["dtype", "strides", "expanded", "negated"],
)
def test_numbers_that_lie_otherwise_in_memory_are_put_as_they_are(ranks, change):
    numbers = change(torch.arange(256 * 256.0).view(256, 256))
    room = torch.zeros(256, 256)
    ranks[0].put([(room, numbers)])
    assert torch.equal(room, numbers.float())
