"""Values on their way between ranks: posted ahead of need, handed over where both are one rank.

gloo loses a message whose handle is dropped, and a send is done only once it was received. So every
handle is kept together with its memory until waiting for it is known to be free.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from bayplan.running.exchange.pending import Pending
from bayplan.running.exchange.transports import Transport, transport_of
from bayplan.running.ranks.forms import Form, Parcel

__all__ = ["Arrival", "Departure", "Route", "largest_by_sender"]

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
        """Begin to send."""
        return self._transport.send(message, self.peer, self.tag)

    def receive(self, room: torch.Tensor) -> Pending:
        """Begin to receive."""
        return self._transport.receive(room, self.peer, self.tag)

    @property
    def size_bytes(self) -> int:
        """Of the message."""
        return self.here.offsets[-1]

    @cached_property
    def _transport(self) -> Transport:
        return transport_of(self.transports, self.peer, self.size_bytes, comes=self.comes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the values."""
        return tuple(form.name for form in self.here.forms)


@dataclass
class Departure:
    """What a stage gives to other ranks for one micro-batch.

    Attributes:
        routes: to other ranks.
    """

    routes: tuple[Route, ...]
    _sent: list[tuple[Pending, torch.Tensor]] = field(default_factory=list)

    def send(self, values: Values) -> None:
        """Begin to send; the values may be dropped, but not changed."""
        for route in self.routes:
            message = route.here.packed([values[name] for name in route.names])
            self._sent.append((route.send(message), message))

    def held(self) -> Iterator[torch.Tensor]:
        """What is on its way."""
        yield from (message for _, message in self._sent)

    def wait(self) -> None:
        """Until everything was received."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


@dataclass
class Arrival:
    """What a stage takes from others for one micro-batch.

    Attributes:
        forms: of all values.
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
        """Make room, and begin to receive."""
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
        """What came, and room for what comes."""
        yield from self._values.values()
        yield from (landing for _, _, landing, _ in self._coming)

    def wait(self) -> None:
        """Until everything is here."""
        for work, route, landing, is_packed in self._coming:
            work.wait()
            if is_packed:
                for form, part in route.here.unpacked(landing):
                    self._put(form, route, part)
        self._coming.clear()

    def take(self, made: Mapping[tuple[int, int], Values]) -> dict[str, torch.Tensor]:
        """All values, those that this rank made itself among them.

        Args:
            made: by (stage, micro-batch), what this rank has made.
        """
        if not self.routes:
            self._make_room()
        for route in self.local:
            for at, name in enumerate(route.names):
                self._hand_over(route, at, made[route.source][name])
        values, self._values = self._values, {}
        for form in self._repeating:
            values[form.name] = form.as_traced(values[form.name])
        return values

    @cached_property
    def _repeating(self) -> tuple[Form, ...]:
        """What travels once and is read several times over."""
        return tuple(form for form in self.forms if form.repeated)

    def _hand_over(self, route: Route, at: int, value: torch.Tensor) -> None:
        form = route.here.forms[at]
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
    found: dict[int, int] = {}
    for route in (route for arrival in arrivals for route in arrival.routes):
        if route.transports and route.size_bytes < most_bytes:
            found[route.peer] = max(found.get(route.peer, 0), route.size_bytes)
    return found
