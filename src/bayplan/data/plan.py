"""`Plan`: every decision about a step, made before it runs; `run` obeys and `simulate` replays."""

import math
from enum import StrEnum
from itertools import pairwise

import msgspec

from bayplan.data.actions import Action, ActionKind
from bayplan.data.order import StepOrder
from bayplan.data.placement import Placement

__all__ = [
    "Bucket",
    "Choice",
    "Decision",
    "LiveValue",
    "PeakMoment",
    "Plan",
    "Request",
    "Route",
    "Stage",
    "StageOrder",
]


class Choice(StrEnum):
    """What happens to an activation between its last forward and first backward use."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SWAP = "swap"
    PACK = "pack"


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of consecutive forward nodes with their backward and update, and who computes it.

    Attributes:
        first, last: the forward nodes it covers, inclusive.
        devices: one per replica.
        shares: the part of the batch each replica takes, in samples.
    """

    first: int
    last: int
    devices: tuple[int, ...]
    shares: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError(f"first node is {self.first}, must be 0 or more")
        if self.first > self.last:
            raise ValueError(f"first node {self.first} is after last node {self.last}")
        if not self.devices:
            raise ValueError("devices is empty; a stage needs at least one")
        if len(self.shares) != len(self.devices):
            raise ValueError(f"{len(self.shares)} shares for {len(self.devices)} devices")
        for position, device in enumerate(self.devices):
            if device < 0:
                raise ValueError(f"devices[{position}] is {device}, must be 0 or more")
        for position, share in enumerate(self.shares):
            if share < 1:
                raise ValueError(f"shares[{position}] is {share}, must be at least 1")


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice for one activation, and what it costs.

    Attributes:
        value: the op that makes it, with the module it belongs to in `place`.
        size_bytes: what it takes while it is there.
        seconds: what the choice adds to the step.
    """

    value: str
    choice: Choice
    place: str = ""
    size_bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"size_bytes is {self.size_bytes}, must be 0 or more")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"seconds is {self.seconds}, must be finite and 0 or more")


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step that was asked about, so that a plan can be run without repeating it.

    Attributes:
        target: a reference model, or `module:function`; the latter is code, so it is never
            imported from a plan alone.
        batch: samples; None for the target's own.
        memory: the limit as it was given, `8GiB` or `40%`.
        update_in_backward: each parameter is updated as soon as its gradient is complete.
    """

    target: str
    batch: int | None = None
    optimizer: str = "adamw"
    autocast: str = "none"
    memory: str = ""
    update_in_backward: bool = False


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gradients that travel in one message, by parameter name.

    Attributes:
        stages: that have a part of them; the ranks of all of these sum them up. Several for
            weights that are tied across stages.
    """

    parameters: tuple[str, ...]
    size_bytes: int
    stages: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"size_bytes is {self.size_bytes}, must be 0 or more")


class LiveValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that is in memory at the peak, by the op and the module that made it."""

    value: str
    place: str = ""
    size_bytes: int


class StageOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage keeps, repeats, packs and swaps when it computes so many samples at a time.

    Attributes:
        in_flight: the most micro-batches that are past their forward at once, on any of its ranks.
        held_bytes: what each of them keeps in memory for its backward.
        passing_bytes: more than that, at the highest moment of a forward and backward.
        swap_bytes: what each of them has in the swap file.
        kept: for readers, the largest values that are held.
        decisions: for readers, the values that are not simply kept.
    """

    stage: int
    num_samples: int
    order: StepOrder
    in_flight: int = 1
    held_bytes: int = 0
    passing_bytes: int = 0
    swap_bytes: int = 0
    kept: tuple[LiveValue, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("stage", 0), ("num_samples", 1), ("in_flight", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {least}")
        for name in ("held_bytes", "passing_bytes", "swap_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 or more")

    @property
    def needed_bytes(self) -> int:
        """What the stage takes on a rank beside what stays."""
        return self.in_flight * self.held_bytes + self.passing_bytes


class Route(StrEnum):
    """How the samples of a micro-batch find a replica."""

    SPLIT = "split"  # over all replicas of a stage, by their shares
    ROUND_ROBIN = "round-robin"  # whole, to one replica after the other


class PeakMoment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What fills the memory when it is fullest.

    Attributes:
        op: the op that runs then, with the module it runs for in `place`.
        always_bytes: what no plan can release: parameters, buffers, batch, optimizer state.
        outputs_bytes: gradients and other results so far.
        workspace_bytes: inside the op's kernel.
        values: activations and temporaries, the largest first.
    """

    op: str
    place: str = ""
    always_bytes: int
    outputs_bytes: int
    workspace_bytes: int
    values: tuple[LiveValue, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decisions, what they are predicted to cost, and what they belong to.

    Attributes:
        step_fingerprint: of the operators that stages are cut from, for any batch size; empty
            where there is one stage on one device.
        placement: where the ranks are, node by node; empty where there is one device.
        route: which replica computes which samples.
        schedule: the name of what ordered the actions.
        links: pairs of stages, the earlier first, of which the later reads values of the earlier.
        gradient_links: pairs, the earlier first, of which the earlier reads gradients of the later.
        lags: by stage, how many batches its backward is behind its forward, and so how many updates
            old the weights are that a batch sees there; empty for none.
        vertical_sync: whether a batch sees weights of one age in all stages.
        static_order: whether every rank keeps the order of its list; else it does what is ready.
        sync_batch_norm: whether BatchNorm normalises a micro-batch by the statistics of all
            replicas' samples, instead of each replica's own.
        stage_orders: what stages keep, repeat, pack and swap, where memory is limited; else they
            keep all.
        actions: per device, its whole list in order.
        order: inside a stage, what happens to each operator and activation; for one device.
        decisions: the same by activation, for readers; those not named are kept.
        peak_moment: what sets the predicted peak.
        predicted_busy: by device, the share of the step that it computes in; empty if unknown.
        gap: at most this share longer than the best schedule takes; None if unknown.
    """

    schema: str = "bayplan/plan"
    version: int = 1
    model: str
    graph_fingerprint: str
    cluster_fingerprint: str
    torch_version: str
    limit_bytes: int | None = None
    stages: tuple[Stage, ...]
    step_fingerprint: str = ""
    placement: str = ""
    num_micro_batches: int = 1
    route: Route = Route.SPLIT
    schedule: str = ""
    links: tuple[tuple[int, int], ...] = ()
    gradient_links: tuple[tuple[int, int], ...] = ()
    lags: tuple[int, ...] = ()
    vertical_sync: bool = False
    static_order: bool = True
    sync_batch_norm: bool = False
    stage_orders: tuple[StageOrder, ...] = ()
    request: Request | None = None
    order: StepOrder | None = None
    decisions: tuple[Decision, ...] = ()
    peak_moment: PeakMoment | None = None
    buckets: tuple[Bucket, ...] = ()
    actions: tuple[tuple[str, ...], ...]
    predicted_peak_bytes: tuple[int, ...]
    predicted_seconds: float
    predicted_busy: tuple[float, ...] = ()
    gap: float | None = None

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}, must be at least 1")
        if not (math.isfinite(self.predicted_seconds) and self.predicted_seconds >= 0):
            raise ValueError(f"predicted_seconds is {self.predicted_seconds}, must be 0 or more")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ValueError(f"limit_bytes is {self.limit_bytes}, must be at least 1")
        if self.gap is not None and not (math.isfinite(self.gap) and self.gap >= 0):
            raise ValueError(f"gap is {self.gap}, must be finite and 0 or more")
        for device, peak_bytes in enumerate(self.predicted_peak_bytes):
            if peak_bytes < 0:
                raise ValueError(
                    f"predicted_peak_bytes[{device}] is {peak_bytes}, must be 0 or more"
                )
        if self.predicted_busy and len(self.predicted_busy) != len(self.actions):
            raise ValueError(
                f"{len(self.predicted_busy)} shares in predicted_busy for {len(self.actions)}"
                " devices"
            )
        for device, share in enumerate(self.predicted_busy):
            if not 0 <= share <= 1:
                raise ValueError(f"predicted_busy[{device}] is {share}, must be from 0 to 1")
        if len(self.predicted_peak_bytes) != len(self.actions):
            raise ValueError(
                f"{len(self.predicted_peak_bytes)} predicted peaks for {len(self.actions)} devices"
            )
        for at, stage in enumerate(self.stages):
            for position, device in enumerate(stage.devices):
                if device >= len(self.actions):
                    raise ValueError(
                        f"stages[{at}].devices[{position}] is {device}, but only"
                        f" {len(self.actions)} devices have actions"
                    )
        self._check_placement()
        self._check_stages_named()
        self._check_lags()
        if not self.static_order and len(self.actions) < 2:
            raise ValueError(
                f"static_order is false for {len(self.actions)} devices, must be true: only a rank"
                " that waits for others may take something else first"
            )
        if self.sync_batch_norm and not self.static_order:
            raise ValueError(
                "sync_batch_norm is true and static_order is false, must be true: replicas that"
                " wait for each other inside a stage need the same order"
            )
        if self.sync_batch_norm and self.route is not Route.SPLIT:
            raise ValueError(
                f"sync_batch_norm is true and route is {self.route}, must be split: only then have"
                " all replicas samples of the same micro-batch"
            )
        for device, texts in enumerate(self.actions):
            for position, text in enumerate(texts):
                try:
                    action = Action.parse(text)
                except ValueError as fault:
                    raise ValueError(f"actions[{device}][{position}]: {fault}") from None
                if action.kind is ActionKind.REDUCE:
                    bound, what = len(self.buckets), "buckets"
                else:
                    bound, what = self.num_micro_batches, "micro-batches"
                for index, limit, word in (
                    (action.stage, len(self.stages), "stages"),
                    (action.index, bound, what),
                ):
                    if index >= limit:
                        raise ValueError(
                            f"actions[{device}][{position}] is {text!r}, but there are only"
                            f" {limit} {word}"
                        )

    def _check_placement(self) -> None:
        """Raise ValueError where stages are not where the placement says."""
        if not self.placement:
            return
        placed = Placement.parse(self.placement)
        found = tuple(map(placed.ranks_of, range(len(placed.stages))))
        given = tuple(stage.devices for stage in self.stages)
        if found != given:
            raise ValueError(
                f"placement is {self.placement}, so stages are on {found}, but they have {given}"
            )

    @property
    def synchronised_stages(self) -> tuple[int, ...]:
        """The stages whose replicas wait for each other inside forward and backward."""
        if not self.sync_batch_norm:
            return ()
        return tuple(at for at, stage in enumerate(self.stages) if len(stage.devices) > 1)

    def _check_stages_named(self) -> None:
        """Raise ValueError where a link or bucket names a stage that is not there."""
        num_stages = len(self.stages)
        for name, links in (("links", self.links), ("gradient_links", self.gradient_links)):
            for position, (early, late) in enumerate(links):
                if not 0 <= early < late < num_stages:
                    raise ValueError(
                        f"{name}[{position}] is {early}, {late}, must lead from a stage to a later"
                        f" one of {num_stages}"
                    )
        for position, one in enumerate(self.stage_orders):
            if one.stage >= num_stages:
                raise ValueError(
                    f"stage_orders[{position}] is of stage {one.stage}, but there are only"
                    f" {num_stages}"
                )
        for position, bucket in enumerate(self.buckets):
            for stage in bucket.stages:
                if not 0 <= stage < num_stages:
                    raise ValueError(
                        f"buckets[{position}] names stage {stage}, but there are only {num_stages}"
                    )

    def _check_lags(self) -> None:
        """Raise ValueError for lags that no order of work has."""
        if not self.lags:
            return
        if len(self.lags) != len(self.stages):
            raise ValueError(f"{len(self.lags)} lags for {len(self.stages)} stages")
        if self.lags[-1] != 0:
            raise ValueError(
                f"lags ends with {self.lags[-1]}, must be 0: the last stage waits for none"
            )
        for stage, (lag, later) in enumerate(pairwise(self.lags)):
            if not 0 <= lag - later <= 1:
                raise ValueError(
                    f"lags[{stage}] is {lag}, must be that of the next stage, {later}, or one more"
                )
