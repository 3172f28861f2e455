"""Activations that leave the device during a step and return, as calls in its graphs.

Four calls, as the planner counts them: `swap_out` starts a copy, `swap_away` waits until it is
done, `swap_back` allocates and starts the way back, `swap_here` waits for it. What goes from the
forward to the backward graph in the activation's place is a token: a tensor of one number. A step
whose backward never comes (an evaluation with gradients on) drops its tokens, and with them their
slots.
"""

import itertools
import warnings
import weakref
from dataclasses import dataclass
from enum import StrEnum

import torch

from bayplan import torch_compat
from bayplan.running.swaps.lanes import TierError
from bayplan.running.swaps.tier import SwapStore, Ticket

__all__ = ["SwapKind", "SwapStep", "Swapper", "swap_away", "swap_back", "swap_here", "swap_out"]


class SwapKind(StrEnum):
    OUT = "out"
    AWAY = "away"
    BACK = "back"
    HERE = "here"


@dataclass(frozen=True)
class SwapStep:
    """One of a swap's calls.

    Attributes:
        buffer: of the program, that moves.
        is_last: whether no way back follows, so that its slot is free again.
    """

    kind: SwapKind
    buffer: int
    is_last: bool = True


class Swapper:
    """The activations of one model that are away, by the number on their token."""

    def __init__(self, store: SwapStore) -> None:
        self.store = store
        self._numbers = itertools.count()
        self._away: dict[int, Ticket] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._has_warned = False

    def swap_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy; returns the token."""
        number = next(self._numbers)
        token = torch.tensor([number])
        try:
            self._away[number] = self.store.begin_out(tensor)
        except TierError as fault:
            self._keep(number, tensor, fault)
        weakref.finalize(token.untyped_storage(), self._forget, number)
        return token

    def swap_away(self, token: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Wait for the copy out; the tensor is an argument so that it lives until then."""
        number = int(token)
        if number in self._away:
            ticket = self._away[number]
            try:
                self.store.end_out(ticket)
            except TierError as fault:
                del self._away[number]
                assert ticket.tensor is not None, "a failed copy out leaves its tensor"
                self._keep(number, ticket.tensor, fault)
        return token

    def swap_back(self, token: torch.Tensor) -> torch.Tensor:
        """Allocate the tensor and start filling it."""
        number = int(token)
        if number in self._kept:
            return self._kept[number]
        return self.store.begin_in(self._away[number])

    def swap_here(self, tensor: torch.Tensor, token: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Wait until the tensor of `swap_back` is filled; after the last time its slot is free.

        With `retain_graph` another backward may ask for it again, so the slot goes with the token.
        """
        number = int(token)
        is_last = is_last and not torch_compat.is_graph_kept()
        if number not in self._kept:
            self.store.end_in(self._away[number], keep=not is_last)
        if is_last:
            self._kept.pop(number, None)
            self._away.pop(number, None)
        return tensor

    def _keep(self, number: int, tensor: torch.Tensor, fault: TierError) -> None:
        """Nothing is lost when a copy fails: the tensor stays, and memory is above the plan."""
        self._kept[number] = tensor
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an activation could not be swapped and stays in memory: {fault}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _forget(self, number: int) -> None:
        self._kept.pop(number, None)
        ticket = self._away.pop(number, None)
        if ticket is not None:
            self.store.drop(ticket)


# What graphs call; the executor puts the swapper in front of their arguments.
swap_out, swap_away = Swapper.swap_out, Swapper.swap_away
swap_back, swap_here = Swapper.swap_back, Swapper.swap_here
