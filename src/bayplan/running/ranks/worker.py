"""One rank's part of a step: its action list, carried out action by action.

The list decides everything; nothing here does. Its order is kept, unless the plan allows another.
For each batch size the list is turned once into calls with all their routes and rooms at hand, so
that a step is a walk over a list.

NOTE [ Backward that lags ]
With stale weights allowed, a stage's backward is some batches behind its forward. One list still
describes every call: its forward actions are about the batch that is given, its backward actions
about the one that was given `lag` calls before. So in the first calls, and when no batches come any
more, a part of the list has nothing to do and is passed over.
1. What forward makes for backward waits in a queue: several batches may be in between.
2. A batch's forward and backward see the same weights: an update writes beside the old ones as
   long as a batch in flight needs them.
3. A neighbour is at most one call behind, so what was sent two calls ago has been received.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from typing import Any

import torch
from torch import distributed

from bayplan.data.actions import Action, ActionKind
from bayplan.data.graph import StorageKind
from bayplan.data.record import MESSAGE
from bayplan.running.compiled_stage import CompiledStage
from bayplan.running.ranks.gradients import Gradients, Versions, average
from bayplan.running.ranks.journal import Journal
from bayplan.running.ranks.picking import Picker
from bayplan.running.ranks.transfers import Arrival, Departure, Values, Way
from bayplan.simulating.pipeline import RECEIVES_AHEAD
from bayplan.tracing.stages.drawing import Streams
from bayplan.tracing.stages.whole import Input, InputKind

__all__ = ["Key", "Part", "Worker"]

Key = tuple[int, int]  # stage, micro-batch

_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_ADDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_OF_FORWARD = (ActionKind.FORWARD, ActionKind.RECEIVE_FORWARD, ActionKind.SEND_FORWARD)
_VALUES, _GRADIENTS = range(2)  # the two directions


@dataclass(frozen=True)
class Part:
    """A rank's piece of one micro-batch in one stage: samples `begin` to `end`.

    `weight` is what its loss counts in the batch's; `ways` are those of values and of gradients.
    """

    stage: CompiledStage
    begin: int
    end: int
    weight: float
    ways: tuple[Way, Way]


@dataclass
class Worker:
    """Carries out one rank's list for one batch size.

    Attributes:
        retire: by position, the positions of sends that are known to be received by then; where
            backward lags, none is.
        tensors: the parameters and buffers that the rank's stages read, by name.
        shared_buffers: that replicas of a stage average after a step, with the group of each.
        update: runs the optimizer, once all gradients are there.
        picker: chooses what comes next; None where that is the next of the list.
        ready: by position, how many of the first actions must be done before a receive is posted;
            0 where it is left out.
    """

    actions: Sequence[Action]
    retire: Sequence[Sequence[int]]
    parts: Mapping[Key, Part]
    tensors: Mapping[str, torch.Tensor]
    gradients: Gradients
    streams: Streams
    shared_buffers: Sequence[tuple[Sequence[torch.Tensor], distributed.ProcessGroup]]
    versions: Versions
    update: Callable[[], object]
    picker: Picker | None = None
    ready: Mapping[int, int] = field(default_factory=dict)
    _batch: list[torch.Tensor] = field(default_factory=list)
    _losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._saved: dict[Key, deque[list[Any]]] = {key: deque() for key in self.parts}
        self._handed: dict[Key, deque[list[Any]]] = {key: deque() for key in self.parts}
        self._made = [_queues(self.parts, direction) for direction in (_VALUES, _GRADIENTS)]
        self._calls = [self._call_of(action) for action in self.actions]
        self._sent: deque[list[Departure]] = deque()
        self._due: list[bool] = []
        self._positions: list[int] = []
        self._posts: dict[int, list[Arrival]] = {}  # by position, what is posted before it
        self._updates: list[int] = []
        self._reduces: list[int] = []  # buckets, in order
        self._num_pieces: Counter[str] = Counter()  # that add to each gradient
        self._number = 0  # of this call
        self._num_given = 0  # batches so far

    def run(self, batch: list[torch.Tensor] | None, journal: Journal) -> torch.Tensor:
        """One step, without a new batch if that is None; returns this rank's part of the loss."""
        if batch is not None:
            self._batch = batch
            self.streams.begin_step()
            self._num_given = self._number + 1
        positions = self._due_positions()
        self.gradients.begin_step(self._num_pieces, self._reduces)
        self.versions.refresh()
        journal.began_step()
        self._sent.append([])
        for position in self._walk(positions, journal):
            journal.began(position)
            for arrival in self._posts.get(position, ()):
                arrival.post()
            self._calls[position](position)
            for sent in self.retire[position]:
                self._way_of(self.actions[sent]).departure.wait()
            journal.ended(position)
        self._number += 1
        self._batch = []
        self._wait_for_sends(2 if any(self.versions.lags) else 0)  # rule 3
        losses, self._losses = self._losses, []
        if losses:
            return torch.stack(losses).sum()
        device = next(iter(self.tensors.values())).device
        return torch.zeros((), dtype=torch.float64, device=device)

    def _walk(self, positions: Sequence[int], journal: Journal) -> Iterable[int]:
        """The positions in the order they are done."""
        if self.picker is None:
            return positions
        receives = [
            {
                position: self._way_of(self.actions[position]).arrival
                for position in positions
                if self.actions[position].kind is kind
            }
            for kind in _RECEIVES
        ]
        return self.picker.walk(positions, receives, journal.began)

    def _due_positions(self) -> Sequence[int]:
        """What this call does of the list; most often the same as the last call."""
        due = list(map(self._is_due, self.actions))
        if due != self._due:
            self._due = due
            self._positions = [*compress(count(), due)]
            actions = [*compress(self.actions, due)]
            self._posts = {} if self.picker is not None else self._posts_ahead()
            self._updates = [
                p for p in self._positions if self.actions[p].kind is ActionKind.UPDATE
            ]
            self._reduces = [act.index for act in actions if act.kind is ActionKind.REDUCE]
            self._num_pieces = Counter(
                name
                for act in actions
                if act.kind in _ADDS
                for name in self.parts[act.stage, act.index].stage.graph.parameters
            )
        return self._positions

    def _posts_ahead(self) -> dict[int, list[Arrival]]:
        """Where receives are posted: a few ahead of the one that is waited for next."""
        posts: dict[int, list[Arrival]] = {p: [] for p in self._positions}
        receives = [p for p in self._positions if self.actions[p].kind in _RECEIVES]
        to_post, num_ahead = deque(receives), RECEIVES_AHEAD
        for position in self._positions:
            num_ahead += self.actions[position].kind in _RECEIVES
            while to_post and len(receives) - len(to_post) < num_ahead:
                if self.ready.get(to_post[0], 0) > position:
                    break
                posts[position].append(self._way_of(self.actions[to_post.popleft()]).arrival)
        return posts

    def rest(self) -> None:
        """After the last batch: wait for all sends, and begin anew with the next one."""
        self._wait_for_sends(0)
        self._number = self._num_given = 0
        self.versions.settle()

    def in_flight(self) -> dict[str, Any]:
        """All that a restart needs beside the model to go on, between two calls.

        Messages count at their sender: those that the other end takes in a later call.
        """
        lags = self.versions.lags
        return {
            "number": self._number,
            "given": self._num_given,
            "saved": {key: [*queue] for key, queue in self._saved.items() if queue},
            "made": [
                {
                    (key, user): [*queue]
                    for key, queues in made.items()
                    for user, queue in queues.items()
                    if queue
                }
                for made in self._made
            ],
            "weights": self.versions.kept(),
            "sent": {
                key: part.ways[_GRADIENTS].departure.on_the_way(
                    lambda route, key=key: lags[route.far_stage] - lags[key[0]]
                )
                for key, part in self.parts.items()
            },
        }

    def go_on(self, in_flight: Mapping[str, Any]) -> None:
        """Go on from there, before the first call; sends what was on its way."""
        self._number, self._num_given = in_flight["number"], in_flight["given"]
        for key, values in in_flight["saved"].items():
            self._saved[key].extend(values)
        for made, queues in zip(self._made, in_flight["made"], strict=True):
            for (key, user), values in queues.items():
                made[key][user].extend(values)
        self.versions.keep(in_flight["weights"])
        most = max(map(len, in_flight["sent"].values()), default=0)
        self._sent.extend([] for _ in range(most))
        for key, sends in in_flight["sent"].items():
            departure = self.parts[key].ways[_GRADIENTS].departure
            for ago, messages in zip(range(len(sends), 0, -1), sends, strict=True):
                departure.send_again(messages)
                self._sent[-ago].append(departure)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors that the rank has now, with what each is there for."""
        for tensor in self.tensors.values():
            is_trained = isinstance(tensor, torch.nn.Parameter)
            yield StorageKind.PARAMETER if is_trained else StorageKind.BUFFER, tensor
        yield from ((StorageKind.INPUT, tensor) for tensor in self._batch)
        yield from ((StorageKind.GRADIENT, tensor) for tensor in self.gradients.held())
        for queues in (self._saved, self._handed):
            values = (value for queue in queues.values() for kept in queue for value in kept)
            yield from (
                (StorageKind.ACTIVATION, value) for value in values if torch.is_tensor(value)
            )
        queues = (queue for made in self._made for own in made.values() for queue in own.values())
        for values in (values for queue in queues for values in queue):
            yield from ((MESSAGE, value) for value in values.values())
        for way in (way for part in self.parts.values() for way in part.ways):
            yield from ((MESSAGE, tensor) for tensor in way.arrival.held())
            yield from ((MESSAGE, tensor) for tensor in way.departure.held())

    def _is_due(self, action: Action) -> bool:
        """Whether there is a batch for an action in this call; NOTE [ Backward that lags ]."""
        if action.kind in _OF_FORWARD:
            return self._number < self._num_given
        return 0 <= self._number - self.versions.lags[action.stage] < self._num_given

    def _wait_for_sends(self, num_calls: int) -> None:
        """Wait for all sends but those of the last calls."""
        while len(self._sent) > num_calls:
            for departure in self._sent.popleft():
                departure.wait()

    def _call_of(self, action: Action) -> Callable[[int], None]:
        key, kind = (action.stage, action.index), action.kind
        if kind is ActionKind.UPDATE:
            return self._update
        if kind is ActionKind.REDUCE:
            return lambda _: self.gradients.reduce(action.index)
        if kind in _RECEIVES:
            return lambda _: self._receive(self._way_of(action).arrival)
        if kind in _SENDS:
            made = self._made[_SENDS.index(kind)][key]
            return lambda _: self._send(self._way_of(action).departure, made)
        function = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
        }[kind]
        return lambda _: function(key)

    def _way_of(self, action: Action) -> Way:
        """The way that a send or receive is about."""
        is_back = action.kind in (ActionKind.RECEIVE_BACKWARD, ActionKind.SEND_BACKWARD)
        return self.parts[action.stage, action.index].ways[is_back]

    def _forward(self, key: Key) -> None:
        part = self.parts[key]
        graph = part.stage.graph
        carried = self._taken(key, _VALUES)
        self.streams.begin = part.begin
        arguments = [self._argument(given, part, carried) for given in graph.inputs]
        carried.clear()
        outputs = part.stage.forward(arguments)
        for name, value in zip(graph.new_buffers, outputs, strict=False):
            self.tensors[name].copy_(value)
        first_sent, first_saved = len(graph.new_buffers), graph.num_forward_outputs
        self._give(key, _VALUES, dict(zip(graph.sent, outputs[first_sent:], strict=False)))
        if graph.has_loss:
            self._losses.append(outputs[first_saved - 1].double() * part.weight)
        self._saved[key].append(outputs[first_saved:])

    def _argument(
        self, given: Input, part: Part, carried: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        if given.kind is InputKind.CARRIED:
            return carried[given.name]
        if given.kind is InputKind.BATCH:
            whole = self._batch[int(given.name)]
            return whole[part.begin : part.end] if whole.dim() else whole
        if given.needs_gradient:
            return self.versions.weight(given.name)
        return self.tensors[given.name].detach()

    def _backward(self, key: Key) -> None:
        part = self.parts[key]
        graph = part.stage.graph
        take = self.gradients.taker(graph.parameters)
        self._give_back(key, part.stage.backward([*self._gradients_in(key), take]))

    def _backward_input(self, key: Key) -> None:
        """The half of a backward that other stages wait for."""
        part = self.parts[key]
        num_sent = len(part.stage.graph.gradients_out)
        outputs = part.stage.backward_input(self._gradients_in(key))
        self._give_back(key, outputs[:num_sent])
        self._handed[key].append(outputs[num_sent:])

    def _backward_weight(self, key: Key) -> None:
        part = self.parts[key]
        take = self.gradients.taker(part.stage.graph.parameters)
        part.stage.backward_weight([*self._handed[key].popleft(), take])

    def _gradients_in(self, key: Key) -> list[Any]:
        """What a part's backward starts from: what forward saved, and gradients from others."""
        part = self.parts[key]
        carried = self._taken(key, _GRADIENTS)
        inputs = self._saved[key].popleft()
        inputs += [carried.pop(name) for name in part.stage.graph.gradients_in]
        if part.stage.graph.has_loss:
            inputs.append(part.stage.graph.loss_gradient(part.weight))
        return inputs

    def _give_back(self, key: Key, gradients: Sequence[torch.Tensor]) -> None:
        names = self.parts[key].stage.graph.gradients_out
        values = {
            name: gradient.clone() if self.gradients.keeps(gradient) else gradient
            for name, gradient in zip(names, gradients, strict=True)
        }
        self._give(key, _GRADIENTS, values)

    def _give(self, key: Key, direction: int, values: dict[str, torch.Tensor]) -> None:
        for queue in self._made[direction][key].values():
            queue.append(values)

    def _taken(self, key: Key, direction: int) -> dict[str, torch.Tensor]:
        """What a part gets from others and from this rank itself, the oldest first."""
        arrival, made = self.parts[key].ways[direction].arrival, self._made[direction]
        return arrival.take({source: made[source][key].popleft() for source in arrival.sources})

    def _receive(self, arrival: Arrival) -> None:
        if self.picker is not None:
            return  # it waited before it came to this
        arrival.wait()

    def _send(self, departure: Departure, made: Mapping[Key | None, deque[Values]]) -> None:
        departure.send(made[None].popleft())
        self._sent[-1].append(departure)

    def _update(self, position: int) -> None:
        if position == self._updates[-1]:
            self.gradients.wait()
            stages = [self.actions[position].stage for position in self._updates]
            least = min(self.versions.lags[stage] for stage in stages)
            self.versions.begin_update(stages, self._number - least)
            self.update()
            for buffers, group in self.shared_buffers:
                average(buffers, group)


def _queues(
    parts: Mapping[Key, Part], direction: int
) -> dict[Key, dict[Key | None, deque[Values]]]:
    """For what each part makes, a queue for each user on this rank: a part, or None for its send.

    Values are released when the last of them has taken them.
    """
    queues: dict[Key, dict[Key | None, deque[Values]]] = {key: {} for key in parts}
    for key, part in parts.items():
        way = part.ways[direction]
        if way.departure.routes:
            queues[key][None] = deque()
        for source in way.arrival.sources:
            queues[source][key] = deque()
    return queues
