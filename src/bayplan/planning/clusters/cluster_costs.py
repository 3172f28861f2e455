"""`ClusterCosts`: the model, devices, network and optimizer that every split is judged with.

Figures are looked up by the kind of a device. Where all devices are alike, `kinds` is empty and the
only kind has an empty name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from bayplan.data.chain import Chain
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.judgement import MemoryNeed
from bayplan.planning.clusters.memory import StageSizes, in_flight_of, memory_need, needed_parts
from bayplan.planning.clusters.split import DeviceMemory, Split, Training
from bayplan.simulating.network import Network

__all__ = ["Chains", "ClusterCosts", "Memory"]

Chains = Chain | Mapping[str, Chain]
Memory = DeviceMemory | Mapping[str, DeviceMemory] | None

_Given = TypeVar("_Given", Chain, DeviceMemory)
_FASTEST_SHARE = 1000


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """What layers take on each kind of device, and how devices are joined.

    Attributes:
        chains: the model, by kind.
        kinds: by device; empty where all devices are alike.
        memory: by kind; empty if memory is unlimited.
    """

    chains: Mapping[str, Chain]
    network: Network
    kinds: Sequence[str] = ()
    memory: Mapping[str, DeviceMemory]
    training: Training

    @classmethod
    def of(
        cls,
        chains: Chains,
        network: Network,
        *,
        kinds: Sequence[str] = (),
        memory: Memory = None,
        training: Training | None = None,
    ) -> "ClusterCosts":
        """Arrange everything by kind.

        Args:
            chains: the model on the only kind of device, or by kind.
            network: between devices, which are numbered from 0.
            kinds: by device, the name of its kind; needed where there are several.
            memory: of a device, or by kind; None if it is unlimited.
            training: how weights are trained.
        """
        names = {kind: kind for kind in sorted(set(kinds))}
        if len(names) < 2 or (isinstance(chains, Chain) and not isinstance(memory, Mapping)):
            names = {"": next(iter(names), "")}
        by_kind = {key: _of_kind("chain", chains, name, kinds) for key, name in names.items()}
        lengths = {len(chain.layers) for chain in by_kind.values()}
        if len(lengths) > 1:
            raise UsageError(f"chains of {sorted(lengths)} layers; all kinds need the same layers")
        return cls(
            chains=by_kind,
            network=network,
            kinds=() if "" in names else kinds,
            memory={}
            if memory is None
            else {key: _of_kind("memory", memory, name, kinds) for key, name in names.items()},
            training=training or Training(),
        )

    @property
    def num_layers(self) -> int:
        return len(self.any_chain.layers)

    @property
    def any_chain(self) -> Chain:
        """Of any kind: all have the same layers."""
        return next(iter(self.chains.values()))

    def kind_of(self, device: int) -> str:
        if self.kinds and device >= len(self.kinds):
            raise UsageError(f"device {device} has no kind; {len(self.kinds)} devices have one")
        return self.kinds[device] if self.kinds else ""

    def chain_of(self, device: int) -> Chain:
        return self.chains[self.kind_of(device)]

    def samples_per_second(self, kind: str) -> float:
        """Of the whole chain on one device of a kind."""
        chain = self.chains[kind]
        seconds = sum(chain.seconds(0, len(chain.layers) - 1, chain.num_samples))
        return chain.num_samples / max(1e-12, seconds)

    def with_shares(self, split: Split) -> Split:
        """The same split with the shares of the batch that suit the devices of each stage."""
        if not self.kinds:
            return split
        stages = (
            msgspec.structs.replace(stage, shares=self._shares(stage.devices))
            for stage in split.stages
        )
        return replace(split, stages=tuple(stages))

    def _shares(self, devices: Sequence[int]) -> tuple[int, ...]:
        """In proportion to how fast each device is with the whole chain; ones if all are alike."""
        speeds = [self.samples_per_second(self.kind_of(device)) for device in devices]
        fastest = max(speeds)
        if min(speeds) == fastest:
            return (1,) * len(devices)
        return tuple(max(1, round(_FASTEST_SHARE * speed / fastest)) for speed in speeds)

    def fits(self, split: Split) -> bool:
        return all(need.fits for need in self.memory_needs(split))

    def memory_needs(self, split: Split) -> tuple[MemoryNeed, ...]:
        """By stage, what the device needs that has least room to spare."""
        most_samples = -(-split.num_samples // split.num_micro_batches)
        needs: list[MemoryNeed] = []
        for stage, in_flight, lag, is_recomputed in zip(
            split.stages,
            in_flight_of(split),
            split.lags or (0,) * len(split.stages),
            split.recomputed or (False,) * len(split.stages),
            strict=True,
        ):
            kinds = map(self.kind_of, stage.devices)
            of_replicas: list[MemoryNeed] = []
            for kind, share in dict.fromkeys(zip(kinds, stage.shares, strict=True)):
                samples = -(-most_samples * share // sum(stage.shares))
                parts = needed_parts(
                    StageSizes.of(self.chains[kind], stage.first, stage.last, samples),
                    self.training,
                    in_flight=in_flight,
                    lag=lag,
                    is_recomputed=is_recomputed,
                    is_replicated=len(stage.devices) > 1,
                )
                of_replicas.append(memory_need(parts, self.training, self.memory.get(kind)))
            needs.append(max(of_replicas, key=lambda need: need.total_bytes - need.device_bytes))
        return tuple(needs)


def _of_kind(
    what: str, given: _Given | Mapping[str, _Given], kind: str, kinds: Sequence[str]
) -> _Given:
    if not isinstance(given, Mapping):
        return given
    if len(given) == 1:
        return next(iter(given.values()))
    if not kinds:
        raise UsageError(f"a {what} for each of {len(given)} kinds, but devices have no kind")
    if kind not in given:
        raise UsageError(
            f"no {what} for {kind!r}, the kind of device {list(kinds).index(kind)};"
            f" {did_you_mean(kind, given)}"
        )
    return given[kind]
