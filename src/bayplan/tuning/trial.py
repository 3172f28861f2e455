"""`Trial`: some steps with one setting; `Outcome`: what came of them."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from bayplan.data.exchange_settings import ExchangeSettings

__all__ = ["Outcome", "Purpose", "Trial"]


class Purpose(StrEnum):
    """What steps are run for."""

    FIRST = "first"  # to see how fast steps are and how far they scatter
    COMPARE = "compare"  # one of two settings that are compared
    WATCH = "watch"  # training goes on, and it is seen whether the network stays as it was
    KEEP = "keep"  # training goes on for good


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run next.

    Attributes:
        number: from 0, over all searches.
        num_steps: None for all that are left.
        num_ignored: of these, the first, which still have to do with the setting before.
    """

    number: int
    setting: ExchangeSettings
    purpose: Purpose
    num_steps: int | None = None
    num_ignored: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a trial has shown.

    Attributes:
        search: which one it belongs to, from 0; a network that changes begins another.
        seconds: the middle of its steps.
        spread: how far single steps scatter around it, as a share.
        num_steps: that count.
        is_best: whether this setting is the best so far, with this trial taken in.
        ratio: this setting's seconds over the best one's as they are believed now; None if it was
            not compared.
        is_result: whether this is no trial but the end of a search: its best setting, with all
            that was measured of it.
    """

    trial: Trial
    search: int
    seconds: float
    spread: float
    num_steps: int
    predicted_seconds: float
    is_best: bool
    ratio: float | None = None
    is_result: bool = False
