"""The reference partitioners by name, all called in the same way."""

from functools import partial
from typing import Protocol

from bayplan.data.chain import Chain
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.planning.clusters.split import Split
from bayplan.planning.partitioners import even
from bayplan.planning.partitioners.machines import Machines
from bayplan.planning.partitioners.pipedream import PipeDreamOptions
from bayplan.planning.partitioners.pipedream_split import pipedream, straight

__all__ = ["PARTITIONERS", "Partitioner", "find_partitioner"]


class Partitioner(Protocol):
    """Decides which layers are on which devices."""

    def __call__(
        self,
        chain: Chain,
        machines: Machines,
        /,
        *,
        num_samples: int,
        num_micro_batches: int = 1,
    ) -> Split:
        """Split a chain for batches of so many samples."""
        ...


PARTITIONERS: dict[str, Partitioner] = {
    "data-parallel": even.data_parallel,
    "straight": straight,
    "even-time": even.even_time,
    "even-parameters": even.even_parameters,
    "even-memory": even.even_memory,
    "oneflow-count": even.oneflow_count,
    "oneflow-load": even.oneflow_load,
    "pipedream": pipedream,
    "pipedream-no-transfer": partial(
        pipedream, options=PipeDreamOptions(), partitioner="pipedream-no-transfer"
    ),
}


def find_partitioner(name: str) -> Partitioner:
    """One of them by its name.

    Example:
        >>> find_partitioner("data_paralel")
        Traceback (most recent call last):
        bayplan.data.errors.UsageError: no partitioner 'data_paralel': did you mean\
 'data-parallel'?
    """
    if name not in PARTITIONERS:
        raise UsageError(f"no partitioner {name!r}: {did_you_mean(name, PARTITIONERS)}")
    return PARTITIONERS[name]
