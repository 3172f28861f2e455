"""Options about many ranks, which `bayplan plan` and `bayplan run` share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bayplan.cli import options
from bayplan.data.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from bayplan.data.placement import Placement

__all__ = ["NO_RANKS", "RANKS_HELP", "RankOptions"]

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
        shares_by: What the shares count: time, ops or parameters.
        cut_at: Instead of shares: modules that later stages begin with.
        micro_batches: The number of parts that the batch is split into.
        schedule: The order of work: 1f1b, gpipe, interleaved, zero-bubble, one-by-one.
        route: Replicas split each micro-batch, or take turns: split, round-robin.
        depth: More than 1 lets more micro-batches be in flight, for uneven times.
        staleness: Overlap batches on weights this many updates old; results differ from one device.
        versions: The same by stage, as versions of its weights in use at once, like 2:1.
        vertical_sync: A batch uses weights of the same age in all stages.
        sync_batch_norm: BatchNorm uses the statistics of all replicas, for each micro-batch.
        buckets: Which gradients share a message: a file of `bayplan tune`. Default: planned.
    """

    placement: str | None = None
    ranks: options.WholeOrNone = None
    shares: str | None = None
    shares_by: str = "time"
    cut_at: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    micro_batches: options.Whole = 1
    schedule: str = "1f1b"
    route: str = "split"
    depth: options.Whole = 1
    staleness: options.Whole = 0
    versions: str | None = None
    vertical_sync: options.Flag = False
    static_order: Annotated[
        bool,
        Parameter(
            help="Ranks keep the planned order; with --no-static-order, each runs any action that "
            "is ready, with no more micro-batches in flight than planned."
        ),
    ] = True
    sync_batch_norm: options.Flag = False
    buckets: Path | None = None
    memory_per_rank: Annotated[
        str | None,
        Parameter(
            help="A limit for each rank, like 2GiB. Values that do not fit are recomputed or "
            "packed, or swapped to --swap-dir."
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

    def devices(self, on: str | None) -> "Placement":
        """The devices of this machine, or of several, that are placed on."""
        from bayplan.data.placement import Placement

        num_devices = self.ranks
        if num_devices is None:
            from bayplan.devices.choosing import chosen_device  # imports torch

            num_devices = chosen_device(on).num_devices
        placement = Placement.parse(self.placement or "", num_devices=num_devices)
        placement.check_numbered()
        if len(placement.places) < 2:
            raise UsageError(
                f"placement {placement} is one device, which needs no ranks; leave out --placement,"
                " or name two devices or more"
            )
        return placement

    def plan_fields(self) -> dict[str, Any]:
        """The fields of `RankPlanOptions` that these options set, but for the placement."""
        from bayplan.data import files
        from bayplan.data.exchange import BucketFile
        from bayplan.data.plan import Route
        from bayplan.data.units import parse_bytes
        from bayplan.planning.pipelines.placing import SharesBy

        limit = self.memory_per_rank
        return {
            "shares": _parsed_numbers("--shares", self.shares, "11:7"),
            "shares_by": _one_of("--shares-by", self.shares_by, [*SharesBy]),
            "cut_at": self.cut_at,
            "num_micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "route": _one_of("--route", self.route, [*Route]),
            "depth": self.depth,
            "staleness": self.staleness,
            "versions": _parsed_numbers("--versions", self.versions, "2:1"),
            "vertical_sync": self.vertical_sync,
            "static_order": self.static_order,
            "sync_batch_norm": self.sync_batch_norm,
            "limit_bytes": None if limit is None else parse_bytes(limit),
            "buckets": None if self.buckets is None else files.read(self.buckets, BucketFile),
        }

    def within(self, limit_bytes: int) -> "RankOptions":
        """The same with another limit for each rank, where there are ranks."""
        return replace(self, memory_per_rank=str(limit_bytes)) if self.is_given else self

    def check_limit(self, *, swaps: bool, pack: bool = True) -> None:
        """Refuse options about a limit where none is given."""
        if self.memory_per_rank is None and (swaps or not pack):
            option = "--swap-dir" if swaps else "--no-pack"
            raise UsageError(f"{option} is about a limit; give one with --memory-per-rank")


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
