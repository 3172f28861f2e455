"""`bayplan.bind`: a training step that runs on many ranks as its plan says.

Every rank holds the same module and is given the whole batch; what it computes of it, and when, is
in the plan. The first step of a batch size traces the model, without memory, and compiles the
stages of this rank.
"""

import atexit
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from bayplan.data import files
from bayplan.data.actions import Action
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.graph import StorageKind
from bayplan.data.plan import Plan, RankPlan
from bayplan.devices.device import device_of
from bayplan.devices.machine import check_torch_version
from bayplan.running.checkpoints.training_state import Stateful, TrainingState
from bayplan.running.collectives.groups import Queues, has_tags, own_group
from bayplan.running.collectives.sums import Sum, Sums, room_bytes
from bayplan.running.collectives.topology import RankTopology, open_topology
from bayplan.running.collectives.transports import (
    LARGE_BYTES,
    Mailboxes,
    Pending,
    Transport,
    open_peer_memory,
)
from bayplan.running.ranks.gradients import Gradients, StageReplicas, Versions
from bayplan.running.ranks.journal import Journal
from bayplan.running.ranks.rank_checkpoints import Owners, RankCheckpoints, Resumed
from bayplan.running.ranks.rank_step import RankStep
from bayplan.running.ranks.starting import BatchMark, Holdings, start_alike
from bayplan.running.ranks.transfers import largest_by_sender
from bayplan.running.ranks.watching import Watch, open_watch
from bayplan.running.ranks.worker import Worker
from bayplan.running.shortage import MemoryWatch
from bayplan.running.swaps.swap_space import RankSwap
from bayplan.simulating.checking import check_rank_plan
from bayplan.step import Batch, LossFunction, TrainingStep
from bayplan.tracing.stages.whole_trace import batch_tensors, num_samples_of, own_tensors

__all__ = ["LossSums", "PipelinedStep", "bind"]


_LOSS_DTYPE = torch.float64
_NUM_LOSS_SUMS = 3


class LossSums:
    """All-reduces one loss after the other: each rank has a part of it, and all get the sum.

    Beside the loss go two numbers that show whether all ranks had the same batch (`BatchMark`).
    With stale weights, the loss of a batch comes `lag` batches later: to wait for the present one
    would make every rank wait for the last stage. `sums` are over all ranks, used for nothing else;
    `device` is that of the losses.
    """

    def __init__(self, sums: Sums | None, lag: int, device: torch.device) -> None:
        assert sums is not None, "all ranks take part"
        self._sums, self._lag = sums, lag
        self._rooms = deque(sums.room(_NUM_LOSS_SUMS, _LOSS_DTYPE, device) for _ in range(lag + 1))
        self._owed: deque[tuple[Pending, torch.Tensor, torch.Tensor]] = deque()

    @staticmethod
    def needed_bytes(lag: int) -> int:
        return (lag + 1) * room_bytes(_NUM_LOSS_SUMS, _LOSS_DTYPE)

    def add(self, part: torch.Tensor) -> torch.Tensor | None:
        """Take this rank's part of a loss; returns the sums that are due, None if none are."""
        room = self._rooms[0]
        room.copy_(part)
        if not self._lag:
            self._sums.now(room)
            return room.clone()
        self._rooms.rotate(-1)
        self._owed.append((self._sums.begin(room), room, part))
        return self._waited() if len(self._owed) > self._lag else None

    def rest(self) -> list[torch.Tensor]:
        """The sums still owed."""
        return [self._waited() for _ in range(len(self._owed))]

    @property
    def parts(self) -> list[torch.Tensor]:
        """This rank's parts of the losses still owed."""
        return [part for _, _, part in self._owed]

    def _waited(self) -> torch.Tensor:
        pending, room, _ = self._owed.popleft()
        pending.wait()
        return room.clone()


def bind(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | Path | str | None = None,
    *,
    loss_fn: LossFunction = None,
    autocast: torch.dtype | None = None,
    swap: Path | str | None = None,
    swap_bytes: int | None = None,
) -> "PipelinedStep":
    """Make this rank's part of a planned training step.

    Call it on every rank, after `torch.distributed.init_process_group`, with the same model,
    optimizer and plan everywhere. A rank keeps only those parameters that its stages read; when
    `state_dict` is asked for, on all ranks, the others come from where they are.

    Args:
        model: the same on every rank.
        optimizer: of this very model's parameters.
        plan: for as many ranks as there are, or its file; by default the file that the environment
            variable BAYPLAN_PLAN names.
        loss_fn: of the model's output and the targets, a mean over samples; None if the model
            returns its loss.
        autocast: dtype of mixed precision.
        swap: a directory for what the plan swaps on this rank; ranks may share it.
        swap_bytes: the most that this rank may take there; None for what the plan needs.

    On every rank of a script that torchrun has started::

        step = bind(model, optimizer, plan, loss_fn=loss_fn)
        loss = step(images, labels)
    """
    if not distributed.is_initialized():
        raise UsageError(
            "bind needs a process group; start the script with torchrun and call"
            " torch.distributed.init_process_group() first"
        )
    watch = open_watch()
    with watch.telling():
        watch.doing = "bind, before the first step"
        given = plan if isinstance(plan, Plan) else _read(plan)
        check_torch_version(given.torch_version)
        taken = check_rank_plan(given, has_tags=has_tags(_device_of(model)))
        world_size, num_ranks = distributed.get_world_size(), len(taken.actions)
        if world_size != num_ranks:
            raise UsageError(
                f"the plan is for {num_ranks} ranks, here are {world_size}; start as many (with"
                f" one host, torchrun --nproc-per-node {num_ranks}), or plan for these"
            )
        _check_optimizer(model, optimizer)
        step = TrainingStep(model=model, batch=(), loss_fn=loss_fn, autocast=autocast)
        start_alike(taken, own_tensors(step), optimizer)
        place = RankSwap(distributed.get_rank(), None if swap is None else Path(swap), swap_bytes)
        return PipelinedStep(step, optimizer, taken, watch, place)


def _read(path: Path | str | None) -> Plan:
    given = path or os.environ.get("BAYPLAN_PLAN")
    if not given:
        raise UsageError("bind needs a plan: give it, or its file, or set BAYPLAN_PLAN to the file")
    try:
        return files.read(Path(given), Plan)
    except FileFault as fault:
        raise FileFault(f"{fault}{'' if path else ' (the file that BAYPLAN_PLAN names)'}") from None


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of another model, whose parameters would never get a gradient."""
    known = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_foreign = sum(id(parameter) not in known for parameter in given)
    if num_foreign:
        raise UsageError(
            f"{num_foreign} of the optimizer's {len(given)} parameters are not among the model's"
            f" {len(known)}; make the optimizer of model.parameters(), after the model's last"
            " change"
        )


class PipelinedStep:
    """One rank's part of a training step; called with a whole batch, it returns the batch's loss.

    Attributes:
        journal: what this rank does and did.
        num_samples: of the last batch.
    """

    num_samples: int = 0

    def __init__(
        self,
        step: TrainingStep,
        optimizer: torch.optim.Optimizer,
        plan: RankPlan,
        watch: Watch,
        swap: RankSwap,
    ) -> None:
        self._step, self._optimizer, self._plan = step, optimizer, plan
        self._watch, self._swap = watch, swap
        self.memory = MemoryWatch(
            device_of(_device_of(step.model)),
            predicted_bytes=plan.predicted_peak_bytes[distributed.get_rank()],
            option="--memory-per-rank",
            held_bytes=sum(parameter.nbytes for parameter in step.model.parameters()),
        )
        self._rank = distributed.get_rank()
        self._workers: dict[str, Worker] = {}  # by the form of a batch
        self._worker: Worker | None = None  # the last one
        self._marks: deque[BatchMark] = deque()  # of batches whose loss is owed
        self._unchecked: deque[tuple[BatchMark, torch.Tensor]] = deque()  # with their sums
        self._num_batches = 0
        self._holdings: Holdings | None = None
        self._kept: tuple[Gradients, Versions] | None = None  # the same for every batch size
        self._owners: Owners | None = None
        self._checkpoints = RankCheckpoints(TrainingState(step, optimizer), plan)
        self._sums: Mapping[tuple[int, ...], Sums] = {}  # by ranks that share gradients
        actions = [Action.parse(text) for text in plan.actions[self._rank]]
        self.journal = Journal(actions, self._device)
        watch.doing = self.journal

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch, all of it on every rank; returns its loss, on every rank.

        Under a plan with stale weights, the loss is that of as many batches ago as the plan's
        largest lag, and not a number until there is one.
        """
        with self._watch.telling(), self.memory.telling():
            return self._run(batch if len(batch) > 1 else batch[0])

    @property
    def staleness(self) -> tuple[int, ...]:
        """For each update so far, how many updates old the weights were it was computed with."""
        return () if self._kept is None else tuple(self._kept[1].staleness)

    @property
    def sums(self) -> Sequence[Sum]:
        """The latest all-reduces of gradients."""
        return () if self._kept is None else tuple(self._kept[0].sums)

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that others share, which no meter of the process counts."""
        return sum(sums.shared_bytes for sums in self._sums.values())

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors that this rank has now, with what each is there for."""
        if self._worker is not None:
            yield from self._worker.held()
        states = self._optimizer.state.values()
        tensors = (value for state in states for value in state.values() if torch.is_tensor(value))
        yield from ((StorageKind.OPTIMIZER_STATE, tensor) for tensor in tensors)

    def close(self) -> None:
        """This rank is done; happens at exit by itself."""
        self._checkpoints.wait()
        atexit.unregister(self._watch.close_at_exit)
        self._watch.close()
        self._swap.close()

    @property
    def number(self) -> int:
        """How many batches were trained on, those before a restart included."""
        return self._num_batches

    def save(
        self, folder: Path | str, *, data: Any = None, keep: int = 2, **parts: Stateful
    ) -> Future[Path]:
        """Save the training into a folder of its own in `folder`, while training goes on.

        Call it between steps, on all ranks; they need one folder that all of them reach. What is
        saved is independent of the plan: it is resumed under another one, on any number of ranks.

        Args:
            data: where the training is in its data: numbers and words, in lists and dicts.
            keep: how many checkpoints stay in the folder.
            parts: what else has a state: `scheduler=scheduler, scaler=scaler`.

        Returns the checkpoint's folder once it is whole, to be waited for, or a `FileFault`. One
        that nobody waits for is told of by rank 0, and training goes on.
        """
        with self._watch.telling():
            return self._checkpoints.save(
                Path(folder),
                step=self._num_batches,
                owners=self._owners,
                in_flight=self._in_flight,
                parts=parts,
                data=data,
                keep=keep,
            )

    def load(self, folder: Path | str, **parts: Stateful) -> Resumed | None:
        """Go on from the newest whole checkpoint in `folder`, on all ranks; None if there is none.

        Files are checked first: one that is cut off or changed is told of, and the checkpoint
        before it is taken. Nothing is unpickled.

        Args:
            parts: the same as given to `save`.
        """
        with self._watch.telling():
            if self._worker is not None:
                self.flush()  # what is in flight is of the training that is left
            resumed = self._checkpoints.load(
                Path(folder), holds=lambda name: self._has(self._owners, name), parts=parts
            )
            if resumed is not None:
                self._num_batches = resumed.step
                if self._worker is not None:
                    self._take_up(self._worker)
            return resumed

    def _has(self, owners: Owners | None, name: str) -> bool:
        return owners is None or self._rank in owners.holders.get(name, (self._rank,))

    def _in_flight(self) -> dict[str, Any] | None:
        """What stale weights leave half done."""
        if not self._lag or self._worker is None:
            return None
        self._check_batches(0)
        return {
            "form": next(form for form, own in self._workers.items() if own is self._worker),
            "worker": self._worker.in_flight(),
            "marks": [(mark.form, mark.number) for mark in self._marks],
            "losses": self._loss_sums.parts,
        }

    def _take_up(self, worker: Worker) -> None:
        """Go on from a checkpoint, where one was loaded."""
        owners, form = self._owners, next(f for f, own in self._workers.items() if own is worker)
        assert owners is not None, "a batch has come"
        in_flight = self._checkpoints.take_up(
            lambda name: self._rank in owners.trainers.get(name, ())
        )
        if in_flight is None:
            return
        if in_flight["form"] != form:
            raise UsageError(
                f"batches in flight are of {in_flight['form']}, the next one is {form}; give a"
                " batch of that form first, or call flush() before save()"
            )
        worker.go_on(in_flight["worker"])
        self._marks.extend(BatchMark(*mark) for mark in in_flight["marks"])
        for part in in_flight["losses"]:
            self._loss_sums.add(part)
        self._worker = worker

    def _run(self, batch: Batch) -> torch.Tensor:
        self.num_samples = num_samples_of(batch)
        mark = BatchMark.of(batch_tensors(batch))
        self._num_batches += 1
        self._watch.batch = (self._num_batches, mark.form)
        if mark.form not in self._workers:
            self._workers[mark.form] = self._prepared(batch)
            if self._worker is None:
                self._take_up(self._workers[mark.form])
        worker = self._workers[mark.form]
        if self._lag and worker is not self._worker:
            self.flush()  # what is in flight has another size
        self._worker = worker
        if self._holdings is not None:
            self._holdings.release()
        part = worker.run(batch_tensors(batch), self.journal)
        self._marks.append(mark)
        sums = self._loss_sums.add(mark.beside(part))
        if sums is None:
            return torch.full((), math.nan, dtype=part.dtype, device=part.device)
        return self._checked(sums)

    def flush(self) -> list[torch.Tensor]:
        """End all batches in flight, on all ranks at once; returns the losses still owed.

        Only a plan with stale weights has any. To be called before the model is saved or tested.
        """
        with self._watch.telling():
            if self._worker is not None:
                for _ in range(self._lag):
                    self._worker.run(None, self.journal)
                self._worker.rest()
            losses = [self._checked(sums) for sums in self._loss_sums.rest()]
            self._check_batches(0)
            return losses

    def _checked(self, sums: torch.Tensor) -> torch.Tensor:
        """A loss, of which it is known, or soon will be, that all ranks had the same batch.

        To look at the sums of a device is to wait for them. So a step looks at those of the one
        before it, while its own are on their way.
        """
        self._unchecked.append((self._marks.popleft(), sums))
        self._check_batches(int(not device_of(self._device).has_host_memory))
        return sums[0]

    def _check_batches(self, num_left: int) -> None:
        while len(self._unchecked) > num_left:
            mark, sums = self._unchecked.popleft()
            mark.check(sums)

    @property
    def _lag(self) -> int:
        return max(self._plan.lags, default=0)

    def _prepared(self, batch: Batch) -> Worker:
        if self._holdings is not None:
            self._holdings.collect()  # the model is traced again, for which it must be whole
        preparation = RankStep(
            plan=self._plan,
            step=replace(self._step, batch=batch),
            rank=self._rank,
            swap=self._swap,
            queues=self._queues,
            replicas=self._replicas,
            transports=self._transports,
        )
        preparation.check()
        if self._kept is None:
            self._owners = Owners(preparation.holders(), preparation.trainers())
            self._holdings = Holdings(self._step.model, self._owners.holders, self._rank)
            self._sums = preparation.sums(self._topology)
            self._kept = preparation.gradients(self._sums), preparation.versions()
        if self._queues is not None:
            self._queues.open(preparation.links())
        worker = preparation.worker(
            self._groups, *self._kept, self.journal.updating(self._optimizer.step)
        )
        if self._plan.static_order:
            ways = (way for part in worker.parts.values() for way in part.ways)
            self._mailboxes.open(largest_by_sender(ways, LARGE_BYTES))
        return worker

    @property
    def _device(self) -> torch.device:
        return _device_of(self._step.model)

    @cached_property
    def _topology(self) -> RankTopology:
        return open_topology(self._device)

    @cached_property
    def _queues(self) -> Queues | None:
        return None if has_tags(self._device) else Queues(self._rank, self._device)

    @cached_property
    def _mailboxes(self) -> Mailboxes:
        return Mailboxes(self._topology)

    @cached_property
    def _transports(self) -> tuple[Transport, ...]:
        """How messages go inside a host: small ones left in a mailbox, large ones copied over.

        A mailbox is for one thread; where there is no static order, several wait for messages.
        """
        is_static = self._plan.static_order
        neighbours = open_peer_memory(self._topology, is_ordered=is_static)
        return (self._mailboxes, neighbours) if is_static else (neighbours,)

    @cached_property
    def _loss_sums(self) -> LossSums:
        ranks = range(distributed.get_world_size())
        sums = self._topology.sums(ranks, LossSums.needed_bytes(self._lag))
        return LossSums(sums, self._lag, self._device)

    @cached_property
    def _replicas(self) -> dict[int, StageReplicas]:
        """By stage of this rank, those that it synchronises BatchNorm with."""
        stages = sorted(self._plan.synchronised_stages)
        groups = {stage: self._group_of(self._plan.stages[stage].devices) for stage in stages}
        return {stage: StageReplicas(group) for stage, group in groups.items() if group is not None}

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], distributed.ProcessGroup]:
        """Ranks that share a stage; groups are made in the same order everywhere."""
        shared = (stage.devices for stage in self._plan.stages if len(stage.devices) > 1)
        rank_sets = dict.fromkeys(tuple(sorted(devices)) for devices in shared)
        groups = {ranks: self._group_of(ranks) for ranks in rank_sets}
        return {ranks: group for ranks, group in groups.items() if group is not None}

    def _group_of(self, ranks: Iterable[int]) -> distributed.ProcessGroup | None:
        return own_group(ranks, self._device)
