"""The strict process group itself: what it computes, orders, and refuses.

Ranks are processes that have the test accelerator registered (`own_process.py`).
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import strict
import torch
from strict import StrictError, late_messages, ranks
from torch import distributed, nn

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well


def whole(count: int, number: float) -> torch.Tensor:
    return torch.full((count,), float(number), device="bay")


def fault_of(*calls: Callable[[], Any]) -> str:
    """What calls or their streams fail with, now or later."""
    try:
        for call in calls:
            call()
        torch.accelerator.synchronize()
    except RuntimeError as fault:
        return str(fault)
    return ""


@pytest.mark.ranks(3)
def test_collectives_compute_what_they_say():
    with ranks() as (rank, size):
        total = whole(5, rank + 1)
        distributed.all_reduce(total)
        assert total.tolist() == [6.0] * 5
        highest = whole(2, rank)
        distributed.all_reduce(highest, distributed.ReduceOp.MAX)
        assert highest.tolist() == [2.0] * 2
        told = whole(3, rank)
        distributed.broadcast(told, 1)
        assert told.tolist() == [1.0] * 3
        rooms = [whole(2, -1) for _ in range(size)]
        distributed.all_gather(rooms, whole(2, rank))
        assert [room.tolist() for room in rooms] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
        flat = whole(6, -1)
        distributed.all_gather_into_tensor(flat, whole(2, rank))
        assert flat.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        part = whole(2, -1)
        distributed.reduce_scatter_tensor(part, torch.arange(6.0, device="bay"))
        assert part.tolist() == [6.0 * rank, 6.0 * rank + 3]
        mixed = whole(3, -1)
        distributed.all_to_all_single(mixed, torch.arange(3.0, device="bay") + 10 * rank)
        assert mixed.tolist() == [rank, 10.0 + rank, 20.0 + rank]
        distributed.barrier()
        pair = distributed.new_group([0, 2])
        if rank != 1:
            own = whole(1, rank)
            distributed.all_reduce(own, group=pair)
            assert own.item() == 2


@pytest.mark.ranks(2)
def test_waiting_orders_streams_and_not_the_host():
    with ranks() as (rank, _), late_messages(2.0):
        total = whole(100, rank + 1)
        torch.accelerator.synchronize()  # the other stream does not wait for this number either
        work = distributed.all_reduce(total, async_op=True)
        with torch.Stream(device="bay"):  # does not wait
            assert total.sum().item() == 100 * (rank + 1)
        work.wait()
        assert not work.is_completed()  # the host went on
        assert total.sum().item() == 300  # the stream did not


@pytest.mark.ranks(2)
def test_messages_of_a_pair_arrive_in_the_order_of_issue():
    with ranks() as (rank, _):
        rooms = [whole(4, -1) for _ in range(3)]
        if rank == 0:
            works = [distributed.isend(whole(4, number), 1) for number in range(3)]
        else:
            works = [distributed.irecv(room, 0) for room in rooms]
        for work in works:
            work.wait()
        if rank == 1:
            assert [room[0].item() for room in rooms] == [0, 1, 2]


@pytest.mark.ranks(2)
def test_memory_of_a_message_that_is_dropped_stays():
    with ranks() as (rank, _), late_messages(0.2):
        if rank == 0:
            distributed.isend(whole(1000, 7), 1)
            whole(1000, 9)  # would take its place
        else:
            room = whole(1000, -1)
            distributed.irecv(room, 0).wait()
            assert room.unique().tolist() == [7]


@pytest.mark.ranks(2)
def test_tensors_of_the_cpu_are_refused():
    with ranks():
        with pytest.raises(StrictError, match="No backend type associated with device type cpu"):
            distributed.all_reduce(torch.ones(2))
        with pytest.raises(StrictError, match="contiguous"):
            distributed.all_reduce(whole(4, 1).view(2, 2).t())
        with pytest.raises(StrictError, match="a rank that is named"):
            distributed.recv(whole(2, 1))


@pytest.mark.ranks(2)
def test_collectives_in_another_order_fail_on_all_ranks():
    with ranks() as (rank, _):
        first, second = whole(4, 1), whole(4, 1)
        calls = [
            lambda: distributed.all_reduce(first, async_op=True),
            lambda: distributed.broadcast(second, 0, async_op=True),
        ]
        told = fault_of(*(calls if rank == 0 else calls[::-1]))
        assert "all_reduce of 4 torch.float32, SUM on rank " in told
        assert "broadcast of 4 torch.float32 from rank 0 on rank " in told


@pytest.mark.ranks(2)
def test_another_size_fails():
    with ranks() as (rank, _):
        numbers = whole(4 + rank, 1)
        told = fault_of(lambda: distributed.all_reduce(numbers))
        assert "all_reduce of 4 torch.float32" in told
        assert "all_reduce of 5 torch.float32" in told


@pytest.mark.ranks(2)
def test_two_that_receive_first_are_told_that_they_wait_forever():
    with ranks() as (rank, _):
        other, room, sent = 1 - rank, whole(4, 0), whole(4, 1)
        told = fault_of(
            lambda: distributed.irecv(room, other), lambda: distributed.isend(sent, other)
        )
        assert "both wait forever" in told


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named_with_what_it_did_last():
    strict.PATIENCE = timedelta(seconds=2)
    with ranks() as (rank, _):
        distributed.all_reduce(whole(3, 1))
        if rank == 0:
            told = fault_of(lambda: distributed.all_reduce(whole(4, 1)))
            assert "rank 1 issued last: all_reduce of 3 torch.float32, SUM (number 1)" in told
        time.sleep(3)


@pytest.mark.ranks(2)
def test_communicators_are_made_in_one_order():
    strict.PATIENCE = timedelta(seconds=2)
    with ranks() as (rank, _):
        groups = [distributed.new_group([0, 1]) for _ in range(2)]
        for group in groups if rank == 0 else groups[::-1]:
            with pytest.raises(StrictError, match="which do not all come to it"):
                distributed.all_reduce(whole(4, 1), group=group)
            break


@pytest.mark.ranks(2)
def test_messages_in_a_batch_run_at_once():
    with ranks() as (rank, _):
        other = 1 - rank
        room = whole(4, 0)
        operations = [
            distributed.P2POp(distributed.irecv, room, other),
            distributed.P2POp(distributed.isend, whole(4, rank + 1), other),
        ]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        assert room.tolist() == [other + 1.0] * 4


@pytest.mark.ranks(2)
def test_tags_do_not_choose_a_message():
    with ranks() as (rank, _):
        tensor, tags = whole(4, 0), (1, 2) if rank == 0 else (2, 1)
        way = distributed.isend if rank == 0 else distributed.irecv
        told = fault_of(*(partial(way, tensor, 1 - rank, tag=tag) for tag in tags))
        assert "tag 1 on rank 0" in told
        assert "tag 2 on rank 1" in told
        assert "wrong place" in told


@pytest.mark.ranks(2)
def test_a_second_thread_is_refused():
    with ranks():
        distributed.all_reduce(whole(4, 1))
        faults = []

        def issue():
            try:
                distributed.all_reduce(whole(4, 1))
            except StrictError as fault:
                faults.append(str(fault))

        thread = threading.Thread(target=issue, name="second")
        thread.start()
        thread.join()
        assert "issued by thread 'second', others by 'MainThread'" in faults[0]
        distributed.barrier()


@pytest.mark.ranks(2)
def test_torchs_data_parallel_trains_on_it():
    with ranks() as (rank, _):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to("bay")
        alike = nn.parallel.DistributedDataParallel(model)
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
        alike(batch[2 * rank : 2 * rank + 2].to("bay")).mean().backward()
        alone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        alone.load_state_dict(model.state_dict())
        alone(batch).mean().backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)
