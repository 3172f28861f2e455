"""Options about many ranks, and the plan that `bayplan plan` and `bayplan run` make of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bayplan.cli.options import Flag
from bayplan.data.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from bayplan.data.placement import Placement
    from bayplan.data.plan import RankPlan
    from bayplan.planning.pipelines.placing import RankPlanOptions
    from bayplan.running.swaps.swap_space import SwapSpace

__all__ = ["NO_RANKS", "RANKS_HELP", "RankOptions", "check_is_local", "plan_for_ranks"]

RANKS_HELP = """\
On many ranks: --placement 0:0-6.0:7 puts the first stage on devices 0 to 6 of node 0 and the
second on device 7; a stage after each dot, several nodes by commas (0:0-7,1:0-7.0:0-7,1:0-7), and
'' for data parallel on --ranks devices. Stages are cut by --shares of measured time (11:7), of
operators as OneFlow does (--shares-by ops) or of parameters, or at modules (--cut-at layer3).
Gradients are those of one device, whatever the numbers of replicas."""


@Parameter(name="*", group="Many ranks")
@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What may be said about a plan for many ranks.

    Attributes:
        placement: Devices of each stage, like 0:0-6.0:7; '' for data parallel. See below.
        ranks: How many devices '' means. Default: one for each core here.
        shares: How much each stage gets, like 11:7. Default: equal.
        shares_by: Shares of what: time, ops or parameters.
        cut_at: Instead of shares: modules that later stages begin with.
        micro_batches: Parts of the batch that follow each other.
        schedule: The order of work: 1f1b, gpipe, interleaved, zero-bubble, one-by-one.
        route: Replicas split each micro-batch, or take turns: split, round-robin.
        depth: More than 1 lets more micro-batches be in flight, for uneven times.
        versions: The same by stage, as versions of its weights in use at once, like 2:1.
        vertical_sync: A batch sees weights of one age in all stages.
        buckets: Gradients that travel together, by a file of `bayplan tune`. Default: planned.
    """

    placement: str | None = None
    ranks: int | None = None
    shares: str | None = None
    shares_by: str = "time"
    cut_at: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    micro_batches: int = 1
    schedule: str = "1f1b"
    route: str = "split"
    depth: int = 1
    staleness: Annotated[
        int,
        Parameter(
            help="Let batches overlap: a batch may see weights that are so many updates old. The"
            " numbers are then not those of one device."
        ),
    ] = 0
    versions: str | None = None
    vertical_sync: Flag = False
    static_order: Annotated[
        bool,
        Parameter(
            help="Ranks keep the order that is planned; --no-static-order lets each do whatever is"
            " ready, within what is planned to be in flight."
        ),
    ] = True
    sync_batch_norm: Annotated[
        Flag,
        Parameter(
            help="BatchNorm's statistics are those of all replicas' samples, of each micro-batch."
        ),
    ] = False
    buckets: Path | None = None
    memory_per_rank: Annotated[
        str | None,
        Parameter(
            help="A limit for each rank, like 2GiB. What does not fit is recomputed or packed, or"
            " swapped to --swap-dir."
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether a plan for many ranks is asked for.

        Raises:
            UsageError: something is said about ranks, but not where they are.
        """
        if self.placement is None and self != NO_RANKS:
            raise UsageError(
                "these options are about many ranks; say where, with --placement, or with --cluster"
            )
        return self.placement is not None

    def plan_options(
        self,
        placement: str,
        optimizer: str,
        *,
        pack: bool,
        time_limit: float,
        space: "SwapSpace | None" = None,
        max_swap_bytes: int | None = None,
    ) -> "RankPlanOptions":
        """The same, understood, with what one device's plans may be told as well."""
        import os

        from bayplan.data import files
        from bayplan.data.exchange import BucketFile
        from bayplan.data.placement import Placement
        from bayplan.data.plan import Route
        from bayplan.data.units import parse_bytes
        from bayplan.planning.clusters.split import state_per_parameter
        from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy

        num_devices = len(os.sched_getaffinity(0)) if self.ranks is None else self.ranks
        return RankPlanOptions(
            placement=Placement.parse(placement, num_devices=None if placement else num_devices),
            shares=_parsed_numbers("--shares", self.shares, "11:7"),
            shares_by=SharesBy(_one_of("--shares-by", self.shares_by, [*SharesBy])),
            cut_at=self.cut_at,
            num_micro_batches=self.micro_batches,
            schedule=self.schedule,
            route=Route(_one_of("--route", self.route, [*Route])),
            depth=self.depth,
            staleness=self.staleness,
            versions=_parsed_numbers("--versions", self.versions, "2:1"),
            vertical_sync=self.vertical_sync,
            static_order=self.static_order,
            sync_batch_norm=self.sync_batch_norm,
            limit_bytes=None if self.memory_per_rank is None else parse_bytes(self.memory_per_rank),
            may_pack=pack,
            tier=None if space is None else space.tier,
            max_swap_bytes=max_swap_bytes if space is None else space.max_bytes,
            buckets=None if self.buckets is None else files.read(self.buckets, BucketFile),
            state_per_parameter=state_per_parameter(optimizer),
            time_limit_seconds=time_limit,
        )


NO_RANKS = RankOptions()


def _parsed_numbers(option: str, text: str | None, example: str) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(":")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"{option} is {text!r}; write whole numbers from 1 on, like {example}")
    return tuple(map(int, parts))


def _one_of(option: str, word: str, known: list[str]) -> str:
    if word not in known:
        raise UsageError(f"no {option} {word!r}; {did_you_mean(word, known)}")
    return word


def plan_for_ranks(
    target: str,
    options: RankOptions,
    *,
    batch: int | None,
    optimizer: str,
    autocast: str,
    swap_dir: Path | None,
    swap_size: str | None,
    pack: bool = True,
    time_limit: float = 10.0,
    is_local: bool = False,
) -> "RankPlan":
    """Plan a target for many ranks; if `is_local`, of this machine only."""
    if options.memory_per_rank is None:
        for name, is_given in (
            ("--swap-dir", swap_dir is not None or swap_size is not None),
            ("--no-pack", not pack),
        ):
            if is_given:
                raise UsageError(f"{name} is about a limit; give one with --memory-per-rank")
    from bayplan import api
    from bayplan.prepared_step import prepare
    from bayplan.reporting.progress import ProgressBar

    assert options.placement is not None, "see `is_given`"
    plan_options = options.plan_options(
        options.placement,
        optimizer,
        pack=pack,
        time_limit=time_limit,
        space=api.swap_space(swap_dir, swap_size),
    )
    placement = plan_options.placement
    if len(placement.places) < 2:
        raise UsageError(
            f"placement {placement} is one device, which needs no ranks; leave out --placement, or"
            " name two devices or more"
        )
    if is_local:
        check_is_local(placement)
    with ProgressBar() as bar:
        step = prepare(target, batch, optimizer=optimizer, autocast=autocast)
        return api.plan_for_ranks(step, plan_options, on_progress=bar)


def check_is_local(placement: "Placement") -> None:
    """Refuse to start ranks of other machines here."""
    counts = placement.devices_per_node
    if len(counts) > 1:
        raise UsageError(
            f"placement {placement} names {len(counts)} nodes, but `bayplan run` starts ranks of"
            " this machine, which is node 0; on several, write the plan to a file with `bayplan"
            f" plan` and start torchrun --nnodes {len(counts)} --nproc-per-node {max(counts)} on"
            " each"
        )
