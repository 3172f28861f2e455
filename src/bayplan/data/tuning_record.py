"""`TuningRecord`: what a tuner found for a model on some ranks, for the next run to begin with."""

import hashlib
from collections.abc import Sequence

import msgspec

from bayplan.data.checks import check_not_negative
from bayplan.data.exchange_settings import ExchangeSettings

__all__ = ["ComparedSetting", "TuningKey", "TuningRecord"]


class TuningKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a result depends on.

    Attributes:
        model: a fingerprint.
        host_of_rank: hosts counted from 0 by their first rank; their names do not matter.
        devices: by rank, their names.
    """

    model: str
    host_of_rank: tuple[int, ...]
    devices: tuple[str, ...]
    torch_version: str

    def __post_init__(self) -> None:
        if not self.host_of_rank:
            raise ValueError("host_of_rank is empty; there is at least one rank")
        if len(self.host_of_rank) != len(self.devices):
            raise ValueError(
                f"host_of_rank names {len(self.host_of_rank)} ranks, devices {len(self.devices)}"
            )

    @classmethod
    def of(
        cls, *, model: str, hosts: Sequence[str], devices: Sequence[str], torch_version: str
    ) -> "TuningKey":
        """The key of some ranks.

        Args:
            model: a fingerprint; where the batch's size varies, with that.
            hosts: by rank, the host's name.
            devices: by rank, the device's name.
            torch_version: that they run.

        Example:
            >>> key = TuningKey.of(
            ...     model="a", hosts=["x", "y", "x"], devices=["cpu"] * 3, torch_version="2"
            ... )
            >>> key.host_of_rank
            (0, 1, 0)
        """
        order = list(dict.fromkeys(hosts))
        return cls(
            model=model,
            host_of_rank=tuple(order.index(one) for one in hosts),
            devices=tuple(devices),
            torch_version=torch_version,
        )

    @property
    def name(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:24]


class ComparedSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that was compared with the best.

    Attributes:
        ratio: its seconds over the best one's.
        spread: how far that may be off, as a share.
    """

    setting: ExchangeSettings
    ratio: float
    spread: float

    def __post_init__(self) -> None:
        check_not_negative(ratio=self.ratio, spread=self.spread)
        if not self.ratio:
            raise ValueError("ratio is 0, must be more")


class TuningRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a search.

    Attributes:
        best: the setting found.
        step_seconds: the middle of its steps.
        step_spread: how far single steps scatter, as a share.
        num_steps: of the search.
        verdict: why it ended, in words.
        compared: the others that were measured.
    """

    schema: str = "bayplan/tuning"
    version: int = 1
    key: TuningKey
    best: ExchangeSettings
    step_seconds: float
    step_spread: float
    num_steps: int
    verdict: str
    compared: tuple[ComparedSetting, ...] = ()

    def __post_init__(self) -> None:
        check_not_negative(
            step_seconds=self.step_seconds,
            step_spread=self.step_spread,
            num_steps=self.num_steps,
        )
        if not self.step_seconds:
            raise ValueError("step_seconds is 0, must be more")
