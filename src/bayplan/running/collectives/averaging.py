"""Gradients averaged over ranks while autograd's backward goes on.

A hook on every parameter copies its gradient into its bucket and makes `.grad` a view of it. The
sum of a bucket begins when its last gradient is there, and divides by the number of ranks before it
adds. Backward ends when all sums are there. What autograd does otherwise is left alone: unused
parameters, gradients that are accumulated first, parameters that are frozen later.

NOTE [ Unused parameters ]
A rank that does not use a parameter has no hook called for it. When its backward ends it takes part
with zeros. Behind the gradients of the last bucket each rank says which parameters it has used, so
all know which nobody has used: their `.grad` stays as it was. There a rank also says if any of its
gradients is not finite.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import nn

from bayplan import torch_compat as torch_compat
from bayplan.devices.copy_thread import CopyThread
from bayplan.devices.moments import Moment, clock_of
from bayplan.running.collectives.bucket_sums import BucketSums, GradientBucket
from bayplan.running.collectives.sums import Sum, Sums, room_bytes
from bayplan.running.collectives.topology import RankTopology

__all__ = ["Averaging", "AveragingFault", "BackwardTimes", "needed_bytes"]

_USED = "which parameters are used"  # no parameter has such a name


class AveragingFault(RuntimeError):
    """Gradients came in a way that cannot be averaged."""


@dataclass
class BackwardTimes:
    """What happened in one backward."""

    begun: Moment  # when the first gradient was there
    ready: dict[str, Moment] = field(default_factory=dict)  # by parameter, when its gradient was
    ended: Moment = 0.0  # when backward had made all gradients
    cpu_seconds: float = 0.0  # processor time of this process in between
    done: Moment = 0.0  # when all sums were there
    sums: list[Sum] = field(default_factory=list)

    @property
    def ready_seconds(self) -> dict[str, float]:
        """By parameter, when its gradient was there; waits for a device."""
        return {name: float(when) for name, when in self.ready.items()}

    @property
    def busy_cores(self) -> float:
        """Cores that this process kept busy while backward made gradients."""
        seconds = float(self.ended) - float(self.begun)
        return self.cpu_seconds / seconds if seconds > 0 else 0.0

    @property
    def unhidden_seconds(self) -> float:
        """How long the exchange went on after backward."""
        return float(self.done) - float(self.ended)

    @property
    def exchange_seconds(self) -> float:
        """How long any sum was under way on this rank."""
        spans = sorted((sum_.begun_seconds, sum_.ended_seconds) for sum_ in self.sums)
        total, until = 0.0, float("-inf")
        for begin, end in spans:
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total


def needed_bytes(parameters: Mapping[str, torch.Tensor]) -> int:
    """What rooms for all gradients take at most, however they are laid out."""
    tensors = parameters.values()
    widest = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
    needed = sum(room_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)
    return needed + room_bytes(len(parameters), widest)


class Averaging:
    """Averages the gradients of parameters over ranks.

    Args:
        parameters: all that are trained, by name; the same on all ranks.
        buckets: names of parameters that travel together, in the order they leave; of one dtype and
            device each. Every parameter is in one.
        on_end: is called after every backward, in the middle of a step.
        finite_on: the ranks that refuse a backward if a gradient of any is not finite; None does
            not look.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sums: Sums,
        *,
        num_ranks: int,
        buckets: Sequence[Sequence[str]],
        on_end: Callable[[], None],
        finite_on: RankTopology | None = None,
    ) -> None:
        self._parameters, self._sums, self._num_ranks = parameters, sums, num_ranks
        self._on_end, self._finite_on, self._infinite = on_end, finite_on, list[str]()
        self._small: list[str] = []  # parameters whose `.grad` is not their view before the end
        self._is_on, self._is_inside = True, False
        self._cpu_begun_seconds = 0.0
        self._clock = clock_of(next(iter(parameters.values())).device)
        self.times = BackwardTimes(0.0)
        self._lay_out(buckets, None)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))
            for name, parameter in parameters.items()
        ]

    @cached_property
    def _copies(self) -> CopyThread:
        return CopyThread("bayplan-copies")

    def _lay_out(self, buckets: Sequence[Sequence[str]], copies: CopyThread | None) -> None:
        self.buckets = tuple(map(tuple, buckets))
        *_, last = self.buckets
        first = self._parameters[last[0]]
        marks = torch.empty(len(self._parameters), dtype=first.dtype, device=first.device)
        members = [*self.buckets[:-1], (*last, _USED)]
        self._buckets = BucketSums(
            {**self._parameters, _USED: marks},
            {n: GradientBucket(tuple(names), self._sums) for n, names in enumerate(members)},
            factor=1 / self._num_ranks,
            keeps_last=True,  # it has the marks, so backward is over when it begins
            copies=copies,
        )
        self._expected = dict.fromkeys((*self._parameters, _USED), 1)

    def lay_out(
        self, buckets: Sequence[Sequence[str]], sums: Sums | None = None, *, copies_beside: bool
    ) -> None:
        """Other buckets from the next backward on; gradients that are there move over.

        To be called on all ranks at once, between two backwards.

        Args:
            sums: another way to make the same sums, with the same rooms; None for as before.
            copies_beside: whether a thread of its own copies gradients, so that backward goes on
                meanwhile; may differ between ranks.
        """
        views = self._buckets.views
        kept = {
            name: parameter.grad.clone()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and _is_same(parameter.grad, views[name])
        }
        self._sums.forget_rooms()
        self._sums = self._sums if sums is None else sums
        self._lay_out(buckets, self._copies if copies_beside else None)
        for name, gradient in kept.items():
            self._parameters[name].grad = self._buckets.views[name].copy_(gradient)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in here only accumulate on this rank; the next one outside sends it all."""
        was_on, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = was_on

    def recover(self) -> None:
        """End a backward that has failed, on all ranks at once; its gradients are worth nothing."""
        if self._is_inside:
            self._end()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        if not self._is_on:
            return
        if not self._is_inside:
            self._begin()
        if name in self.times.ready:
            raise AveragingFault(
                f"{name} got a second gradient in one backward, when its first was on its way to"
                " other ranks; use torch.utils.checkpoint with use_reentrant=False, or run all but"
                " the last backward inside no_sync()"
            )
        assert parameter.grad is not None, "it was just accumulated"
        gradient, view = parameter.grad, self._buckets.views[name]
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.layout is not torch.strided:
            raise AveragingFault(f"the gradient of {name} is sparse; use sparse=False")
        if gradient is not view:  # else it was added to what the last backward has left there
            if self._buckets.put(name, gradient):
                parameter.grad = view  # and the gradient's own memory is free
            else:
                self._small.append(name)
        if self._finite_on is not None and not torch.isfinite(gradient).all():
            self._infinite.append(name)
        self.times.ready[name] = self._clock()
        self._buckets.took(name)

    def _begin(self) -> None:
        self._is_inside = True
        self.times = BackwardTimes(self._clock())
        self._cpu_begun_seconds = time.process_time()
        self._infinite.clear()
        self._small.clear()
        self._buckets.hear = self.times.sums.append
        self._buckets.begin_step(self._expected, range(len(self.buckets)))
        torch_compat.after_backward(self._end)

    def _tell_used(self) -> None:
        """NOTE [ Unused parameters ]."""
        marks, ready = self._buckets.views[_USED].fill_(1), self.times.ready
        if len(ready) < len(self._parameters):
            marks.copy_(torch.tensor([name in ready for name in self._parameters]))
        if self._finite_on is not None and self._infinite:
            rank, names = self._finite_on.rank, ", ".join(self._infinite)
            self._finite_on.store.set(f"infinite{rank}", f"{names} on rank {rank}")
            marks[0] = 2 * self._num_ranks  # the mean of all is then 2, and otherwise 1 at most
        self._buckets.took(_USED)

    def _end(self) -> None:
        self._is_inside = False
        times = self.times
        times.ended = self._clock()
        times.cpu_seconds = time.process_time() - self._cpu_begun_seconds
        self._tell_used()
        for number in range(len(self.buckets)):
            self._buckets.finish(number)
        self._give(self._small)
        self._buckets.wait()
        times.done = self._clock()
        if self._finite_on is not None and self._buckets.views[_USED][0] > 1.5:
            raise _infinite_fault(self._finite_on)
        if len(times.ready) < len(self._parameters):  # others may have used the rest
            marks = zip(self._parameters, self._buckets.views[_USED].tolist(), strict=True)
            self._give(name for name, mark in marks if mark and name not in times.ready)
        self._on_end()

    def _give(self, names: Iterable[str]) -> None:
        for name in names:
            self._parameters[name].grad = self._buckets.views[name]


def _infinite_fault(topology: RankTopology) -> AveragingFault:
    keys = [f"infinite{rank}" for rank in range(topology.world_size)]
    told = [topology.store.get(key).decode() for key in keys if topology.store.check([key])]
    return AveragingFault(
        f"gradients are infinite or not a number: {'; '.join(told)}. Lower the learning rate, or"
        " look for a division by zero there"
    )


def _is_same(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    return gradient.data_ptr() == view.data_ptr() and gradient.shape == view.shape
