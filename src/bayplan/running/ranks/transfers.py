"""Values on their way between ranks: how they look, which routes they take, posted ahead of need.

Values travel in the order in which their elements lie in memory, so that mostly nothing has to be
rearranged, and arrive with the strides that the graph was traced with. Samples of a value are a
slice along the dimension that grows with the batch. The strides matter: a view that the graph has
of a value, or of what is computed from it, may be impossible with others. So a value that repeats
itself, as the gradient of a sum does, travels once and is repeated where it arrives.

gloo loses a message whose handle is dropped, and a send is done only once it was received. So every
handle is kept together with its memory until waiting for it is known to be free.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from bayplan.data.plan import RankPlan
from bayplan.data.units import round_up
from bayplan.running.collectives.transports import Pending, Transport, transport_of
from bayplan.running.ranks.starting import form_of
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import Message, Piece
from bayplan.tracing.stages.cutting import Carried
from bayplan.tracing.stages.whole import Samples, layout_of

__all__ = [
    "Arrival",
    "Departure",
    "Form",
    "Parcel",
    "RankRoutes",
    "Route",
    "largest_by_sender",
    "salt_of",
]


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
        axis = None if samples is None else samples.dimension
        shape, repeated = list(value.shape), _repeated(value, besides=axis)
        for dimension, _ in repeated:
            shape[dimension] = 1
        if samples is None or axis is None:
            layout = layout_of(value)
            return cls(name, value.dtype, tuple(shape), layout, None, repeated=repeated)
        outer, layout = samples.known_outer(name), samples.layout
        if value.stride(axis) == 0:
            # The same for every sample here, but another rank's samples may have another.
            layout = (axis, *(dimension for dimension in layout if dimension != axis))
        if outer == 1:
            shape[axis] = samples.rows
            return cls(name, value.dtype, tuple(shape), layout, axis, repeated=repeated)
        shape[axis : axis + 1] = [outer, samples.rows]
        # Both parts of the dimension, one after the other; later dimensions move up.
        apart = [
            later
            for dimension in layout
            for later in (
                (axis, axis + 1) if dimension == axis else (dimension + (dimension > axis),)
            )
        ]
        spread = (name, value.dtype, tuple(shape), tuple(apart), axis + 1)
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
        return value.permute(self.layout)


def _repeated(value: torch.Tensor, *, besides: int | None) -> tuple[tuple[int, int], ...]:
    """Dimensions along which a value repeats itself, with their sizes, but for that of samples."""
    return tuple(
        (dimension, size)
        for dimension, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True))
        if step == 0 and size > 1 and dimension != besides
    )


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
        """The part of the only value, if that is one piece of memory."""
        (form,) = self.forms
        if form.is_plain and value.is_contiguous():
            # The most common case, and for small messages the arithmetic below counts.
            rows = form.shape[0]
            whole = value.shape[0] == (self.end - self.begin) * rows
            return value if whole else value[self.begin * rows : self.end * rows]
        part = form.in_memory_order(form.part(value, self.begin, self.end))
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
        there: the same samples, counted in the piece of the other end.
        is_shared: whether others get some of these values, too.
        comes: whether this rank receives it.
        tag: tells messages between two ranks apart, where the transport can.
        transports: inside a host, the first that takes a message of its size; else sockets.
    """

    peer: int
    source: tuple[int, int]
    here: Parcel
    there: Parcel
    is_shared: bool = False
    comes: bool = False
    tag: int = 0
    transports: tuple[Transport, ...] = ()

    def send(self, message: torch.Tensor) -> Pending:
        return self._transport.send(message, self.peer, self.tag)

    def receive(self, room: torch.Tensor) -> Pending:
        return self._transport.receive(room, self.peer, self.tag)

    @property
    def size_bytes(self) -> int:
        return self.here.offsets[-1]

    @cached_property
    def _transport(self) -> Transport:
        return transport_of(self.transports, self.peer, self.size_bytes, comes=self.comes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(form.name for form in self.here.forms)


@dataclass
class Departure:
    """What a stage gives to other ranks for one micro-batch."""

    routes: tuple[Route, ...]
    _sent: list[tuple[Pending, torch.Tensor]] = field(default_factory=list)

    def send(self, values: Values) -> None:
        """Begin to send; the values may be dropped, but not changed."""
        for route in self.routes:
            message = route.here.packed([values[name] for name in route.names])
            self._sent.append((route.send(message), message))

    def held(self) -> Iterator[torch.Tensor]:
        yield from (message for _, message in self._sent)

    def wait(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


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
        self._make_room()
        for route in self.routes:
            values = [self._values[name] for name in route.names]
            landing = None if self._adds(route.here.forms[0]) else route.here.landing(values)
            is_packed = landing is None
            if landing is None:
                size_bytes = route.here.offsets[-1]
                landing = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
            self._coming.append((route.receive(landing), route, landing, is_packed))

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
        if not self.routes:
            self._make_room()
        for route in self.local:
            for form in route.here.forms:
                self._hand_over(route, form, made[route.source][form.name])
        values, self._values = self._values, {}
        for form in self._repeating:
            values[form.name] = form.as_traced(values[form.name])
        return values

    @cached_property
    def _repeating(self) -> tuple[Form, ...]:
        """What travels once and is read several times over."""
        return tuple(form for form in self.forms if form.repeated)

    def _hand_over(self, route: Route, form: Form, value: torch.Tensor) -> None:
        is_whole = (route.here.begin, route.here.end) == (0, self.num_samples)
        if is_whole and form.name not in self._values and not self._adds(form):
            part = form.joined(form.part(value, route.there.begin, route.there.end))
            # A gradient may be overwritten by whoever gets it.
            self._values[form.name] = part.clone() if route.is_shared else part
            return
        if form.name not in self._values:
            self._values[form.name] = self._room(form)
        self._put(form, route, form.part(value, route.there.begin, route.there.end))

    def _put(self, form: Form, route: Route, part: torch.Tensor) -> None:
        room = form.part(self._values[form.name], route.here.begin, route.here.end)
        if self._adds(form):
            room.add_(part)
        else:
            room.copy_(part)

    def _adds(self, form: Form) -> bool:
        return self.is_sum and form.dimension is None

    def _room(self, form: Form) -> torch.Tensor:
        room = form.empty(self.num_samples, self.device)
        return room.zero_() if self._adds(form) else room

    def _make_room(self) -> None:
        for form in self._roomed:
            self._values[form.name] = self._room(form)

    @cached_property
    def _roomed(self) -> tuple[Form, ...]:
        """What needs room before it comes."""
        named = {name for route in self.routes for name in route.names}
        # A sum of no parts is zero: its parts all went to other pieces.
        return tuple(form for form in self.forms if form.name in named or self._adds(form))


def largest_by_sender(arrivals: Iterable[Arrival], most_bytes: int) -> dict[int, int]:
    """Of messages below a size that may go inside a host, the largest that each rank sends."""
    largest: dict[int, int] = {}
    for route in (route for arrival in arrivals for route in arrival.routes):
        if route.transports and route.size_bytes < most_bytes:
            largest[route.peer] = max(largest.get(route.peer, 0), route.size_bytes)
    return largest


_SALTS = 97  # few, as a tag has 31 bits


def salt_of(tensors: Sequence[torch.Tensor]) -> int:
    """Keeps messages about batches of other forms apart.

    gloo takes a message that is too short without a word, and ends the process for one that is too
    long. Ranks that were given different batches wait instead, and their watch finds out.
    """
    return zlib.crc32(form_of(tensors).encode()) % _SALTS


@dataclass(frozen=True)
class RankRoutes:
    """What is known of a rank's messages.

    Attributes:
        carried: what goes from stage to stage.
        forms: by name, how values look on their way.
        salt: by `salt_of`, of the batch.
        transports: inside a host, instead of sockets.
    """

    plan: RankPlan
    pipeline: Pipeline
    rank: int
    carried: Carried
    forms: Mapping[str, Form]
    device: torch.device
    salt: int
    transports: tuple[Transport, ...]

    def arrival(self, piece: Piece, messages: Sequence[Message], *, is_back: bool) -> Arrival:
        routes = [self._route(piece, message, is_back=is_back, comes=True) for message in messages]
        pairs = dict.fromkeys((message.source_stage, message.target_stage) for message in messages)
        forms = (self._forms_of(*pair, is_back=is_back, is_first=True) for pair in pairs)
        return Arrival(
            forms=tuple(form for group in forms for form in group),
            num_samples=piece.end - piece.begin,
            routes=tuple(route for route in routes if route.peer != self.rank and route.names),
            local=tuple(route for route in routes if route.peer == self.rank and route.names),
            device=self.device,
            is_sum=is_back,
        )

    def departure(self, piece: Piece, messages: Sequence[Message], *, is_back: bool) -> Departure:
        routes = (self._route(piece, message, is_back=is_back, comes=False) for message in messages)
        return Departure(tuple(way for way in routes if way.peer != self.rank and way.names))

    def _route(self, piece: Piece, message: Message, *, is_back: bool, comes: bool) -> Route:
        """A message as this rank sees it.

        Args:
            piece: of this rank.
            message: gradients go from its receiver to its sender.
            comes: whether this rank receives it.
        """
        early, late, index = message.source_stage, message.target_stage, message.micro_batch
        maker = late if is_back else early
        peer = message.sender if comes != is_back else message.receiver
        far_stage = early if (comes != is_back) else late
        (far,) = (p for p in self.pipeline.routing.pieces[far_stage][index] if p.rank == peer)
        last = far if far_stage == late else piece  # the piece of the later stage
        forms = self._forms_of(early, late, is_back=is_back, is_first=message.begin == last.begin)
        num_stages, num_micro_batches = len(self.plan.stages), self.plan.num_micro_batches
        return Route(
            peer=peer,
            source=(maker, index),
            here=Parcel(forms, message.begin - piece.begin, message.end - piece.begin),
            there=Parcel(forms, message.begin - far.begin, message.end - far.begin),
            is_shared=is_back and self._num_readers(maker) > 1,
            tag=_SALTS
            * (((is_back * num_stages + early) * num_stages + late) * num_micro_batches + index)
            + self.salt,
            comes=comes,
            transports=self.transports,
        )

    def _forms_of(
        self, early: int, late: int, *, is_back: bool, is_first: bool
    ) -> tuple[Form, ...]:
        """What a message between two stages holds.

        What is the same for all samples is in one of the messages of a later piece only: there it
        is needed once, and its gradient counts once.
        """
        carried = self.carried
        names = carried.backward[late, early] if is_back else carried.forward[early, late]
        forms = (self.forms[name] for name in names)
        return tuple(form for form in forms if is_first or form.dimension is not None)

    def _num_readers(self, maker: int) -> int:
        return sum(late == maker for late, _ in self.carried.backward)
