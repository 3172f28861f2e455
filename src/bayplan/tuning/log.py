"""`TrialLog`: a line for every trial, written at once, that tools for Horovod's log can read.

The first six columns are those of Horovod's autotune log, with its units: milliseconds, MiB, and a
score in bytes all-reduced per microsecond, which is MB/s. What is left to be chosen is empty there.
As in Horovod's, the last line of a search that has ended is its best setting.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bayplan.data.errors import FileFault
from bayplan.data.exchange_settings import ExchangeSettings
from bayplan.tuning.trial import Outcome

__all__ = ["COLUMNS", "TrialLog"]

COLUMNS = (
    "hierarchical_allreduce",
    "hierarchical_allgather",
    "cache_enabled",
    "cycle_time_ms",
    "tensor_fusion_threshold",
    "score",
    "search",
    "trial",
    "purpose",
    "algorithm",
    "compression",
    "strip_bytes",
    "steps",
    "seconds",
    "spread",
    "predicted_seconds",
    "ratio_to_best",
    "is_best",
)
_RESULT = "result"  # the purpose of the last line
_MIB = 1 << 20


class TrialLog:
    """A CSV file that is whole after every line; `with` closes it.

    Args:
        path: of the file; one that is there is replaced.
        reduced_bytes: gradients that a step sums up, for the score.
    """

    def __init__(self, path: Path | str, *, reduced_bytes: int) -> None:
        self._reduced_bytes = reduced_bytes
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Open for as long as there are trials.
            self._file = Path(path).open("w", encoding="utf-8", newline="")  # noqa: SIM115
        except OSError as fault:
            raise FileFault(f"cannot write {path}: {fault.strerror}") from fault
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._write(COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, outcome: Outcome) -> None:
        """Write a trial's line; fit for `Tuner(on_outcome=...)`."""
        purpose = _RESULT if outcome.is_result else outcome.trial.purpose.value
        self._write(
            [
                *_horovod_columns(outcome.trial.setting),
                f"{self._reduced_bytes / outcome.seconds / 1e6:.6g}",
                outcome.search,
                "" if outcome.is_result else outcome.trial.number,
                purpose,
                outcome.trial.setting.algorithm.value,
                outcome.trial.setting.compression.value,
                outcome.trial.setting.strip_bytes,
                outcome.num_steps,
                f"{outcome.seconds:.6g}",
                f"{outcome.spread:.4g}",
                f"{outcome.predicted_seconds:.6g}",
                "" if outcome.ratio is None else f"{outcome.ratio:.5g}",
                int(outcome.is_best),
            ]
        )

    def _write(self, row: Sequence[object]) -> None:
        self._rows.writerow(row)
        self._file.flush()


def _horovod_columns(setting: ExchangeSettings) -> list[object]:
    hierarchical = setting.hierarchical_allreduce
    threshold = setting.fusion_threshold_bytes
    return [
        "" if hierarchical is None else int(hierarchical),
        int(setting.hierarchical_allgather),
        int(setting.cache_enabled),
        f"{setting.cycle_time_ms:g}",
        "" if threshold is None else f"{threshold / _MIB:.6g}",
    ]
