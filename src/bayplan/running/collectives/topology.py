"""`RankTopology`: which ranks share a host, and the memory that they open for each other."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path

import torch
from torch import distributed

from bayplan import torch_compat as torch_compat
from bayplan.data.exchange import Algorithm
from bayplan.devices.machine import cache_directory, host_identity
from bayplan.native import CompileFailed
from bayplan.running.collectives.blocks import Block, Blocks, load
from bayplan.running.collectives.groups import has_tags, own_group
from bayplan.running.collectives.sums import (
    BetweenHosts,
    ScatteredSums,
    SharedSums,
    SocketSums,
    Sums,
)

__all__ = ["RankTopology", "open_topology", "shares_memory"]

_CPU = torch.device("cpu")
_PATIENCE_SECONDS = 1800  # as gloo's; a lost rank is found by its heartbeat long before


def shares_memory(environment: Mapping[str, str]) -> bool:
    """Whether ranks of a host may share memory: unless BAYPLAN_SHARED_MEMORY is 0."""
    return environment.get("BAYPLAN_SHARED_MEMORY", "1") != "0"


def open_topology(device: torch.device = _CPU) -> "RankTopology":
    """Of all ranks of the default process group.

    Args:
        device: of the tensors that ranks exchange.
    """
    store, rank = torch_compat.default_store(), distributed.get_rank()
    number = store.add(f"bayplan/topologies{rank}", 1)  # the same for all ranks
    return RankTopology(
        store=distributed.PrefixStore(f"bayplan/topology{number}", store),
        rank=rank,
        world_size=distributed.get_world_size(),
        cache=cache_directory(),
        is_willing=shares_memory(os.environ) and has_tags(device),
        device=device,
    )


@dataclass(frozen=True)
class RankTopology:
    """All ranks of a run; every rank makes the same calls in the same order."""

    store: distributed.Store  # that no other topology uses
    rank: int
    world_size: int
    cache: Path  # where the compiled sums are kept
    is_willing: bool = True  # whether this rank may share memory
    device: torch.device = _CPU  # of what ranks exchange
    _numbers: Iterator[int] = field(default_factory=count)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """By rank, its host; a rank that shares nothing has one of its own."""
        self.store.set(f"host{self.rank}", self._own_host())
        return tuple(self.store.get(f"host{rank}").decode() for rank in range(self.world_size))

    def _own_host(self) -> str:
        if self.is_willing and hasattr(os, "memfd_create"):
            with suppress(CompileFailed, OSError):
                load(self.cache)
                return host_identity()
        return f"alone{self.rank}"

    def sums(self, ranks: Sequence[int], data_bytes: int) -> Sums | None:
        """Sums over some ranks, in shared memory where that is possible; None on all others."""
        ways = self.ways(ranks, data_bytes)
        return next(iter(ways.values())) if ways else None

    def ways(
        self, ranks: Sequence[int], data_bytes: int, *, is_scattered: bool = False
    ) -> dict[str, Sums]:
        """Ways to sum up over some ranks, by name; none on all others.

        Args:
            data_bytes: what rooms for all that is to be summed take; the first way has them.
            is_scattered: whether to have `ScatteredSums`, too, which needs more connections.
        """
        # A group of its own: its sums are begun in another thread, which only gloo can bear. NCCL
        # has several algorithms and chooses by itself.
        is_scattered = is_scattered and has_tags(self.device)
        scattered = own_group(ranks, self.device) if is_scattered else None
        number, group = next(self._numbers), own_group(ranks, self.device)
        of_host: dict[str, list[int]] = {}
        for rank in ranks:
            of_host.setdefault(self.hosts[rank], []).append(rank)
        is_shared = data_bytes > 0 and len(of_host) < len(ranks)
        leaders = None
        if is_shared and len(of_host) > 1:
            leaders = own_group((mates[0] for mates in of_host.values()), self.device)
        if group is None:
            return {}  # this rank is no member
        sockets: dict[str, Sums] = {Algorithm.RING: SocketSums(group)}
        if scattered is not None:
            sockets[Algorithm.REDUCE_SCATTER] = ScatteredSums(scattered)
        if not is_shared:
            return sockets
        own = of_host[self.hosts[self.rank]]
        name = f"{number}/{'-'.join(map(str, ranks))}"
        opened = self.opened(ranks, own, data_bytes, name=name, what="sums")
        if opened is None:
            return sockets
        blocks = Blocks(
            load(self.cache),
            [opened[rank] for rank in own],
            own.index(self.rank),
            patience_seconds=_PATIENCE_SECONDS,
        )
        if len(of_host) == 1:
            return {Algorithm.SHARED: SharedSums(blocks, own, group), **sockets}
        between = BetweenHosts(leaders)
        return {Algorithm.HIERARCHICAL: SharedSums(blocks, own, group, between), **sockets}

    @property
    def mates(self) -> list[int]:
        """The ranks of this rank's host, itself among them."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    def opened(
        self, ranks: Sequence[int], own: Sequence[int], data_bytes: int, *, name: str, what: str
    ) -> dict[int, Block] | None:
        """Blocks of this rank's host, by rank; None if any rank has none.

        Args:
            ranks: that have blocks on all hosts, all of which make this call.
            own: those of them on this host.
            name: the same for all, and for nothing else.
            what: they are for, in a warning.
        """
        fault_text, place, blocks = "", "", dict[int, Block]()
        try:
            blocks[self.rank] = block = Block.make(data_bytes)
            place = f"{os.getpid()} {block.file} {block.size_bytes}"
        except OSError as fault:
            fault_text = f"rank {self.rank}: {fault}"
        self.store.set(f"{name}/block{self.rank}", place)
        try:
            for rank in own:
                place = self.store.get(f"{name}/block{rank}").decode()
                if place and rank != self.rank:  # a rank without a block says so itself
                    blocks[rank] = Block.of_other(*map(int, place.split()))
        except OSError as fault:
            fault_text = f"rank {self.rank}: {fault}"
        self.store.set(f"{name}/opened{self.rank}", fault_text)
        answers = [self.store.get(f"{name}/opened{rank}").decode() for rank in ranks]
        for opened in blocks.values():
            opened.close_file()
        faults = [answer for answer in answers if answer]
        if faults and self.rank == ranks[0]:
            warnings.warn(
                f"ranks cannot share memory ({faults[0]}), so {what} go through sockets, which is"
                " slower",
                stacklevel=2,
            )
        return None if faults else blocks
