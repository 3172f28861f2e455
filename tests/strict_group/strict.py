"""A process group for the test accelerator: as strict as NCCL, and it says what is wrong.

NOTE [ What is strict ]
1. Tensors of the device only, contiguous ones.
2. All collectives of a group run on one stream of the group's, in the order of issue. All messages
   of a pair of ranks run on one stream of that pair's, in the order of issue, whatever their
   direction: two ranks that both receive before they send would wait forever, which is an error
   here. A send ends when it is received. Messages in `batch_isend_irecv` run at once.
3. There are no tags: the next message is the one that is received. Where the ends have given tags,
   and different ones, that is an error.
4. `wait()` lets the calling thread's current stream wait, not the host. `barrier` alone does both.
5. Before anything is exchanged the ranks compare what they are about to do. Different collectives
   (or the same in another order), sizes or types fail on every rank, with the operations of both.
6. A communicator is made by its first operation: there the host waits until all its members are
   (of a group, or of a pair). Two that come to theirs in different order wait forever.
7. One thread of a process issues operations. Threads of autograd's engine, which run the hooks of a
   backward, count as the one that called `backward`, because it waits for them. NCCL allows more,
   and hangs if two ranks happen to take them in different order.

What fails on a stream fails everything that waits for the device afterwards, as an error of a GPU
would. Bytes go through gloo, in a thread of the stream, straight from and to the device's memory.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import sleep
from typing import Any

import bay
import torch
from torch import distributed
from torch.distributed import distributed_c10d

__all__ = ["StrictError", "StrictGroup", "late_messages", "ranks", "register_strict"]

_HEADER_BYTES = 256
PATIENCE = timedelta(seconds=60)  # a rank that is silent for so long is not coming


class StrictError(RuntimeError):
    """What NCCL would answer with a hang or wrong numbers."""


class _Issuer:
    """The one thread of this process that issues operations: rule 7."""

    def __init__(self) -> None:
        self._own: threading.Thread | None = None

    def check(self, what: str) -> None:
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):
            return  # not started by Python: autograd's
        self._own = self._own or thread
        if self._own is not thread:
            raise StrictError(
                f"{what} is issued by thread {thread.name!r}, others by {self._own.name!r}: with"
                " NCCL, the order of two threads may differ from rank to rank, and then all wait"
                " forever"
            )


_issuer = _Issuer()
_late_seconds = 0.0


@contextmanager
def late_messages(seconds: float) -> Iterator[None]:
    """Let everything that a group sends be late by so much."""
    global _late_seconds
    _late_seconds = seconds
    try:
        yield
    finally:
        bay.synchronize_all()
        _late_seconds = 0.0


class StrictWork(distributed.Work):
    def __init__(self, group: "StrictGroup", end: torch.Event, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._group, self._end, self._results = group, end, results

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.check()
        torch.accelerator.current_stream(self._end.device).wait_event(self._end)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        self._group.check()
        return self._end.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future:
        """Done at once, as NCCL's is: who takes the value has its stream wait."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future(devices=[self._end.device])
        future.set_result(self._results)
        return future


class _BarrierWork(StrictWork):
    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait()
        self._end.synchronize()
        self._group.check()
        return True


_Transfer = tuple[bool, int, torch.Tensor, str, int]  # is sent, rank, memory, header, number


class StrictGroup(distributed.ProcessGroup):
    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # pyrefly: ignore[missing-argument]
        self._rank, self._size = rank, size
        self._ranks = list(options.global_ranks_in_group) or list(range(size))
        self._id = options.group_id
        self._store = options.store
        store = distributed.PrefixStore("gloo", options.store)
        timeout = min(options.timeout, PATIENCE)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[Any, torch.Stream] = {}
        self._numbers: defaultdict[Any, int] = defaultdict(int)
        self._fault: StrictError | None = None
        self._batch: list[_Transfer] | None = None
        self._batch_tensors: list[torch.Tensor] = []

    # ---- what torch asks a group for

    def getBackendName(self) -> str:
        return "strict"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def pg_name(self) -> str:
        return self._id

    @property
    def group_name(self) -> str:
        return self._id

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("bay")]

    def __repr__(self) -> str:
        return f"StrictGroup({self._id}, ranks {self._ranks})"

    # ---- collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> StrictWork:
        opts = opts or distributed.AllreduceOptions()
        seen = self._seen(tensors)
        told = f"all_reduce of {_form(tensors)}, {_reduction(opts)}"
        return self._collective(told, tensors, lambda: self._gloo.allreduce(seen, opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> StrictWork:
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return works[-1]

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> StrictWork:
        opts = opts or distributed.BroadcastOptions()
        seen = self._seen(tensors)
        told = f"broadcast of {_form(tensors)} from rank {self._ranks[opts.rootRank]}"
        return self._collective(told, tensors, lambda: self._gloo.broadcast(seen, opts))

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> StrictWork:
        opts = opts or distributed.ReduceOptions()
        seen = self._seen(tensors)
        told = (
            f"reduce of {_form(tensors)} to rank {self._ranks[opts.rootRank]}, {_reduction(opts)}"
        )
        return self._collective(told, tensors, lambda: self._gloo.reduce(seen, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> StrictWork:
        seen, rooms = self._seen(inputs), [self._seen(rooms) for rooms in outputs]
        touched = [*inputs, *(room for rooms in outputs for room in rooms)]
        told = f"all_gather of {_form(inputs)}"
        return self._collective(told, touched, lambda: self._gloo.allgather(rooms, seen))

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> StrictWork:
        (seen,), (room,) = self._seen([given]), self._seen([output])
        rooms = list(room.view(self._size, -1).unbind())
        told = f"all_gather_single of {_form([given])}"
        return self._collective(
            told, [given, output], lambda: self._gloo.allgather([rooms], [seen.view(-1)])
        )

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> StrictWork:
        opts = opts or distributed.ReduceScatterOptions()
        (seen,), (room,) = self._seen([given]), self._seen([output])
        told = f"reduce_scatter_single of {_form([given])}, {_reduction(opts)}"
        how = distributed.AllreduceOptions()
        how.reduceOp = opts.reduceOp

        def run() -> None:
            total = seen.clone().view(self._size, -1)
            self._gloo.allreduce([total], how).wait()
            room.view(-1).copy_(total[self._rank])

        return self._collective(told, [given, output], run)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Any, given: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> StrictWork:
        (seen,), (room,) = self._seen([given]), self._seen([output])
        told = f"all_to_all_single of {given.dtype}"  # sizes may differ from rank to rank
        splits = output_splits, input_splits
        return self._collective(
            told, [given, output], lambda: self._gloo.alltoall_base(room, seen, *splits)
        )

    alltoall_base = all_to_all_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> StrictWork:
        opts = opts or distributed.GatherOptions()
        seen, rooms = self._seen(inputs), [self._seen(rooms) for rooms in outputs]
        touched = [*inputs, *(room for rooms in outputs for room in rooms)]
        told = f"gather of {_form(inputs)} to rank {self._ranks[opts.rootRank]}"
        return self._collective(told, touched, lambda: self._gloo.gather(rooms, seen, opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> StrictWork:
        opts = opts or distributed.ScatterOptions()
        seen, parts = self._seen(outputs), [self._seen(parts) for parts in inputs]
        touched = [*outputs, *(part for parts in inputs for part in parts)]
        told = f"scatter of {_form(outputs)} from rank {self._ranks[opts.rootRank]}"
        return self._collective(told, touched, lambda: self._gloo.scatter(seen, parts, opts))

    def barrier(self, opts: Any = None) -> StrictWork:
        mark = torch.zeros(1, device=torch.device("bay", torch.accelerator.current_device_index()))
        return self._collective("barrier", [mark], lambda: None, kind=_BarrierWork)

    def _collective(
        self,
        told: str,
        tensors: Sequence[torch.Tensor],
        run: Callable[[], Any],
        kind: type[StrictWork] = StrictWork,
    ) -> StrictWork:
        number = self._count("collectives")

        def exchange() -> None:
            header = _header(told)
            headers = [torch.empty_like(header) for _ in range(self._size)]
            self._gloo.allgather([headers], [header]).wait()
            others = {_text(each): rank for rank, each in enumerate(headers)}
            for text, rank in others.items():
                if text != told:
                    raise StrictError(
                        f"{self}: collective number {number} is {told} on rank"
                        f" {self._ranks[self._rank]}, but {text} on rank {self._ranks[rank]}"
                    )
            if (work := run()) is not None:
                work.wait()

        return self._issue("collectives", f"{told} (number {number})", tensors, exchange, kind)

    # ---- messages

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> StrictWork:
        return self._message(True, tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> StrictWork:
        return self._message(False, tensors, src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> StrictWork:
        raise StrictError("NCCL receives from a rank that is named; this one is not")

    def _message(
        self, is_sent: bool, tensors: list[torch.Tensor], peer: int, tag: int
    ) -> StrictWork:
        (memory,) = self._seen(tensors)
        told = f"{'send' if is_sent else 'receive'} of {_form(tensors)}, tag {tag}"
        if self._batch is not None:
            number = self._count(("batched", is_sent, peer))
            self._batch.append((is_sent, peer, memory, told, number))
            self._batch_tensors += tensors
            return None  # pyrefly: ignore[bad-return]
        number = self._count(("pair", peer))
        what = f"{told}, message {number} with rank {self._ranks[peer]}"
        run = partial(self._exchange, is_sent, peer, memory, told, number)
        return self._issue(("pair", peer), what, tensors, run)

    def _exchange(
        self, is_sent: bool, peer: int, memory: torch.Tensor, told: str, number: int
    ) -> None:
        header, answer = _header(told), torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        asked = self._gloo.send([header], peer, 4 * number)
        self._gloo.recv([answer], peer, 4 * number).wait()
        asked.wait()
        self._compare(peer, told, _text(answer), f"message number {number} of this pair")
        if is_sent:
            self._gloo.send([memory], peer, 4 * number + 1).wait()
        else:
            self._gloo.recv([memory], peer, 4 * number + 1).wait()

    def _compare(self, peer: int, own: str, others: str, which: str) -> None:
        verbs = {"send": "receive", "receive": "send"}
        verb, _, rest = own.partition(" ")
        if others == f"{verbs[verb]} {rest}":
            return
        is_stuck = others.startswith(verb)
        raise StrictError(
            f"{self}: {which} is {own} on rank {self._ranks[self._rank]}, but {others} on rank"
            f" {self._ranks[peer]}: with NCCL "
            + ("both wait forever" if is_stuck else "the message would land in the wrong place")
        )

    @contextmanager
    def batched(self) -> Iterator[list[StrictWork]]:
        """Messages that are issued in this block run at once, as in `ncclGroupStart` and `End`."""
        works: list[StrictWork] = []
        self._batch, self._batch_tensors = [], []
        try:
            yield works
        finally:
            batch, self._batch = self._batch, None
        run = partial(self._exchange_all, batch)
        what = "a batch of " + "; ".join(
            f"{told} ({self._ranks[to]})" for _, to, _, told, _ in batch
        )
        works.append(self._issue("collectives", what, self._batch_tensors, run))

    def _exchange_all(self, batch: list[_Transfer]) -> None:
        pending, expected = [], []
        for is_sent, peer, _, told, number in batch:
            if is_sent:
                pending.append(self._gloo.send([_header(told)], peer, 4 * number + 2))
            else:
                header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
                work = self._gloo.recv([header], peer, 4 * number + 2)
                expected.append((work, header, peer, told, number))
        for work, header, peer, told, number in expected:
            work.wait()
            self._compare(peer, told, _text(header), f"batched message number {number}")
        for is_sent, peer, memory, _, number in batch:
            post = self._gloo.send if is_sent else self._gloo.recv
            pending.append(post([memory], peer, 4 * number + 3))
        for work in pending:
            work.wait()

    # ---- streams

    def check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _count(self, queue: Any) -> int:
        self._numbers[queue] += 1
        return self._numbers[queue]

    def _seen(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The device's memory, as gloo sees it: rule 1."""
        for tensor in tensors:
            if tensor.device.type != "bay":
                raise StrictError(
                    f"No backend type associated with device type {tensor.device.type}: NCCL takes"
                    f" tensors of the accelerator, this one is {_form([tensor])}"
                )
            if not tensor.is_contiguous():
                raise StrictError(f"Tensors must be contiguous, this one is not: {_form([tensor])}")
        return [_memory_of(tensor) for tensor in tensors]

    def _issue(
        self,
        queue: Any,
        what: str,
        tensors: Sequence[torch.Tensor],
        run: Callable[[], Any],
        kind: type[StrictWork] = StrictWork,
    ) -> StrictWork:
        _issuer.check(what)
        self.check()
        device = tensors[0].device
        if (queue, device) not in self._streams:
            self._meet(queue, what)
            self._streams[queue, device] = torch.Stream(device=device)
        stream = self._streams[queue, device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        for tensor in tensors:
            tensor.record_stream(stream)
        self._store.set(f"last{self._rank}", what)
        seconds = _late_seconds

        def guarded() -> None:
            sleep(seconds)
            try:
                run()
            except StrictError as fault:
                self._fault = fault
                raise
            except RuntimeError as fault:
                self._fault = StrictError(f"{self}: {what} failed: {fault}. {self._last_issued()}")
                raise self._fault from fault

        bay.launch(stream, guarded)
        end = torch.Event(device=device)
        end.record(stream)
        return kind(self, end, list(tensors))

    def _meet(self, queue: Any, what: str) -> None:
        """Wait until all members of a communicator are there: rule 6."""
        kind, *peers = queue if isinstance(queue, tuple) else (queue,)
        members = sorted((self._rank, *peers)) if peers else range(self._size)
        name = f"{kind}{'-'.join(map(str, members))}"
        self._store.set(f"last{self._rank}", f"the first operation of {name}: {what}")
        self._store.set(f"{name}/{self._rank}", "")
        try:
            self._store.wait([f"{name}/{member}" for member in members], PATIENCE)
        except RuntimeError as fault:
            self._fault = StrictError(
                f"{self}: {what} is the first operation of a communicator of ranks"
                f" {[self._ranks[member] for member in members]}, which do not all come to it."
                f" {self._last_issued()}"
            )
            raise self._fault from fault

    def _last_issued(self) -> str:
        """What each rank did last, once somebody has waited in vain."""
        last = []
        for place, rank in enumerate(self._ranks):
            key = f"last{place}"
            done = self._store.get(key).decode() if self._store.check([key]) else "nothing"
            last.append(f"rank {rank} issued last: {done}")
        return "; ".join(last)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    size_bytes = tensor.numel() * tensor.itemsize
    if not size_bytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _form(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.numel()} {tensor.dtype}" for tensor in tensors)


def _reduction(opts: Any) -> str:
    return str(opts.reduceOp.op).rpartition(".")[2]


def _header(text: str) -> torch.Tensor:
    data = text.encode()[:_HEADER_BYTES].ljust(_HEADER_BYTES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _text(header: torch.Tensor) -> str:
    return bytes(header.tolist()).decode().rstrip()


def register_strict() -> None:
    """Let `init_process_group("strict")` make such a group; more than once does nothing."""
    if "STRICT" in distributed.Backend._plugins:
        return
    distributed.Backend.register_backend(
        "strict", lambda options, _: StrictGroup(options), extended_api=True, devices=["bay"]
    )
    plain = distributed_c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[distributed.P2POp]) -> list[Any]:
        group = p2p_op_list[0].group or distributed.group.WORLD
        if not isinstance(group, StrictGroup):
            return plain(p2p_op_list)
        with group.batched() as works:  # torch does so itself for groups that are written in C++
            plain(p2p_op_list)
        return works

    distributed_c10d.batch_isend_irecv = batch_isend_irecv
    distributed.batch_isend_irecv = batch_isend_irecv


@contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """Be a rank of such a group; yields which, and of how many."""
    register_strict()
    distributed.init_process_group("strict")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    yield rank, size
    store = distributed_c10d._get_default_store()
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < size:  # others may not have met its store yet
        sleep(0.01)
    distributed.destroy_process_group()
