"""Gradients that travel together: one flat tensor for each bucket, summed when it is complete.

Gradients lie in their bucket from the start, and `.grad` is a view of it, so nothing is packed or
unpacked. Sums begin in one order on all ranks, as soon as the last gradient of a bucket is there,
which may be in the middle of a backward.

NOTE [ When gradients are copied ]
1. Where backward keeps all cores busy, a large gradient is copied by whoever made it, while it is
   in a cache; small ones wait for their bucket to be full, and are copied one after the other.
2. Where it leaves cores free, a thread of its own copies, so that backward goes on at once. Only
   the largest are then copied one by one, because each job costs a change of threads.
3. A gradient that waits keeps its memory, so large ones never do.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bayplan.devices.copy_thread import CopyThread
from bayplan.running.collectives.sums import Hear, Piece, Sums
from bayplan.running.collectives.transports import Later, Pending

__all__ = ["BucketSums", "GradientBucket"]

# Gradients of less are left until their bucket is full (see the note above). In the middle of a
# backward a copy takes about 20 us, because its code is in no cache; right after another, 3 us.
_SMALL_BYTES = 64 << 10
_SMALL_BESIDE_BYTES = 1 << 20


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of one dtype and device that several ranks sum up in one message."""

    parameters: tuple[str, ...]
    sums: Sums


class BucketSums:
    """The buckets that one rank takes part in.

    Args:
        buckets: by number; each parameter is in one at most.
        factor: what each gradient is multiplied by before it is added.
        keeps_last: whether the last sum is made by the thread that waits for all of them. To wake
            another thread and be woken by it takes as long as a small sum, and far longer where
            other ranks want the same cores; but the sum begins no earlier than the wait.
        copies: the thread that copies gradients; None leaves that to whoever has them.

    Attributes:
        views: by name, where a gradient lies.
        hear: is told of every sum; None for nobody.
    """

    hear: Hear | None = None

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buckets: Mapping[int, GradientBucket],
        *,
        factor: float = 1.0,
        keeps_last: bool = False,
        copies: CopyThread | None = None,
    ) -> None:
        self._buckets, self._factor, self._num_kept = buckets, factor, int(keeps_last)
        self._copies = copies
        self._small_bytes = _SMALL_BYTES if copies is None else _SMALL_BESIDE_BYTES
        self._bucket_of = {
            name: number for number, bucket in buckets.items() for name in bucket.parameters
        }
        self.views: dict[str, torch.Tensor] = {}
        self._flat: dict[int, torch.Tensor] = {}
        for number, bucket in buckets.items():
            members = {name: parameters[name] for name in bucket.parameters}
            counts = [member.numel() for member in members.values()]
            first = next(iter(members.values()))
            flat = self._flat[number] = bucket.sums.room(sum(counts), first.dtype, first.device)
            for (name, member), part in zip(members.items(), flat.split(counts), strict=True):
                self.views[name] = part.as_strided(member.shape, _strides(member))
        # Of this step so far:
        self._taken: set[str] = set()
        self._small: dict[int, list[Piece]] = {}
        self._left: dict[int, int] = {}  # by bucket, gradients that will still come
        self._to_begin: deque[int] = deque()
        self._pending: list[Pending] = []

    @property
    def memory(self) -> Iterator[torch.Tensor]:
        return iter(self._flat.values())

    def begin_step(self, num_pieces: Mapping[str, int], order: Sequence[int]) -> None:
        """Expect gradients.

        Args:
            num_pieces: by parameter, how many times its gradient will be told to be there.
            order: the buckets that are summed up, as on all ranks.
        """
        self._taken.clear()
        self._small = {number: [] for number in order}
        self._left = {
            number: sum(num_pieces.get(name, 0) for name in self._buckets[number].parameters)
            for number in order
        }
        self._to_begin = deque(order)

    def put(self, name: str, gradient: torch.Tensor) -> bool:
        """Copy a gradient into its view before its bucket is summed; False if left for later."""
        number, piece = self._bucket_of[name], (self.views[name], gradient)
        if gradient.nbytes < self._small_bytes:
            self._small[number].append(piece)
            return False
        put = partial(self._buckets[number].sums.put, [piece])
        if self._copies is None:
            put()
        else:
            self._pending.append(Later(self._copies.submit(put).result))
        return True

    def took(self, name: str) -> None:
        """A piece of a gradient is there; the last one of a bucket lets its sum begin."""
        self._taken.add(name)
        number = self._bucket_of.get(name)
        if number in self._left:
            self._left[number] -= 1
            if not self._left[number]:
                self._begin_complete()

    def finish(self, number: int) -> None:
        """Let the sum of a bucket begin if it has not: nothing is added any more in this step."""
        if number in self._to_begin:
            self._left[number] = 0
            self._begin_complete()

    def _begin_complete(self) -> None:
        """What is complete waits for what is before it in the order."""
        while len(self._to_begin) > self._num_kept and not self._left[self._to_begin[0]]:
            begin = partial(self._begun, self._to_begin.popleft())
            if self._copies is None:
                self._pending.append(begin())
            else:  # behind the copies that it needs
                begun = self._copies.submit(begin)
                self._pending.append(Later(lambda begun=begun: begun.result().wait()))

    def _begun(self, number: int) -> Pending:
        return self._filled(number).begin(self._flat[number], self.hear, factor=self._factor)

    def _filled(self, number: int) -> Sums:
        """Copy what was left for later; what no sample of this rank reaches is zero."""
        bucket, small = self._buckets[number], self._small.pop(number)
        if small:
            bucket.sums.put(small)
        for name in bucket.parameters:
            if name not in self._taken:
                self.views[name].zero_()
        return bucket.sums

    def wait(self) -> None:
        assert all(not self._left[number] for number in self._to_begin), (
            "every bucket is finished before it is waited for"
        )
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()
        if self._to_begin:
            number = self._to_begin.popleft()
            self._filled(number).now(self._flat[number], self.hear, factor=self._factor)


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Those of the parameter if it fills its memory, as optimizers like them; else contiguous."""
    if not parameter.numel():
        return parameter.stride()
    pairs = zip(parameter.shape, parameter.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in pairs)
    is_filled = reach == parameter.numel()
    return parameter.stride() if is_filled else torch.empty(parameter.shape, device="meta").stride()
