"""One rank's part of a step: its action list, carried out action by action.

The list decides everything; nothing here does. For each batch size the list is turned once into
calls with all their routes and rooms at hand, so that a step is a walk over a list.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bayplan.data.actions import Action, ActionKind
from bayplan.running.ranks.gradients import Gradients
from bayplan.running.ranks.statistics import SharedBuffers
from bayplan.running.ranks.transfers import Arrival, Departure
from bayplan.running.stages.compiled import CompiledStage
from bayplan.running.stages.drawing import Streams
from bayplan.running.stages.whole import Input, InputKind

__all__ = ["Listener", "Part", "Worker"]

Key = tuple[int, int]  # stage, micro-batch

# Receives that are posted ahead of the one that is waited for next.
_AHEAD = 2


class Listener(Protocol):
    """Who wants to know what a rank does."""

    def began(self, position: int) -> None:
        """An action begins."""

    def ended(self, position: int) -> None:
        """It is done."""


@dataclass(frozen=True)
class Part:
    """A rank's piece of one micro-batch in one stage.

    Attributes:
        begin, end: its samples.
        weight: what its loss counts in the batch's.
        arrival, departure: of values; of gradients with `back`.
    """

    stage: CompiledStage
    begin: int
    end: int
    weight: float
    arrival: Arrival
    departure: Departure
    arrival_back: Arrival
    departure_back: Departure


@dataclass
class Worker:
    """Carries out one rank's list for one batch size.

    Attributes:
        actions: the list.
        retire: by position, the positions of sends that are known to be received by then.
        parts: what each action is about.
        tensors: the parameters and buffers that the rank's stages read, by name.
        shared_buffers: that replicas of a stage average after a step.
        update: runs the optimizer, once all gradients are there.
    """

    actions: Sequence[Action]
    retire: Sequence[Sequence[int]]
    parts: Mapping[Key, Part]
    tensors: Mapping[str, torch.Tensor]
    gradients: Gradients
    streams: Streams
    shared_buffers: Sequence[SharedBuffers]
    update: Callable[[], object]
    _batch: list[torch.Tensor] = field(default_factory=list)
    _saved: dict[Key, list[Any]] = field(default_factory=dict)
    _made: dict[Key, dict[str, torch.Tensor]] = field(default_factory=dict)
    _made_back: dict[Key, dict[str, torch.Tensor]] = field(default_factory=dict)
    _losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._calls = [self._call_of(action) for action in self.actions]
        self._receives = [
            arrival for action in self.actions for arrival in self._arrivals_of(action)
        ]
        self._updates = [at for at, one in enumerate(self.actions) if one.kind is ActionKind.UPDATE]
        self._takers = _takers(self.parts, lambda part: (part.arrival, part.departure))
        self._takers_back = _takers(
            self.parts, lambda part: (part.arrival_back, part.departure_back)
        )

    def run(self, batch: list[torch.Tensor], listener: Listener) -> torch.Tensor:
        """One step; returns this rank's part of the loss, or zero.

        Args:
            batch: the tensors of the whole batch.
            listener: hears of each action.
        """
        self._batch = batch
        self._left, self._left_back = dict(self._takers), dict(self._takers_back)
        self.gradients.clear()
        self.streams.begin_step()
        for arrival in self._receives[:_AHEAD]:
            arrival.post()
        self._next = _AHEAD
        for position, call in enumerate(self._calls):
            listener.began(position)
            call(position)
            for sent in self.retire[position]:
                self._departure_of(self.actions[sent]).wait()
            listener.ended(position)
        self._settle()
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)

    def _settle(self) -> None:
        """Wait for the sends that nothing in the step tells to be received."""
        for part in self.parts.values():
            part.departure.wait()
            part.departure_back.wait()
        self._batch = []

    def _call_of(self, action: Action) -> Callable[[int], None]:
        key = (action.stage, action.index)
        kinds: dict[ActionKind, Callable[[Key], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.RECEIVE_FORWARD: self._receive,
            ActionKind.RECEIVE_BACKWARD: self._receive_back,
            ActionKind.SEND_FORWARD: self._send,
            ActionKind.SEND_BACKWARD: self._send_back,
        }
        if action.kind is ActionKind.REDUCE:
            return lambda position: self.gradients.reduce(action.index)
        if action.kind is ActionKind.UPDATE:
            return self._update
        function = kinds[action.kind]
        return lambda position: function(key)

    def _arrivals_of(self, action: Action) -> tuple[Arrival, ...]:
        if action.kind is ActionKind.RECEIVE_FORWARD:
            return (self.parts[action.stage, action.index].arrival,)
        if action.kind is ActionKind.RECEIVE_BACKWARD:
            return (self.parts[action.stage, action.index].arrival_back,)
        return ()

    def _departure_of(self, action: Action) -> Departure:
        part = self.parts[action.stage, action.index]
        is_back = action.kind is ActionKind.SEND_BACKWARD
        return part.departure_back if is_back else part.departure

    def _forward(self, key: Key) -> None:
        part = self.parts[key]
        graph = part.stage.graph
        carried = part.arrival.take(self._made)
        _forget(part.arrival.sources, self._made, self._left)
        self.streams.begin = part.begin
        arguments = [self._argument(given, part, carried) for given in graph.inputs]
        carried.clear()
        outputs = part.stage.forward(arguments)
        for name, value in zip(graph.new_buffers, outputs, strict=False):
            self.tensors[name].copy_(value)
        first_sent = len(graph.new_buffers)
        first_saved = graph.num_forward_outputs
        if self._left[key]:
            self._made[key] = dict(zip(graph.sent, outputs[first_sent:], strict=False))
        if graph.has_loss:
            self._losses.append(outputs[first_saved - 1].double() * part.weight)
        self._saved[key] = outputs[first_saved:]

    def _argument(
        self, given: Input, part: Part, carried: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        if given.kind is InputKind.CARRIED:
            return carried[given.name]
        if given.kind is InputKind.BATCH:
            whole = self._batch[int(given.name)]
            return whole[part.begin : part.end] if whole.dim() else whole
        return self.tensors[given.name].detach()

    def _backward(self, key: Key) -> None:
        part = self.parts[key]
        graph = part.stage.graph
        carried = part.arrival_back.take(self._made_back)
        _forget(part.arrival_back.sources, self._made_back, self._left_back)
        inputs = self._saved.pop(key)
        inputs += [carried.pop(name) for name in graph.gradients_in]
        if graph.has_loss:
            inputs.append(graph.loss_gradient(part.weight))
        outputs = part.stage.backward(inputs)
        self.gradients.add(graph.parameters, outputs[: len(graph.parameters)])
        sent = outputs[len(graph.parameters) :]
        if self._left_back[key]:
            self._made_back[key] = dict(zip(graph.gradients_out, sent, strict=True))

    def _receive(self, key: Key) -> None:
        self._wait_for(self.parts[key].arrival)

    def _receive_back(self, key: Key) -> None:
        self._wait_for(self.parts[key].arrival_back)

    def _wait_for(self, arrival: Arrival) -> None:
        if self._next < len(self._receives):
            self._receives[self._next].post()
            self._next += 1
        arrival.wait()

    def _send(self, key: Key) -> None:
        self.parts[key].departure.send(self._made[key])
        _forget((key,), self._made, self._left)

    def _send_back(self, key: Key) -> None:
        self.parts[key].departure_back.send(self._made_back[key])
        _forget((key,), self._made_back, self._left_back)

    def _update(self, position: int) -> None:
        if position == self._updates[-1]:
            self.gradients.wait()
            self.update()
            for shared in self.shared_buffers:
                shared.average()


def _takers(
    parts: Mapping[Key, Part], both: Callable[[Part], tuple[Arrival, Departure]]
) -> dict[Key, int]:
    """How often what each part makes is asked for on this rank: by its send, and by other parts."""
    counts = {key: int(bool(both(part)[1].routes)) for key, part in parts.items()}
    for part in parts.values():
        for source in both(part)[0].sources:
            counts[source] += 1
    return counts


def _forget(sources: Iterable[Key], made: dict[Key, Any], left: dict[Key, int]) -> None:
    """Drop what was asked for the last time."""
    for source in sources:
        left[source] -= 1
        if not left[source]:
            del made[source]
