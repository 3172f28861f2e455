"""`Action`: one entry of a device's list, written short.

The text is that of torch.distributed.pipelining where it has the same action: `2F0` is stage 2,
forward, micro-batch 0, and `1SEND_F3` sends what stage 1 made of micro-batch 3.
"""

import re
from enum import StrEnum

import msgspec

__all__ = ["BACKWARDS", "COMPUTES", "RECEIVES", "SENDS", "Action", "ActionKind"]


class ActionKind(StrEnum):
    """What a device does next; the letters that stand for it in an action.

    A backward is whole, or comes in two parts: the gradient of the stage's input, which the stage
    before waits for, and that of its weights, which nobody waits for until the update.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECEIVE_FORWARD = "RECV_F"
    SEND_FORWARD = "SEND_F"
    RECEIVE_BACKWARD = "RECV_B"
    SEND_BACKWARD = "SEND_B"
    REDUCE = "REDUCE"
    UPDATE = "U"
    RECOMPUTE = "C"
    SWAP_OUT = "OUT"
    SWAP_IN = "IN"


SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
COMPUTES = (ActionKind.FORWARD, *BACKWARDS)

_NUMBER = "(0|[1-9][0-9]*)"
_ACTION = re.compile(f"{_NUMBER}({'|'.join(ActionKind)}){_NUMBER}")


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a device's list; `index` is the micro-batch, or the bucket of a reduce."""

    stage: int
    kind: ActionKind
    index: int

    @classmethod
    def parse(cls, text: str) -> "Action":
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; write stage, kind, index, like 2F0")
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.index}"
