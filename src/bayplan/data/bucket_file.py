"""`BucketFile`: which gradients of a model travel together, as a tuner found it."""

from collections.abc import Iterable, Sequence

import msgspec

from bayplan.data.errors import ForeignPlan
from bayplan.data.exchange_settings import ExchangeSettings

__all__ = ["BucketFile"]

_SHOWN = 3


class BucketFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Buckets in the order they leave.

    Attributes:
        buckets: names of parameters.
        settings: that they were found with.
        verdict: why these are the best, in words.
    """

    schema: str = "bayplan/buckets"
    version: int = 1
    model: str
    buckets: tuple[tuple[str, ...], ...]
    settings: ExchangeSettings = ExchangeSettings()
    verdict: str = ""

    def __post_init__(self) -> None:
        names = [name for bucket in self.buckets for name in bucket]
        twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
        if twice:
            raise ValueError(f"buckets name {_listed(twice)} more than once")
        if not all(self.buckets):
            raise ValueError("a bucket is empty; leave it out")

    def check(self, parameters: Iterable[str]) -> None:
        """Refuse buckets of another model.

        Args:
            parameters: names of all that are trained.

        Raises:
            ForeignPlan: with what is missing, or too much.
        """
        named = {name for bucket in self.buckets for name in bucket}
        known = set(parameters)
        unknown, missing = sorted(named - known), sorted(known - named)
        if unknown or missing:
            parts = [
                f"{len(names)} {what} ({_listed(names)})"
                for names, what in (
                    (unknown, "of its parameters are not in this model"),
                    (missing, "of this model's are in no bucket"),
                )
                if names
            ]
            raise ForeignPlan(f"these buckets are for {self.model}: {', '.join(parts)}; tune anew")


def _repeats(names: Sequence[str]) -> bool:
    return len(set(names)) < len(names)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
