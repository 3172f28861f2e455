"""`BatchMark`: whether all ranks were given the same batch, told by one small number.

Every rank is given the whole batch. One with a part of it, as a `DistributedSampler` hands out, or
with one that was shuffled otherwise, would train on other samples than its neighbours, and no
number would look wrong. So each step's loss is summed up together with a number made of the batch's
form and a few of its values: the sums of the numbers and of their squares show whether all are the
same, and cost no message of their own. Values on a GPU are left out; to read them is to wait.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from bayplan.data.errors import UsageError

__all__ = ["BatchMark", "are_alike", "form_of"]

_BITS = 20  # so that squares of all ranks' numbers add up in a float64 without rounding
_NUM_VALUES = 8  # of the first sample and of the last


@dataclass(frozen=True)
class BatchMark:
    """What is told of a batch.

    Attributes:
        form: the shapes and dtypes of its tensors, in words.
        number: of form and values.
    """

    form: str
    number: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "BatchMark":
        """The mark of a batch."""
        form = form_of(tensors)
        number = zlib.crc32(form.encode())
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.numel():
                number = zlib.crc32(_few_values(tensor), number)
        return cls(form, number >> (32 - _BITS))

    def beside(self, loss: torch.Tensor) -> torch.Tensor:
        """A part of the loss, with what is summed up beside it."""
        number = float(self.number)
        mark = torch.tensor([number, number * number], dtype=loss.dtype, device=loss.device)
        return torch.cat([loss.reshape(1), mark])

    def check(self, sums: torch.Tensor) -> None:
        """Raise UsageError on all ranks if the sums over them show that marks differ."""
        if are_alike(sums, distributed.get_world_size()):
            return
        own = torch.tensor([self.number, zlib.crc32(self.form.encode())], device=sums.device)
        found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, own)
        rows = [one.tolist() for one in found]
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        is_same_form = len({form for _, form in rows}) == 1
        what = f"its form is the same, {self.form}, its values are not" if is_same_form else ""
        what = what or f"rank {distributed.get_rank()} has {self.form}"
        raise UsageError(
            f"rank {', '.join(map(str, others))} was given another batch than rank 0: {what};"
            " give every rank the whole batch, the same everywhere (a loader without"
            " DistributedSampler, with the same seed)"
        )


def are_alike(sums: torch.Tensor, num_ranks: int) -> bool:
    """Whether numbers that add up so, with their squares, are all the same (Cauchy and Schwarz)."""
    total, squares = (int(one) for one in sums[1:].tolist())  # whole, so that nothing is rounded
    return total * total == squares * num_ranks


def form_of(tensors: Sequence[torch.Tensor]) -> str:
    """The shapes and dtypes of a batch.

    Example:
        >>> form_of([torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)])
        '4x3 float32, 4 int64'
    """
    return ", ".join(
        f"{'x'.join(map(str, one.shape)) or 'scalar'} {str(one.dtype).removeprefix('torch.')}"
        for one in tensors
    )


def _few_values(tensor: torch.Tensor) -> bytes:
    if not tensor.dim():
        return _bytes_of(tensor.reshape(1))
    first, last = tensor[0].reshape(-1), tensor[-1].reshape(-1)
    return _bytes_of(first[:_NUM_VALUES]) + _bytes_of(last[-_NUM_VALUES:])


def _bytes_of(values: torch.Tensor) -> bytes:
    return values.detach().contiguous().view(torch.uint8).numpy().tobytes()
