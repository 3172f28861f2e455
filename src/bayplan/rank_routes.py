"""The messages of one rank: what each holds, who is at its other end, and its tag."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bayplan.data.plan import Plan
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import Message, Piece
from bayplan.running.exchange.transports import Transport
from bayplan.running.ranks.batch_marks import form_of
from bayplan.running.ranks.forms import Form, Parcel
from bayplan.running.ranks.transfers import Arrival, Departure, Route
from bayplan.running.stages.cutting import Carried

__all__ = ["RankRoutes", "salt_of"]

_SALTS = 97  # few, for a tag has 31 bits


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
        device: that they are on.
        salt: by `salt_of`, of the batch.
        transports: inside a host, instead of sockets.
    """

    plan: Plan
    pipeline: Pipeline
    rank: int
    carried: Carried
    forms: Mapping[str, Form]
    device: torch.device
    salt: int
    transports: tuple[Transport, ...]

    def arrival(self, piece: Piece, messages: Sequence[Message], *, is_back: bool) -> Arrival:
        """What a piece takes; gradients with `is_back`."""
        routes = [self._route(piece, message, is_back=is_back, comes=True) for message in messages]
        pairs = dict.fromkeys((one.source_stage, one.target_stage) for one in messages)
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
        """What a piece gives to other ranks."""
        routes = (self._route(piece, message, is_back=is_back, comes=False) for message in messages)
        return Departure(tuple(one for one in routes if one.peer != self.rank and one.names))

    def _route(self, piece: Piece, message: Message, *, is_back: bool, comes: bool) -> Route:
        """A message as this rank sees it.

        Args:
            piece: of this rank.
            message: gradients go from its receiver to its sender.
            is_back: whether it holds gradients.
            comes: whether this rank receives it.
        """
        early, late, at = message.source_stage, message.target_stage, message.micro_batch
        maker = late if is_back else early
        peer = message.sender if comes != is_back else message.receiver
        far_stage = early if (comes != is_back) else late
        (far,) = (one for one in self.pipeline.routing.pieces[far_stage][at] if one.rank == peer)
        last = far if far_stage == late else piece  # the piece of the later stage
        forms = self._forms_of(early, late, is_back=is_back, is_first=message.begin == last.begin)
        num_stages, num_micro_batches = len(self.plan.stages), self.plan.num_micro_batches
        return Route(
            peer=peer,
            source=(maker, at),
            here=Parcel(forms, message.begin - piece.begin, message.end - piece.begin),
            there=Parcel(forms, message.begin - far.begin, message.end - far.begin),
            is_shared=is_back and self._num_readers(maker) > 1,
            tag=_SALTS
            * (((is_back * num_stages + early) * num_stages + late) * num_micro_batches + at)
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
        """How many stages get gradients of a stage."""
        return sum(late == maker for late, _ in self.carried.backward)
