"""What transports demand of the order of messages and reduces, beyond that a step ends."""

from collections import defaultdict
from collections.abc import Sequence

from bayplan.data.actions import Action, ActionKind
from bayplan.data.errors import FileFault
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import Message

__all__ = ["check_collectives", "check_queues", "peer_of"]

_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
_Actions = Sequence[Sequence[Action]]
_Sent = tuple[Message, bool]  # True marks a gradient


def peer_of(rank: int, message: Message) -> int:
    """The rank at the other end."""
    return message.receiver if message.sender == rank else message.sender


def check_queues(pipeline: Pipeline, actions: _Actions) -> None:
    """Raise FileFault if a message is received before another that the same rank sent earlier.

    Without tags, the first receive that is posted gets the first message that was sent: wrong
    numbers, and no error. Within one action the order is free, for it is the sender's.
    """
    queues: dict[tuple[int, int], list[_Sent]] = defaultdict(list)
    for rank, own in enumerate(actions):
        for action in own:
            if action.kind in _SENDS:
                is_gradient = action.kind is ActionKind.SEND_BACKWARD
                for message in pipeline.moved(rank, action):
                    queues[rank, peer_of(rank, message)].append((message, is_gradient))
    num_taken: dict[tuple[int, int], int] = defaultdict(int)
    for rank, own in enumerate(actions):
        for position, action in enumerate(own):
            if action.kind not in _RECEIVES:
                continue
            is_gradient = action.kind is ActionKind.RECEIVE_BACKWARD
            wanted: dict[int, set[_Sent]] = defaultdict(set)
            for message in pipeline.moved(rank, action):
                wanted[peer_of(rank, message)].add((message, is_gradient))
            for sender, messages in wanted.items():
                begin = num_taken[sender, rank]
                num_taken[sender, rank] = end = begin + len(messages)
                early = set(queues[sender, rank][begin:end]) - messages
                if early:
                    raise FileFault(
                        f"rank {rank}, position {position}, {action}: rank {sender} sends"
                        f" {_name(min(early))} before; receive it before, or use a transport with"
                        " tags"
                    )


def check_collectives(pipeline: Pipeline, actions: _Actions) -> None:
    """Raise FileFault if two ranks of a group reduce the group's buckets in different orders."""
    for group in sorted(set(pipeline.members.values())):
        orders = [
            [
                (position, action)
                for position, action in enumerate(actions[rank])
                if action.kind is ActionKind.REDUCE and pipeline.members.get(action.index) == group
            ]
            for rank in group
        ]
        for rank, order in zip(group, orders, strict=True):
            for (position, action), (_, other) in zip(order, orders[0], strict=True):
                if action.index != other.index:
                    raise FileFault(
                        f"rank {rank}, position {position}, {action}: rank {group[0]} reduces"
                        f" bucket {other.index} there; all ranks of a group must keep one order"
                    )


def _name(sent: _Sent) -> str:
    """The receive that takes a message."""
    message, is_gradient = sent
    if is_gradient:
        return str(Action(message.source_stage, ActionKind.RECEIVE_BACKWARD, message.micro_batch))
    return str(Action(message.target_stage, ActionKind.RECEIVE_FORWARD, message.micro_batch))
