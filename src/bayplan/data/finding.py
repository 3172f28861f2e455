"""`Finding`: one thing the doctor looked at."""

import msgspec

__all__ = ["Finding"]


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was looked at, what was found, and what to change where it is not good."""

    subject: str
    found: str
    is_good: bool = True
    change: str = ""
