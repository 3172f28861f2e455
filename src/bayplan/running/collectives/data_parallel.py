"""`bayplan.data_parallel`: the same module on every rank, with gradients averaged over all."""

import atexit
import os
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch import distributed, nn

from bayplan.data.errors import UsageError
from bayplan.data.exchange import ExchangeSettings
from bayplan.data.histogram import histogram, histogram_text
from bayplan.data.links import LinkCost
from bayplan.devices.device import device_of
from bayplan.planning.buckets.bucket_plan import (
    BucketPlan,
    Gradient,
    filled,
    filled_timeline,
    horovod_timeline,
)
from bayplan.planning.buckets.bucketing import plan_buckets
from bayplan.running.collectives.averaging import Averaging, BackwardTimes, needed_bytes
from bayplan.running.collectives.groups import backend_of, has_tags
from bayplan.running.collectives.sums import SIZES, Sum, Sums, costs_by, measure_ways, sums_by
from bayplan.running.collectives.topology import open_topology
from bayplan.running.ranks.starting import take_model, take_values
from bayplan.running.ranks.watching import Watch, open_watch

__all__ = ["DataParallel", "data_parallel", "exchange_of", "no_sync"]

_FIRST_BUCKET_BYTES = 4 << 20  # until it is known when gradients come
_WATCHED_BACKWARDS = 2  # the first one is slower than all others
_BUSY_SHARE = 0.8  # of its cores, from which on a process leaves none of them to sums
_MOST_MESSAGES = 1 << 16  # that are remembered; a training may go on for weeks
_ATTRIBUTE = "_bayplan_data_parallel"


def data_parallel(
    model: nn.Module,
    *,
    settings: ExchangeSettings | str = "planned",
    broadcast_buffers: bool = True,
    check_finite: bool = False,
) -> nn.Module:
    """Train a model on all ranks at once, each with its own samples; returns the same module.

    In place of `DistributedDataParallel`: call it on every rank, after
    `torch.distributed.init_process_group`. All begin with rank 0's parameters and buffers, and
    after every backward `.grad` is the mean over all ranks, the same bits on all of them. What the
    model is called with, `state_dict` and your own loop stay as they are. Parameters that a forward
    does not use need no option; inside `bayplan.no_sync(model)` gradients are only accumulated.

    Which gradients travel together is planned after two steps, from when backward makes them and
    from what sums were measured to take; that changes no result but for the order of additions
    between hosts.

    Args:
        model: on this rank's device; its trained parameters must not change later.
        settings: how gradients travel, where that is not to be planned: `ExchangeSettings`, or as
            they print, `fusion_threshold=25MiB,algorithm=ring`. `compression=bf16` rounds gradients
            on their way between hosts: half the bytes, and their last digits are lost.
        broadcast_buffers: whether rank 0's buffers count before every forward in training, as under
            `DistributedDataParallel`.
        check_finite: whether a backward whose gradients are infinite or not a number ends with an
            error on all ranks, which names parameter and rank. Takes another look at all gradients;
            not for loops that scale losses until gradients are finite.
    """
    if not distributed.is_initialized():
        raise UsageError(
            "data_parallel needs a process group; start the script with torchrun and call"
            " torch.distributed.init_process_group() first"
        )
    chosen = ExchangeSettings.parse(settings) if isinstance(settings, str) else settings
    watch = open_watch()
    with watch.telling():
        watch.doing = "data_parallel, before the first step"
        if _ATTRIBUTE in model.__dict__:
            raise UsageError("data_parallel was called twice with this model; once is enough")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                "no parameter of the model is trained, so there is nothing to exchange"
            )
        take_model({**dict(model.named_parameters()), **dict(model.named_buffers())})
        state = DataParallel(model, watch, chosen, check_finite=check_finite)
    if broadcast_buffers and any(True for _ in model.buffers()):
        model.register_forward_pre_hook(lambda module, _: state.take_buffers())
    model.__dict__[_ATTRIBUTE] = state
    return model


def exchange_of(model: nn.Module) -> "DataParallel":
    """The exchange of a model that `data_parallel` was called with."""
    if _ATTRIBUTE not in model.__dict__:
        raise UsageError(
            "nothing exchanges this model's gradients; call data_parallel(model) first"
        )
    return model.__dict__[_ATTRIBUTE]


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients on this rank alone; the next backward outside sends all of them."""
    return exchange_of(model).averaging.paused()


class DataParallel:
    """The exchange of one model's gradients; `costs` are what sums were measured to take."""

    def __init__(
        self, model: nn.Module, watch: Watch, settings: ExchangeSettings, *, check_finite: bool
    ) -> None:
        self._model, self._watch, self.settings = model, watch, settings
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        device = self._device = next(iter(self._trained.values())).device
        self._topology = open_topology(device)
        self._num_backwards = self._num_plans = 0
        self._heard: list[Sum] = []  # of the last backward, which may still be on their way
        # Bytes and seconds of the latest sums, the wait for other ranks left out:
        self._messages: deque[tuple[int, float]] = deque(maxlen=_MOST_MESSAGES)
        self._waits: defaultdict[int, float] = defaultdict(float)  # seconds so far, by rank
        num_ranks = distributed.get_world_size()
        needed = max(needed_bytes(self._trained), 2 * sum(SIZES))
        self._ways = self._topology.ways(range(num_ranks), needed, is_scattered=True)
        self.costs = measure_ways(self._ways, device)
        first = filled(_gradients(self._trained, {}), threshold_bytes=_FIRST_BUCKET_BYTES)
        self.averaging = Averaging(
            self._trained,
            self._sums_by(settings),
            num_ranks=num_ranks,
            buckets=[[gradient.name for gradient in group] for group in first],
            on_end=self._after_backward,
            finite_on=self._topology if check_finite else None,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataParallel":
        raise TypeError(
            "its gradients are exchanged with other ranks; copy it, and call bayplan.fit, before"
            " data_parallel"
        )

    def use(self, settings: ExchangeSettings) -> None:
        """Exchange in another way from the next backward on; to be called on all ranks at once.

        Raises:
            UsageError: this machine cannot do so.
        """
        sums = self._sums_by(settings)
        self.settings = settings
        self._lay_out(sums)

    def _sums_by(self, settings: ExchangeSettings) -> Sums:
        if settings.cycle_time_ms and not has_tags(self._device):
            raise UsageError(
                f"cycle_time is {settings.cycle_time_ms:g} ms: a thread then begins sums, which"
                f" gloo can bear and {backend_of(self._device)} cannot; leave it out"
            )
        return sums_by(settings, self._ways, self.costs)

    def take_buffers(self) -> None:
        """Before a forward: end what has failed, and take rank 0's buffers."""
        self.averaging.recover()
        if self._model.training:
            take_values(list(self._model.buffers()))

    @property
    def times(self) -> BackwardTimes:
        return self.averaging.times

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._topology.hosts

    def predict(self, settings: ExchangeSettings) -> float:
        """Seconds of backward with its exchange, from what is known of both."""
        return self._plan(settings).end_seconds

    @property
    def messages(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds of the latest sums, the wait for other ranks left out."""
        self._take_in()
        return tuple(self._messages)

    def text(self) -> str:
        """What was exchanged lately, how much of it was hidden, and who was waited for."""
        self._take_in()
        num_ranks, times = distributed.get_world_size(), self.times
        lines = [histogram_text(histogram(self._messages, num_ranks=num_ranks))]
        hidden = max(0.0, times.exchange_seconds - times.unhidden_seconds)
        lines.append(
            f"in the last of {self._num_backwards} backwards, sums were under way for"
            f" {1e3 * times.exchange_seconds:.1f} ms, {1e3 * hidden:.1f} ms of them behind backward"
        )
        lines += [
            f"rank {self._topology.rank} has waited {seconds:.3f} s for rank {rank}"
            for rank, seconds in sorted(self._waits.items())
            if rank != self._topology.rank
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """This rank is done; happens at exit by itself."""
        self.averaging.close()
        self._model.__dict__.pop(_ATTRIBUTE, None)
        atexit.unregister(self._watch.close_at_exit)
        self._watch.close()

    def _after_backward(self) -> None:
        self._num_backwards += 1
        self._watch.doing = f"data_parallel, after backward {self._num_backwards}"
        self._take_in()
        self._heard = self.times.sums
        if self._num_backwards == _WATCHED_BACKWARDS:
            self._lay_out()

    def _take_in(self) -> None:
        """Count the sums of the last backward; those of a device are over a backward later."""
        heard, self._heard = self._heard, []
        for made in heard:
            self._messages.append((made.size_bytes, made.own_seconds))
            if made.last_rank is not None:
                self._waits[made.last_rank] += made.waited_seconds

    def _lay_out(self, sums: Sums | None = None) -> None:
        # A GPU copies in the order of its stream, which another thread would not keep to.
        copies_beside = self._is_on_cpu and not self._cores_are_taken()
        self.averaging.lay_out(self._planned(), sums, copies_beside=copies_beside)

    def _planned(self) -> list[list[str]]:
        """Names of parameters that travel together, as rank 0 plans them."""
        self._num_plans += 1
        key = f"buckets{self._num_plans}"
        if self._topology.rank == 0:
            buckets = self._plan(self.settings).buckets
            names = [[part.name for part in bucket.parts] for bucket in buckets]
            self._topology.store.set(key, msgspec.json.encode(names).decode())
        return msgspec.json.decode(self._topology.store.get(key), type=list[list[str]])

    def _plan(self, settings: ExchangeSettings) -> BucketPlan:
        link = LinkCost(seconds=costs_by(settings, self.costs).seconds)
        threshold_bytes = settings.fusion_threshold_bytes
        hides_sums = not self._cores_are_taken()
        gradients = _gradients(self._trained, self.times.ready_seconds, hides_sums=hides_sums)
        if threshold_bytes is None:
            return plan_buckets(gradients, link)
        if settings.cycle_time_ms:
            cycle_seconds = settings.cycle_time_ms / 1e3
            return horovod_timeline(
                gradients, link, threshold_bytes=threshold_bytes, cycle_seconds=cycle_seconds
            )
        return filled_timeline(gradients, link, threshold_bytes=threshold_bytes)

    @property
    def _is_on_cpu(self) -> bool:
        homes = (device_of(parameter.device) for parameter in self._trained.values())
        return all(home.counts_cpu_time for home in homes)

    def _cores_are_taken(self) -> bool:
        """Whether backward needs all cores that this rank has: then it stands still during sums."""
        if not self._is_on_cpu or len(set(self.hosts)) > 1:
            return False  # other processors or a network do most of the work of a sum
        cores_each = len(os.sched_getaffinity(0)) / len(self.hosts)
        return self.times.busy_cores > _BUSY_SHARE * cores_each


def _gradients(
    parameters: Mapping[str, torch.Tensor], ready: Mapping[str, float], *, hides_sums: bool = True
) -> list[Gradient]:
    """In the order of a backward; what was not used in it comes last.

    Args:
        ready: when each gradient was there; empty before the first backward, which is then taken
            to make the last ones first.
        hides_sums: whether sums that begin early are over early; else all are taken to be ready at
            the end of backward.
    """
    first, last = min(ready.values(), default=0.0), max(ready.values(), default=0.0)
    return [
        Gradient(
            name=name,
            size_bytes=parameters[name].nbytes,
            ready_seconds=(ready.get(name, last) if hides_sums else last) - first,
            kind=f"{parameters[name].dtype} {parameters[name].device}",
        )
        for name in sorted(reversed(list(parameters)), key=lambda name: ready.get(name, last))
    ]
