"""What a plan for many ranks is made for: ranks of this machine, or the devices of a cluster.

Here, operators are run to find out what they take, and two ranks talk to each other. A cluster need
not be here: what is known of it are its figures.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch

from bayplan.api import granularity_of
from bayplan.capturing.fake import OptimizerSource
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.link_speeds import LinkSpeeds
from bayplan.devices.machine import cache_directory, device_name
from bayplan.planned import Circumstances
from bayplan.pricing import derived_prices
from bayplan.rank_pricing import (
    RankPrices,
    StagePrices,
    one_thread_prices,
    samples_to_price,
    with_whole_masks,
)
from bayplan.rank_updates import UpdateCost, derived_update_cost, update_cost
from bayplan.running.joint import JointStep, analyse_joint
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import Network
from bayplan.simulating.renumbered import Renumbered
from bayplan.simulating.speeds_network import SpeedsNetwork
from bayplan.staged import StagedStep
from bayplan.training import TrainingStep
from bayplan.whole_tracing import trace_whole

__all__ = ["Elsewhere", "Ground", "Here"]

Around = Callable[[int, int], Circumstances]  # of a stage and a number of samples
OnStage = Callable[[int, int], None]


class Ground(Protocol):
    """Where ranks would compute and talk."""

    @property
    def name(self) -> str:
        """What a plan says it is for."""
        ...

    @property
    def num_cores(self) -> float:
        """That ranks share; infinite where each has a device of its own."""
        ...

    def around(
        self, staged: Callable[[int], StagedStep], num_samples: int, on_stage: OnStage
    ) -> Around:
        """What stages are traced with.

        Args:
            staged: by number of samples, the step.
            num_samples: of the whole batch.
            on_stage: hears of each stage before it is priced, and of its samples.
        """
        ...

    def priced(self, step: TrainingStep, staged: StagedStep) -> JointStep:
        """A whole step with the seconds of each operator, maybe at fewer samples."""
        ...

    def update(self, parameters: Sequence[torch.Tensor], optimizer: OptimizerSource) -> UpdateCost:
        """What an optimizer's update takes."""
        ...

    def prices(self) -> AbstractContextManager[RankPrices]:
        """What single calls take."""
        ...

    def network(self) -> Network | None:
        """Between ranks; None where nothing is known of it."""
        ...


@dataclass(frozen=True)
class Here:
    """Ranks of this machine, each with one thread, or with a device of its own.

    Attributes:
        device: that they compute on.
        has_other_nodes: whether some of them are elsewhere, so that links are unknown.
        find_links: finds out how fast two ranks talk; None if they cannot.
    """

    device: torch.device
    has_other_nodes: bool
    find_links: Callable[[], LinkSpeeds | None]

    @property
    def name(self) -> str:
        """See `Ground`."""
        return device_name(self.device)

    @property
    def num_cores(self) -> float:
        """See `Ground`."""
        return len(os.sched_getaffinity(0)) if self.device.type == "cpu" else math.inf

    def around(
        self, staged: Callable[[int], StagedStep], num_samples: int, on_stage: OnStage
    ) -> Around:
        """See `Ground`."""
        return StagePrices(
            staged=staged,
            num_samples=num_samples,
            cache=cache_directory(),
            granularity_bytes=granularity_of(self.device.type),
            on_stage=on_stage,
        ).around

    def priced(self, step: TrainingStep, staged: StagedStep) -> JointStep:
        """See `Ground`; at fewer samples where all would take too long."""
        whole = staged.whole
        fewer = samples_to_price(whole.nodes, whole.num_samples)
        if fewer < whole.num_samples:
            whole = trace_whole(step, num_samples=fewer)
        with self.prices() as price:
            return analyse_joint(
                whole.joint, num_forward_outputs=whole.num_forward_outputs, cost_of=price
            )

    def update(self, parameters: Sequence[torch.Tensor], optimizer: OptimizerSource) -> UpdateCost:
        """See `Ground`."""
        return update_cost(
            parameters,
            optimizer,
            prices=self.prices(),
            granularity_bytes=granularity_of(self.device.type),
        )

    def prices(self) -> AbstractContextManager[RankPrices]:
        """See `Ground`."""
        return one_thread_prices(self.device, cache=cache_directory())

    def network(self) -> Network | None:
        """See `Ground`."""
        return self._network

    @cached_property
    def _network(self) -> Network | None:
        links = None if self.has_other_nodes else self.find_links()
        return None if links is None else SpeedsNetwork(links)


@dataclass(frozen=True)
class Elsewhere:
    """The devices of a cluster.

    Attributes:
        devices: by rank, the number of its device.
        stage_ranks: by stage, the first of its ranks; a stage is priced by that one's device.
    """

    cluster: Cluster
    devices: tuple[int, ...]
    stage_ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """See `Ground`."""
        return self.cluster.fingerprint

    @property
    def num_cores(self) -> float:
        """See `Ground`."""
        return math.inf

    def kind(self, rank: int) -> DeviceKind:
        """Of a rank's device."""
        return self.cluster.kind_of(self.devices[rank])

    def around(
        self, staged: Callable[[int], StagedStep], num_samples: int, on_stage: OnStage
    ) -> Around:
        """See `Ground`."""

        def found(stage: int, own_samples: int) -> Circumstances:
            on_stage(stage, own_samples)
            kind = self.kind(self.stage_ranks[stage])
            prices = partial(_derived, kind)
            return Circumstances(
                prices=partial(with_whole_masks, prices, num_samples / own_samples),
                granularity_bytes=kind.allocation_granularity_bytes,
            )

        return found

    def priced(self, step: TrainingStep, staged: StagedStep) -> JointStep:
        """See `Ground`."""
        whole = staged.whole
        with self.prices() as price:
            return analyse_joint(
                whole.joint, num_forward_outputs=whole.num_forward_outputs, cost_of=price
            )

    def update(self, parameters: Sequence[torch.Tensor], optimizer: OptimizerSource) -> UpdateCost:
        """See `Ground`."""
        return derived_update_cost(parameters, optimizer, kind=self.kind(0))

    def prices(self) -> AbstractContextManager[RankPrices]:
        """See `Ground`."""
        return derived_prices(self.kind(0))

    def network(self) -> Network | None:
        """See `Ground`."""
        return self._network

    @cached_property
    def _network(self) -> Network:
        return Renumbered(ClusterNetwork(self.cluster), self.devices)


def _derived(kind: DeviceKind, _: torch.device) -> AbstractContextManager[RankPrices]:
    return derived_prices(kind)
