"""Splits that weigh layers by one thing: what people do by hand, and what OneFlow did.

Every stage gets its part of all layers' seconds, weights or held activations, or simply of their
number. What cuts send, and whether sums or memory bind, is not looked at.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from bayplan.data.chain import Chain, Layer
from bayplan.data.errors import UsageError
from bayplan.data.plan import Stage
from bayplan.planning.clusters.split import Split
from bayplan.planning.partitioners.machines import Machines
from bayplan.planning.pipelines.cuts import cuts_by_count, cuts_by_load, cuts_by_share

__all__ = [
    "data_parallel",
    "even_memory",
    "even_parameters",
    "even_time",
    "oneflow_count",
    "oneflow_load",
    "staged",
]


def data_parallel(
    chain: Chain, machines: Machines, *, num_samples: int, num_micro_batches: int = 1
) -> Split:
    """One stage, on all devices.

    Example:
        >>> layer = Layer(name="fc", forward_seconds=1.0, backward_seconds=2.0)
        >>> chain = Chain(name="two", num_samples=1, layers=(layer, layer), source="guess")
        >>> data_parallel(chain, Machines.of((4,), (1e9,)), num_samples=8).replicas
        (4,)
    """
    return staged(
        chain,
        machines,
        (0,),
        replicas=(len(machines.devices),),
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        partitioner="data-parallel",
    )


class _Even:
    """Stages that are equal in one thing, for each of their devices.

    Args:
        name: of the partitioner.
        weight: of a layer, at the share of the chain's samples that a micro-batch has.
    """

    def __init__(self, name: str, weight: Callable[[Layer, float], float]) -> None:
        self._name, self._weight = name, weight

    def __call__(
        self,
        chain: Chain,
        machines: Machines,
        *,
        num_samples: int,
        num_micro_batches: int = 1,
        replicas: Sequence[int] = (),
    ) -> Split:
        """Split a chain.

        Args:
            chain: to be cut.
            machines: to be put on.
            num_samples: of a batch.
            num_micro_batches: of a batch.
            replicas: of each stage; empty for one device each.
        """
        replicas = _replicas(chain, machines, replicas)
        share = num_samples / num_micro_batches / chain.num_samples
        weights = [self._weight(layer, share) for layer in chain.layers]
        return staged(
            chain,
            machines,
            cuts_by_share(weights, replicas),
            replicas=replicas,
            num_samples=num_samples,
            num_micro_batches=num_micro_batches,
            partitioner=self._name,
        )


even_time = _Even("even-time", lambda layer, _: layer.forward_seconds + layer.backward_seconds)
even_parameters = _Even("even-parameters", lambda layer, _: layer.parameter_bytes)
# What is held for a micro-batch, weights and their gradients.
even_memory = _Even(
    "even-memory", lambda layer, share: layer.held_bytes * share + 2 * layer.parameter_bytes
)


def oneflow_count(
    chain: Chain,
    machines: Machines,
    *,
    num_samples: int,
    num_micro_batches: int = 1,
    replicas: Sequence[int] = (),
    shares: Sequence[int] = (),
    counts: Sequence[int] = (),
) -> Split:
    """OneFlow's stages by a ratio of operator counts.

    Args:
        chain: to be cut.
        machines: to be put on.
        num_samples: of a batch.
        num_micro_batches: of a batch.
        replicas: of each stage; empty for one device each.
        shares: of each stage, the ratio; empty for equal ones.
        counts: by layer, its operators; empty for one each.
    """
    replicas = _replicas(chain, machines, replicas)
    return staged(
        chain,
        machines,
        cuts_by_count(counts or (1,) * len(chain.layers), shares or (1,) * len(replicas)),
        replicas=replicas,
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        partitioner="oneflow-count",
    )


def oneflow_load(
    chain: Chain,
    machines: Machines,
    *,
    num_samples: int,
    num_micro_batches: int = 1,
    replicas: Sequence[int] = (),
    loads: Sequence[int] = (),
) -> Split:
    """OneFlow's stages by `stage_load`, a share of all depths; see `oneflow_count`."""
    replicas = _replicas(chain, machines, replicas)
    return staged(
        chain,
        machines,
        cuts_by_load(len(chain.layers), loads or (1,) * len(replicas)),
        replicas=replicas,
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        partitioner="oneflow-load",
    )


def staged(
    chain: Chain,
    machines: Machines,
    firsts: Sequence[int],
    *,
    replicas: Sequence[int],
    num_samples: int,
    num_micro_batches: int,
    partitioner: str,
) -> Split:
    """Stages that begin with given layers, on devices in their order."""
    if len(firsts) != len(replicas):
        raise UsageError(f"{len(firsts)} stages, but replicas of {len(replicas)} are given")
    if sum(replicas) > len(machines.devices):
        raise UsageError(
            f"{sum(replicas)} replicas over all stages, but there are {len(machines.devices)}"
            " devices"
        )
    places = accumulate(replicas, initial=0)
    return Split(
        stages=tuple(
            Stage(
                first=first,
                last=after - 1,
                devices=machines.devices[begin:end],
                shares=(1,) * (end - begin),
            )
            for (first, after), (begin, end) in zip(
                pairwise((*firsts, len(chain.layers))), pairwise(places), strict=True
            )
        ),
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        partitioner=partitioner,
    )


def _replicas(chain: Chain, machines: Machines, given: Sequence[int]) -> tuple[int, ...]:
    """As given, or one device for each stage; more for the first ones of a model of few layers."""
    if given:
        return tuple(given)
    num_stages = min(len(chain.layers), len(machines.devices))
    size, longer = divmod(len(machines.devices), num_stages)
    return tuple(size + (at < longer) for at in range(num_stages))
