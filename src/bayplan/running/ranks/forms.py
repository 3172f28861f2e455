"""How a value looks on its way between ranks: which bytes, in which order, for which samples.

Values travel in the order in which their elements lie in memory, so that mostly nothing has to be
rearranged, and arrive with the strides that the graph was traced with. Samples of a value are a
slice along the dimension that grows with the batch.

Those strides matter: a view that the graph has of a value, or of what is computed from it, may be
impossible with others. So a value that repeats itself, as the gradient of a sum does, travels once
and is repeated where it arrives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from bayplan.data.units import round_up
from bayplan.running.stages.sampling import Samples, layout_of

__all__ = ["Form", "Parcel"]

_ALIGNMENT_BYTES = 16  # no dtype needs more


@dataclass(frozen=True)
class Form:
    """One value.

    Where samples are spread over a dimension (`sampling.py`), it counts as two: an outer one, and
    that of the samples.

    Attributes:
        shape: for one sample, with the dimension of samples counting its rows.
        layout: the dimensions from the outermost in memory to the innermost.
        dimension: of samples; None for a value that is the same for all of them.
        is_spread: whether the value itself has the one before and that of samples in one.
        repeated: the dimensions of the value along which it repeats itself, with their sizes;
            in `shape` they count 1.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    dimension: int | None
    is_spread: bool = False
    repeated: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, name: str, value: torch.Tensor, samples: Samples | None) -> "Form":
        """The form of a traced value, see `batch_dimensions`."""
        at = None if samples is None else samples.dimension
        shape, repeated = list(value.shape), _repeated(value, besides=at)
        for dimension, _ in repeated:
            shape[dimension] = 1
        if samples is None or at is None:
            layout = layout_of(value)
            return cls(name, value.dtype, tuple(shape), layout, None, repeated=repeated)
        outer, layout = samples.known_outer(name), samples.layout
        if value.stride(at) == 0:
            # The same for every sample here, but another rank's samples may have another.
            layout = (at, *(dimension for dimension in layout if dimension != at))
        if outer == 1:
            shape[at] = samples.rows
            return cls(name, value.dtype, tuple(shape), layout, at, repeated=repeated)
        shape[at : at + 1] = [outer, samples.rows]
        # Both parts of the dimension, one after the other; later dimensions move up.
        apart = [
            later
            for dimension in layout
            for later in ((at, at + 1) if dimension == at else (dimension + (dimension > at),))
        ]
        spread = (name, value.dtype, tuple(shape), tuple(apart), at + 1)
        return cls(*spread, is_spread=True, repeated=repeated)

    @cached_property
    def is_plain(self) -> bool:
        """Whether samples come first, and dimensions in order, and nothing is repeated."""
        in_order = self.layout == tuple(range(len(self.shape)))
        return in_order and self.dimension == 0 and not self.is_spread and not self.repeated

    def empty(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Room for some samples, each element once."""
        shape = list(self.shape)
        if self.dimension is not None:
            shape[self.dimension] *= num_samples
        if self.is_plain:
            return torch.empty(shape, dtype=self.dtype, device=device)
        room = torch.empty_permuted(shape, self.layout, dtype=self.dtype, device=device)
        return self.joined(room)

    def size_bytes(self, num_samples: int) -> int:
        """What some samples take."""
        count = 1 if self.dimension is None else num_samples
        return count * torch.Size(self.shape).numel() * self.dtype.itemsize

    def part(self, value: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Some samples of a value, counted from its own first; not joined, and not repeated."""
        for dimension, _ in self.repeated:
            value = value.narrow(dimension, 0, 1)
        if self.dimension is None:
            return value
        if self.is_spread:
            value = value.unflatten(self.dimension - 1, (self.shape[self.dimension - 1], -1))
        rows = self.shape[self.dimension]
        return value.narrow(self.dimension, begin * rows, (end - begin) * rows)

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """A part as a value of its own, with the dimensions that values have."""
        if self.dimension is None or not self.is_spread:
            return part
        return part.flatten(self.dimension - 1, self.dimension)

    def as_traced(self, value: torch.Tensor) -> torch.Tensor:
        """A value that has each element once, with all its repetitions."""
        if not self.repeated:
            return value
        sizes = [-1] * value.dim()
        for dimension, size in self.repeated:
            sizes[dimension] = size
        return value.expand(sizes)

    def in_memory_order(self, value: torch.Tensor) -> torch.Tensor:
        """The same elements, outermost dimension first."""
        return value.permute(self.layout)


def _repeated(value: torch.Tensor, *, besides: int | None) -> tuple[tuple[int, int], ...]:
    """The dimensions along which a value repeats itself, but for that of samples."""
    return tuple(
        (at, size)
        for at, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True))
        if step == 0 and size > 1 and at != besides
    )


@dataclass(frozen=True)
class Parcel:
    """Some samples of some values, in one message.

    Attributes:
        begin, end: the samples, counted from the first of the piece at hand.
    """

    forms: tuple[Form, ...]
    begin: int
    end: int

    @cached_property
    def offsets(self) -> list[int]:
        """Where each value begins, and where the last one ends.

        The end is not rounded: one value alone is as long as its memory, from which or into which
        the other rank may send or receive it without a copy.
        """
        *sizes, last = (form.size_bytes(self.end - self.begin) for form in self.forms)
        begins = accumulate((round_up(size, _ALIGNMENT_BYTES) for size in sizes), initial=0)
        found = list(begins)
        return [*found, found[-1] + last]

    def packed(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """What to send: a slice of the value itself where that is one piece of memory."""
        if len(values) == 1 and (piece := self._in_one_piece(values[0])) is not None:
            return piece
        parts = [
            form.in_memory_order(form.part(value, self.begin, self.end))
            for form, value in zip(self.forms, values, strict=True)
        ]
        offsets = self.offsets
        message = torch.empty(offsets[-1], dtype=torch.uint8, device=values[0].device)
        for form, part, offset in zip(self.forms, parts, offsets, strict=False):
            self._room(form, message, offset).copy_(part)
        return message

    def landing(self, values: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Where to receive into the values themselves, if their part is one piece of memory."""
        return self._in_one_piece(values[0]) if len(values) == 1 else None

    def _in_one_piece(self, value: torch.Tensor) -> torch.Tensor | None:
        """The part of the only value, where that is one piece of memory."""
        (form,) = self.forms
        if form.is_plain and value.is_contiguous():
            # The most common case, and for small messages the arithmetic below counts.
            rows = form.shape[0]
            whole = value.shape[0] == (self.end - self.begin) * rows
            return value if whole else value[self.begin * rows : self.end * rows]
        part = form.in_memory_order(form.part(value, self.begin, self.end))
        return part if part.is_contiguous() else None

    def unpacked(self, message: torch.Tensor) -> Iterator[tuple[Form, torch.Tensor]]:
        """The part of each value in a message that came."""
        for form, offset in zip(self.forms, self.offsets, strict=False):
            order = sorted(range(len(form.layout)), key=form.layout.__getitem__)
            yield form, self._room(form, message, offset).permute(order)

    def _room(self, form: Form, message: torch.Tensor, offset: int) -> torch.Tensor:
        """The place of a value in a message, in the order of memory."""
        num_samples = self.end - self.begin
        room = message[offset : offset + form.size_bytes(num_samples)].view(form.dtype)
        shape = [
            form.shape[at] * (num_samples if at == form.dimension else 1) for at in form.layout
        ]
        return room.view(shape)
