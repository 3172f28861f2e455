"""What was found before, kept by model and ranks, so that the next run begins where one ended."""

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.tuning_record import TuningKey, TuningRecord
from bayplan.devices.machine import cache_directory

__all__ = ["keep_tuning", "kept_tuning", "parameters_fingerprint"]


class _Parameter(Protocol):
    """The form of a tensor."""

    @property
    def shape(self) -> Iterable[int]: ...

    @property
    def dtype(self) -> object: ...


def kept_tuning(key: TuningKey, cache: Path | None = None) -> TuningRecord | None:
    """What an earlier run found; None if there was none, or what is left of it cannot be read.

    Args:
        key: what it depends on.
        cache: keeps it; the user's by default.
    """
    with contextlib.suppress(FileFault, OSError):  # damaged, or not to be looked into
        path = _path(key, cache)
        if path.exists():
            record = files.read(path, TuningRecord)
            return record if record.key == key else None  # a file may have been renamed
    return None


def keep_tuning(record: TuningRecord, cache: Path | None = None) -> None:
    """Keep it for later runs; a cache that cannot be written costs them time alone."""
    with contextlib.suppress(FileFault):
        files.write(_path(record.key, cache), record)


def parameters_fingerprint(parameters: Iterable[tuple[str, _Parameter]]) -> str:
    """A hash of names, shapes and types: `parameters_fingerprint(model.named_parameters())`.

    It leaves out how long backward takes. Where a graph was captured, its own fingerprint knows
    that too.
    """
    forms = [(name, tuple(one.shape), str(one.dtype)) for name, one in parameters]
    return hashlib.sha256(repr(forms).encode()).hexdigest()[:16]


def _path(key: TuningKey, cache: Path | None) -> Path:
    return (cache or cache_directory()) / "tuning" / f"{key.name}.json"
