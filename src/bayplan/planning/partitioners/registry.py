"""The partitioners of published systems, by name: what a user may ask for instead of our search.

The simple ones weigh layers by one thing, as people do by hand and as OneFlow did: every stage gets
its part of all layers' seconds, weights or held activations, or of their number. They ignore what
cuts send, and whether all-reduces or memory bind.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

from bayplan.data.chain import Chain, Layer
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.planning.clusters.refining import data_parallel
from bayplan.planning.clusters.split import Split, equal_stages
from bayplan.planning.partitioners.machines import Machines
from bayplan.planning.partitioners.pipedream import PipeDreamOptions, pipedream
from bayplan.planning.pipelines.cuts import cuts_by_count, cuts_by_load, cuts_by_share

__all__ = ["PARTITIONERS", "Partitioner", "cut_by", "find_partitioner"]

# The first layer of each stage, by the ratio of stages and the share of the chain's samples that a
# micro-batch has.
_Cut = Callable[[Chain, Sequence[int], float], Sequence[int]]


class Partitioner(Protocol):
    """Decides which layers are on which devices."""

    def __call__(
        self, chain: Chain, machines: Machines, /, *, num_samples: int, num_micro_batches: int = 1
    ) -> Split: ...


def _by_share(weight: Callable[[Layer, float], float]) -> _Cut:
    return lambda chain, ratios, share: cuts_by_share(
        [weight(layer, share) for layer in chain.layers], ratios
    )


_CUTS: dict[str, _Cut] = {
    "even-time": _by_share(lambda layer, _: layer.forward_seconds + layer.backward_seconds),
    "even-parameters": _by_share(lambda layer, _: layer.parameter_bytes),
    # What is held for a micro-batch, weights and their gradients.
    "even-memory": _by_share(
        lambda layer, share: layer.held_bytes * share + 2 * layer.parameter_bytes
    ),
    "oneflow-count": lambda chain, ratios, _: cuts_by_count((1,) * len(chain.layers), ratios),
    "oneflow-load": lambda chain, ratios, _: cuts_by_load(len(chain.layers), ratios),
}


def cut_by(
    name: str,
    chain: Chain,
    machines: Machines,
    /,
    *,
    num_samples: int,
    num_micro_batches: int = 1,
    replicas: Sequence[int] = (),
    ratios: Sequence[int] = (),
) -> Split:
    """Cut by one of the simple rules, `even-…` or `oneflow-…`, on devices in their order.

    Args:
        replicas: of each stage; empty for one device each, or more where layers are few.
        ratios: of the stages. Empty for a part by replicas with `even-…`, for equal parts with
            OneFlow's rules.
    """
    replicas = replicas or _spread(len(chain.layers), len(machines.devices))
    ratios = ratios or (replicas if name.startswith("even-") else (1,) * len(replicas))
    firsts = _CUTS[name](chain, ratios, num_samples / num_micro_batches / chain.num_samples)
    if len(firsts) != len(replicas):
        raise UsageError(f"{len(firsts)} stages, but replicas of {len(replicas)} are given")
    if sum(replicas) > len(machines.devices):
        raise UsageError(
            f"{sum(replicas)} replicas over all stages, but there are {len(machines.devices)}"
            " devices"
        )
    places = pairwise(accumulate(replicas, initial=0))
    return Split(
        stages=equal_stages(
            pairwise((*firsts, len(chain.layers))),
            [machines.devices[begin:end] for begin, end in places],
        ),
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        partitioner=name,
    )


def _spread(num_layers: int, num_devices: int) -> tuple[int, ...]:
    """One device for each stage; more for the first ones of a model of few layers."""
    num_stages = min(num_layers, num_devices)
    size, longer = divmod(num_devices, num_stages)
    return tuple(size + (stage < longer) for stage in range(num_stages))


def _data_parallel(
    chain: Chain, machines: Machines, /, *, num_samples: int, num_micro_batches: int = 1
) -> Split:
    split = data_parallel(chain, machines.devices, num_samples)
    return replace(split, num_micro_batches=num_micro_batches, partitioner="data-parallel")


PARTITIONERS: dict[str, Partitioner] = {
    "data-parallel": _data_parallel,
    # One device for each stage, of which the slowest is as fast as can be.
    "straight": partial(
        pipedream,
        options=PipeDreamOptions(compression=1.0, is_straight=True, may_use_fewer=True),
        partitioner="straight",
    ),
    **{name: partial(cut_by, name) for name in _CUTS},
    "pipedream": pipedream,
    "pipedream-no-transfer": partial(
        pipedream, options=PipeDreamOptions(), partitioner="pipedream-no-transfer"
    ),
}


def find_partitioner(name: str) -> Partitioner:
    if name not in PARTITIONERS:
        known = ("auto", *PARTITIONERS)
        raise UsageError(f"no partitioner {name!r}: {did_you_mean(name, known)}")
    return PARTITIONERS[name]
