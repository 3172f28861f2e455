"""A step's program at any batch size, from the programs at two.

The ops of a model are the same at every batch size, and each buffer is a fixed part plus a part per
sample, so two sizes determine all others exactly. Seconds and scratch memory are only nearly so.
"""

from dataclasses import dataclass

from msgspec import structs

from bayplan.data.errors import CaptureError
from bayplan.data.program import Op, Program

__all__ = ["AffineProgram"]


@dataclass(frozen=True)
class AffineProgram:
    """Two programs of one model, at two batch sizes.

    Example:
        >>> op = Op(name="f", reads=(), writes=(0,), seconds=1.0)
        >>> two = Program(buffers=(120,), ops=(op,), first_backward=1)
        >>> four = structs.replace(two, buffers=(140,))
        >>> AffineProgram(two, 2, four, 4).at(10).buffers
        (200,)
    """

    small: Program
    small_batch: int
    large: Program
    large_batch: int

    def __post_init__(self) -> None:
        assert self.small_batch != self.large_batch, "two different batch sizes"
        shapes = [
            (one.first_backward, list(map(_shape, one.ops)), list(map(_shape, one.repeats)))
            for one in (self.small, self.large)
        ]
        if shapes[0] != shapes[1]:
            raise CaptureError(
                f"the step runs other operators at batch {self.small_batch} than at batch"
                f" {self.large_batch}, so its largest batch cannot be searched; give --batch"
            )

    def at(self, batch: int) -> Program:
        """The program at a batch size."""
        return structs.replace(
            self.large,
            buffers=tuple(map(self._integer(batch), self.small.buffers, self.large.buffers)),
            ops=tuple(
                self._op(batch, small, large)
                for small, large in zip(self.small.ops, self.large.ops, strict=True)
            ),
            resident_bytes=self._integer(batch)(
                self.small.resident_bytes, self.large.resident_bytes
            ),
        )

    def _op(self, batch: int, small: Op, large: Op) -> Op:
        seconds, workspace_bytes = self._costs(batch, small, large)
        repeat_seconds, repeat_workspace_bytes = self._costs(batch, small.again(), large.again())
        return structs.replace(
            large,
            seconds=seconds,
            workspace_bytes=workspace_bytes,
            takes_over=tuple(sorted({*small.takes_over} & {*large.takes_over})),
            repeat_seconds=repeat_seconds,
            repeat_workspace_bytes=repeat_workspace_bytes,
        )

    def _costs(self, batch: int, small: Op, large: Op) -> tuple[float, int]:
        seconds = small.seconds + self._share(batch) * (large.seconds - small.seconds)
        workspace_bytes = self._integer(batch)(small.workspace_bytes, large.workspace_bytes)
        return max(0.0, seconds), workspace_bytes

    def _share(self, batch: int) -> float:
        return (batch - self.small_batch) / (self.large_batch - self.small_batch)

    def _integer(self, batch: int):  # noqa: ANN202 - a function of two integers to one
        distance = self.large_batch - self.small_batch

        def between(small: int, large: int) -> int:
            return max(0, small + (large - small) * (batch - self.small_batch) // distance)

        return between


def _shape(op: Op) -> tuple[object, ...]:
    return op.name, op.reads, op.writes, op.can_repeat
