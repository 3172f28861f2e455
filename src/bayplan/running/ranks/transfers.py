"""Values on their way between ranks: how they look, and messages that are posted ahead of need.

Values travel in the order in which their elements lie in memory, so that mostly nothing has to be
rearranged, and arrive with the strides that the graph was traced with. Samples of a value are a
slice along the dimension that grows with the batch. The strides matter: a view that the graph has
of a value, or of what is computed from it, may be impossible with others. So a value that repeats
itself, as the gradient of a sum does, travels once and is repeated where it arrives.

gloo loses a message whose handle is dropped, and a send is done only once it was received. So every
handle is kept together with its memory until waiting for it is known to be free.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain

import torch

from bayplan.data.units import round_up
from bayplan.running.collectives.transports import Pending, Transport, transport_of
from bayplan.tracing.stages.whole import Samples, layout_of

__all__ = [
    "Arrival",
    "Departure",
    "Form",
    "Parcel",
    "Route",
    "Values",
    "Way",
    "largest_by_sender",
]


_ALIGNMENT_BYTES = 16  # no dtype needs more


@dataclass(frozen=True)
class Form:
    """How one value lies in memory and in messages.

    Where samples are spread over a dimension (see `Samples.outer`), it counts as two: an outer one,
    and that of the samples.

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
        axis = None if samples is None else samples.dimension
        shape = list(value.shape)
        repeated = tuple(
            (dimension, size)
            for dimension, (size, step) in enumerate(zip(shape, value.stride(), strict=True))
            if step == 0 and size > 1 and dimension != axis
        )
        for dimension, _ in repeated:
            shape[dimension] = 1
        if samples is None or axis is None:
            layout = layout_of(value)
            return cls(name, value.dtype, tuple(shape), layout, None, repeated=repeated)
        outer, layout = samples.known_outer(name), samples.layout
        if value.stride(axis) == 0:
            # The same for every sample here, but another rank's samples may have another.
            layout = (axis, *(dimension for dimension in layout if dimension != axis))
        shape[axis] = samples.rows
        is_spread = outer > 1
        if is_spread:
            shape.insert(axis, outer)
            # Both parts of the dimension, one after the other; later dimensions move up.
            moved = (
                (axis, axis + 1) if dimension == axis else (dimension + (dimension > axis),)
                for dimension in layout
            )
            layout = tuple(chain.from_iterable(moved))
        return cls(name, value.dtype, tuple(shape), layout, axis + is_spread, is_spread, repeated)

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
        room = torch.empty_permuted(shape, self.layout, dtype=self.dtype, device=device)
        return self.joined(room)

    def size_bytes(self, num_samples: int) -> int:
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
        sizes = [-1] * value.dim()
        for dimension, size in self.repeated:
            sizes[dimension] = size
        return value.expand(sizes)


@dataclass(frozen=True)
class Parcel:
    """Some samples of some values, counted from the first of the piece at hand, in one message."""

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
        begins = [*accumulate((round_up(size, _ALIGNMENT_BYTES) for size in sizes), initial=0)]
        return [*begins, begins[-1] + last]

    def packed(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """What to send: a slice of the value itself where that is one piece of memory."""
        piece = self.in_one_piece(values)
        if piece is not None:
            return piece
        offsets = self.offsets
        message = torch.empty(offsets[-1], dtype=torch.uint8, device=values[0].device)
        for form, value, offset in zip(self.forms, values, offsets, strict=False):
            part = form.part(value, self.begin, self.end)
            self._room(form, message, offset).copy_(part.permute(form.layout))
        return message

    def in_one_piece(self, values: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The part of a single value, to send or to receive into; None if it has gaps."""
        if len(values) > 1:
            return None
        (form,), (value,) = self.forms, values
        if form.is_plain and value.is_contiguous():
            # The most common case, and for small messages the arithmetic below counts.
            rows = form.shape[0]
            whole = value.shape[0] == (self.end - self.begin) * rows
            return value if whole else value[self.begin * rows : self.end * rows]
        part = form.part(value, self.begin, self.end).permute(form.layout)
        return part if part.is_contiguous() else None

    def unpacked(self, message: torch.Tensor) -> Iterator[tuple[Form, torch.Tensor]]:
        for form, offset in zip(self.forms, self.offsets, strict=False):
            order = sorted(range(len(form.layout)), key=form.layout.__getitem__)
            yield form, self._room(form, message, offset).permute(order)

    def _room(self, form: Form, message: torch.Tensor, offset: int) -> torch.Tensor:
        """The place of a value in a message, in the order of memory."""
        num_samples = self.end - self.begin
        room = message[offset : offset + form.size_bytes(num_samples)].view(form.dtype)
        shape = [
            form.shape[dimension] * (num_samples if dimension == form.dimension else 1)
            for dimension in form.layout
        ]
        return room.view(shape)


Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Route:
    """What one message holds.

    Attributes:
        peer: the rank at the other end; this one itself for a hand-over.
        source: (stage, micro-batch) that made the values.
        here: in samples of this rank's piece.
        there: begin and end of the same samples, counted in the piece of the other end.
        is_shared: whether others get some of these values, too.
        comes: whether this rank receives it.
        tag: tells messages between two ranks apart, where the transport can.
        transports: inside a host, the first that takes a message of its size; else sockets.
        far_stage: the stage at the other end.
    """

    peer: int
    source: tuple[int, int]
    here: Parcel
    there: tuple[int, int]
    is_shared: bool = False
    comes: bool = False
    tag: int = 0
    transports: tuple[Transport, ...] = ()
    far_stage: int = 0

    @property
    def size_bytes(self) -> int:
        return self.here.offsets[-1]

    @cached_property
    def transport(self) -> Transport:
        return transport_of(self.transports, self.peer, self.size_bytes, comes=self.comes)


@dataclass
class Departure:
    """What a stage gives to other ranks for one micro-batch."""

    routes: tuple[Route, ...]
    _sent: deque[list[tuple[Pending, torch.Tensor]]] = field(default_factory=deque)

    def send(self, values: Values) -> None:
        """Begin to send; the values may be dropped, but not changed."""
        sent = []
        for route in self.routes:
            message = route.here.packed([values[form.name] for form in route.here.forms])
            sent.append((route.transport.send(message, route.peer, route.tag), message))
        self._sent.append(sent)

    def held(self) -> Iterator[torch.Tensor]:
        yield from (message for sent in self._sent for _, message in sent)

    def on_the_way(self, num_sends: Callable[[Route], int]) -> list[dict[int, torch.Tensor]]:
        """What was sent and not yet received, by route, the oldest send first.

        `num_sends` tells of a route how many of the last sends the other end has not received.
        """
        return [
            {
                index: message
                for index, (route, (_, message)) in enumerate(zip(self.routes, sent, strict=True))
                if ago <= num_sends(route)
            }
            for ago, sent in zip(range(len(self._sent), 0, -1), self._sent, strict=True)
        ]

    def send_again(self, messages: Mapping[int, torch.Tensor]) -> None:
        """Send, after a restart, what was on the way before it; by route."""
        routes = [(self.routes[index], message) for index, message in messages.items()]
        self._sent.append(
            [
                (route.transport.send(message, route.peer, route.tag), message)
                for route, message in routes
            ]
        )

    def wait(self) -> None:
        """Wait for what was sent first, if it was not waited for.

        What later batches sent may still be on its way.
        """
        for work, _ in self._sent.popleft() if self._sent else ():
            work.wait()


@dataclass
class Arrival:
    """What a stage takes from others for one micro-batch.

    Attributes:
        num_samples: of the piece they are for.
        routes: from other ranks.
        local: from this rank itself.
        is_sum: whether values that are the same for all samples are gradients, which come in
            parts and are added up.
    """

    forms: tuple[Form, ...]
    num_samples: int
    routes: tuple[Route, ...]
    local: tuple[Route, ...]
    device: torch.device
    is_sum: bool = False
    _values: dict[str, torch.Tensor] = field(default_factory=dict)
    _coming: list[tuple[Pending, Route, torch.Tensor, bool]] = field(default_factory=list)

    @cached_property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """The (stage, micro-batch) of this rank that it takes from."""
        return tuple(dict.fromkeys(route.source for route in self.local))

    def post(self) -> None:
        for route in self.routes:
            values = [self._value(form) for form in route.here.forms]
            landing = None if self._adds(route.here.forms[0]) else route.here.in_one_piece(values)
            is_packed = landing is None
            if landing is None:
                landing = torch.empty(route.size_bytes, dtype=torch.uint8, device=self.device)
            work = route.transport.receive(landing, route.peer, route.tag)
            self._coming.append((work, route, landing, is_packed))

    def held(self) -> Iterator[torch.Tensor]:
        yield from self._values.values()
        yield from (landing for _, _, landing, _ in self._coming)

    def wait(self) -> None:
        for work, route, landing, is_packed in self._coming:
            work.wait()
            if is_packed:
                for form, part in route.here.unpacked(landing):
                    self._put(form, route, part)
        self._coming.clear()

    def take(self, made: Mapping[tuple[int, int], Values]) -> dict[str, torch.Tensor]:
        """All values, with those that this rank has `made` itself, by (stage, micro-batch)."""
        for route in self.local:
            for form in route.here.forms:
                self._hand_over(route, form, made[route.source][form.name])
        for form in self.forms:
            if self._adds(form):  # a sum of no parts is zero: its parts all went to other pieces
                self._value(form)
            if form.repeated:  # it travels once and is read several times over
                self._values[form.name] = form.as_traced(self._values[form.name])
        values, self._values = self._values, {}
        return values

    def _hand_over(self, route: Route, form: Form, value: torch.Tensor) -> None:
        part = form.part(value, *route.there)
        is_whole = (route.here.begin, route.here.end) == (0, self.num_samples)
        if is_whole and form.name not in self._values and not self._adds(form):
            # A gradient may be overwritten by whoever gets it.
            joined = form.joined(part)
            self._values[form.name] = joined.clone() if route.is_shared else joined
            return
        self._put(form, route, part)

    def _put(self, form: Form, route: Route, part: torch.Tensor) -> None:
        room = form.part(self._value(form), route.here.begin, route.here.end)
        if self._adds(form):
            room.add_(part)
        else:
            room.copy_(part)

    def _adds(self, form: Form) -> bool:
        return self.is_sum and form.dimension is None

    def _value(self, form: Form) -> torch.Tensor:
        """What has come so far, with room for the rest."""
        if form.name not in self._values:
            room = form.empty(self.num_samples, self.device)
            self._values[form.name] = room.zero_() if self._adds(form) else room
        return self._values[form.name]


@dataclass(frozen=True)
class Way:
    """What one piece takes from others and gives to others: values, or their gradients."""

    arrival: Arrival
    departure: Departure


def largest_by_sender(ways: Iterable[Way], most_bytes: int) -> dict[int, int]:
    """Of messages below a size that may go inside a host, the largest that each rank sends."""
    largest: dict[int, int] = {}
    for route in (route for way in ways for route in way.arrival.routes):
        if route.transports and route.size_bytes < most_bytes:
            largest[route.peer] = max(largest.get(route.peer, 0), route.size_bytes)
    return largest
