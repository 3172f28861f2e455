"""What a user says about a plan for many ranks: understood, and checked for contradictions."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from bayplan.data.bucket_file import BucketFile
from bayplan.data.errors import UsageError
from bayplan.data.placement import Placement
from bayplan.data.plan import Route
from bayplan.swap_space import SwapSpace

__all__ = ["SharesBy", "Wishes"]


class SharesBy(StrEnum):
    """What shares are shares of."""

    TIME = "time"
    OPS = "ops"
    PARAMETERS = "parameters"


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user says about a plan for many ranks.

    Attributes:
        shares: of each stage; empty for equal ones.
        cut_at: instead of shares, the module that each stage after the first begins with.
        firsts: instead of both, the operator that each stage begins with.
        batch_shares: by stage, what part of the batch each replica takes; empty for equal ones.
        depth: see `schedule`.
        staleness: how many updates old the weights may be that a batch sees.
        versions: the same by stage: how many versions of its weights are in use at once.
        vertical_sync: whether a batch sees weights of one age in all stages.
        static_order: whether ranks keep the order of their lists, or do what is ready.
        sync_batch_norm: whether BatchNorm normalises a micro-batch by the statistics of all
            replicas' samples.
        limit_bytes: for each rank; what does not fit as it is gets recomputed, packed or swapped.
        may_pack: whether activations may be packed.
        space: where each rank's activations may be swapped to; None repeats and packs only.
        buckets: gradients that travel together; None for as planned.
        state_per_parameter: bytes of optimizer state for a byte of parameters.
        time_limit_seconds: to plan the memory of one stage.
    """

    placement: Placement
    shares: tuple[int, ...] = ()
    shares_by: SharesBy = SharesBy.TIME
    cut_at: tuple[str, ...] = ()
    firsts: tuple[int, ...] = ()
    batch_shares: tuple[tuple[int, ...], ...] = ()
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    route: Route = Route.SPLIT
    depth: int = 1
    staleness: int = 0
    versions: tuple[int, ...] = ()
    vertical_sync: bool = False
    static_order: bool = True
    sync_batch_norm: bool = False
    limit_bytes: int | None = None
    may_pack: bool = True
    space: SwapSpace | None = None
    buckets: BucketFile | None = None
    state_per_parameter: float = 2.0
    time_limit_seconds: float = 10.0

    @property
    def lags(self) -> tuple[int, ...]:
        """By stage, how many batches its backward is behind its forward; empty for none."""
        num_stages = len(self.placement.stages)
        if self.versions:
            found = tuple(number - 1 for number in self.versions)
        else:
            found = tuple(min(num_stages - 1 - at, self.staleness) for at in range(num_stages))
        return found if any(found) else ()

    def __post_init__(self) -> None:
        num_stages = len(self.placement.stages)
        self.placement.check_numbered()
        if self.shares and len(self.shares) != num_stages:
            raise UsageError(
                f"{len(self.shares)} shares ({':'.join(map(str, self.shares))}) for {num_stages}"
                f" stages ({self.placement}); give one for each"
            )
        if self.cut_at and len(self.cut_at) != num_stages - 1:
            raise UsageError(
                f"{len(self.cut_at)} modules to cut at for {num_stages} stages ({self.placement});"
                f" name {num_stages - 1}"
            )
        object.__setattr__(self, "route", Route(self.route))
        object.__setattr__(self, "shares_by", SharesBy(self.shares_by))
        if self.staleness < 0:
            raise UsageError(f"staleness is {self.staleness}; must be 0 or more")
        if self.versions and len(self.versions) != num_stages:
            raise UsageError(
                f"{len(self.versions)} numbers of versions for {num_stages} stages; give one each"
            )
        self._check_versions()
        if not self.static_order and len(self.placement.places) < 2:
            raise UsageError("without static order needs ranks that wait for others; name several")
        if self.space is not None and self.limit_bytes is None:
            raise UsageError(
                "a place to swap to needs a limit to swap for; give one for each rank with"
                " --memory-per-rank"
            )
        if self.space is not None and self.schedule == "zero-bubble":
            raise UsageError(
                "the two halves of a zero-bubble backward hand on what was brought back, so that"
                " swapping saves little there; leave out --swap-dir, or use --schedule 1f1b"
            )
        if self.sync_batch_norm and not self.static_order:
            raise UsageError(
                "--sync-batch-norm and --no-static-order: replicas wait for each other inside a"
                " stage, so that all need the same order; leave out one"
            )
        if self.sync_batch_norm and self.route is not Route.SPLIT:
            raise UsageError(
                f"--sync-batch-norm and --route {self.route}: replicas then have samples of"
                " different micro-batches, so they have no statistics in common; leave out one"
            )
        if self.cut_at and self.shares:
            raise UsageError("shares and modules to cut at are two ways to say the same; give one")

    def _check_versions(self) -> None:
        lags = self.lags
        if self.versions and lags and lags[-1]:
            raise UsageError(
                f"the last stage has {self.versions[-1]} versions; it is never behind, so give it 1"
            )
        for stage, (lag, later) in enumerate(pairwise(lags)):
            if not 0 <= lag - later <= 1:
                raise UsageError(
                    f"stage {stage} has {lag + 1} versions and the next one {later + 1}; give it as"
                    " many, or one more"
                )
