"""What the actions of all ranks cost in seconds, for the clock."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from bayplan.data.actions import Action, ActionKind
from bayplan.planning.pipelines.clock import StepCosts
from bayplan.planning.pipelines.rank_memory import Key
from bayplan.planning.pipelines.stage_seconds import StageSeconds
from bayplan.pricing import CallPrices
from bayplan.rank_needs import RankNeeds
from bayplan.simulating.network import Network
from bayplan.stage_orders import Fit

__all__ = ["RankSeconds"]

_K = ActionKind
_ADDS = (_K.BACKWARD, _K.BACKWARD_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """Puts together what is known of stages, gradients, updates and links.

    Attributes:
        fits: by stage and samples, how it runs.
        price: of operators.
    """

    needs: RankNeeds
    fits: Mapping[Key, Fit]
    price: CallPrices
    _adding: dict[tuple[int, bool], float] = field(default_factory=dict)

    def costs(self, network: Network, *, num_cores: float = math.inf) -> StepCosts:
        """Of all ranks.

        Args:
            network: between them.
            num_cores: that they share, if they have no devices of their own.
        """
        pipeline, needs = self.needs.pipeline, self.needs
        return StepCosts(
            seconds=self.seconds,
            update_seconds=[needs.update(rank).seconds for rank in pipeline.ranks],
            message_bytes=lambda message, is_back: needs.message_bytes(message, is_back=is_back),
            bucket_bytes=[bucket.size_bytes for bucket in needs.buckets],
            network=network,
            num_cores=num_cores,
            early=self.early,
        )

    def early(self, rank: int, action: Action) -> dict[int, float]:
        """How long before a backward ends it has made the gradients of each bucket."""
        if action.kind is not _K.BACKWARD:
            return {}
        names = self.needs.staged.assignment.gradients[action.stage]
        own = self._stage_seconds(rank, action)
        made = dict(zip(names, own.gradients, strict=True))
        return {
            bucket: own.backward - max(made.get(name, 0.0) for name in self._names(bucket))
            for bucket in self.needs.pipeline.holders(rank)
        }

    def _names(self, bucket: int) -> tuple[str, ...]:
        return self.needs.buckets[bucket].parameters

    def fit(self, rank: int, action: Action) -> Fit:
        """How the stage of an action runs, with the samples of the action."""
        pieces = self.needs.pipeline.routing.pieces_of(action.stage, rank)
        (size,) = (piece.end - piece.begin for at, piece in pieces if at == action.index)
        return self.fits[action.stage, size]

    def _stage_seconds(self, rank: int, action: Action) -> StageSeconds:
        return self.fit(rank, action).seconds

    def seconds(self, rank: int, action: Action) -> float:
        """What a forward, a backward or a half of one takes."""
        pieces = self.needs.pipeline.routing.pieces_of(action.stage, rank)
        first, *_ = (at for at, _ in pieces)
        stage = self._stage_seconds(rank, action)
        own = {
            _K.FORWARD: stage.forward,
            _K.BACKWARD: stage.backward,
            _K.BACKWARD_INPUT: stage.backward_input,
            _K.BACKWARD_WEIGHT: stage.backward - stage.backward_input,
        }[action.kind]
        if action.kind in _ADDS:
            own += self._adding_seconds(action.stage, is_first=action.index == first)
        return own

    def _adding_seconds(self, stage: int, *, is_first: bool) -> float:
        """Gradients of a piece are added to those before; the first are copied, or taken."""
        key = (stage, is_first)
        if key not in self._adding:
            shared, own = self.needs.gradients(stage)
            add, copy = torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default
            if is_first:
                self._adding[key] = self._sum(copy, shared)
            else:
                self._adding[key] = self._sum(add, shared) + self._sum(add, own)
        return self._adding[key]

    def _sum(self, operator: Callable[..., object], parameters: list[torch.Tensor]) -> float:
        found = (self.price.price(operator, (one, one), {}) for one in map(_detached, parameters))
        return sum(seconds for seconds, _ in found)


def _detached(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach()
