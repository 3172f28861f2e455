"""`Plan`: every decision about a step, made before it runs; `run` obeys and `simulate` replays.

A plan is a `DevicePlan` (one device, operator by operator) or a `RankPlan` (stages on ranks, each
with its list of actions). A file says which in its field `kind`.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar

import msgspec

from bayplan.data.actions import Action, ActionKind
from bayplan.data.device import check_architecture
from bayplan.data.errors import CheckedStruct, ForeignPlan, check_at_least_1, check_index
from bayplan.data.placement import Placement
from bayplan.data.program import Program
from bayplan.data.units import LimitCounts

__all__ = [
    "Bucket",
    "Choice",
    "Decision",
    "DevicePlan",
    "LiveValue",
    "PeakMoment",
    "Plan",
    "RankPlan",
    "Request",
    "Route",
    "Stage",
    "StageOrder",
    "StepOrder",
    "Swap",
]


class Swap(CheckedStruct, frozen=True):
    """An activation that is offloaded; times are steps of the schedule.

    Attributes:
        buffer: made in forward, read in backward, no output.
        away_before: the step of forward before which it must have left the device; the index of
            the first backward op means at the end of forward.
        backs_before: the steps of backward before which a prefetch begins, ascending. Each serves
            the readers up to the next one; readers before the first read the buffer itself.
    """

    buffer: int
    away_before: int
    backs_before: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.backs_before:
            raise ValueError("backs_before is empty; a swapped activation must come back")


class StepOrder(CheckedStruct, frozen=True, kw_only=True):
    """The order of a program's ops, with repeats, and how its values are stored in between.

    Attributes:
        program_fingerprint: of the traced program, its packs applied: ops and sizes, not costs. It
            is checked when the step is traced for the run.
        schedule: indices of ops: the forward in order, then the backward in order with repeats in
            between.
        packs: names of the values that are kept packed, `kind:value`.
        swaps: what is swapped out, and when.
        strategy: who chose it.
        peak_bytes, plain_peak_bytes: bytes: of this order, and of the step without a plan.
        seconds, plain_seconds: s of forward and backward: of this order, and with every op once.
        gap: at most this share longer than the best schedule takes; null if unknown.
        time_ratio_spread: how far the ratio of `seconds` to `plain_seconds` may be off.
        price_spread: how far the prices of operators may be off, as a share of them all.
        reserved_bytes: bytes that torch's caching allocator is predicted to reserve; null where the
            limit is for live ones.
        in_step: whether `seconds` and `plain_seconds` were measured in the running step, and not of
            operators alone.
    """

    program_fingerprint: str
    schedule: tuple[int, ...]
    packs: tuple[str, ...] = ()
    swaps: tuple[Swap, ...] = ()
    strategy: str
    peak_bytes: int
    plain_peak_bytes: int
    seconds: float
    plain_seconds: float
    gap: float | None = None
    time_ratio_spread: float = 0.0
    price_spread: float = 0.0
    reserved_bytes: int | None = None
    in_step: bool = False

    def __post_init__(self) -> None:
        if not self.schedule:
            raise ValueError("schedule is empty; a step has at least one op")
        super().__post_init__()

    @property
    def time_ratio(self) -> float:
        return self.seconds / self.plain_seconds if self.plain_seconds else 1.0

    def check_belongs_to(self, program: Program) -> None:
        if program.fingerprint != self.program_fingerprint:
            raise ForeignPlan(
                f"the plan is for another step: its fingerprint is {self.program_fingerprint}, this"
                f" step's is {program.fingerprint}; model, batch size, precision or torch differ."
                " Plan this step anew"
            )


class Choice(StrEnum):
    """What happens to an activation between its last forward and first backward use."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SWAP = "swap"
    PACK = "pack"


class Stage(CheckedStruct, frozen=True, kw_only=True):
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
        if self.first > self.last:
            raise ValueError(f"first node {self.first} is after last node {self.last}")
        if not self.devices:
            raise ValueError("devices is empty; a stage needs at least one")
        if len(self.shares) != len(self.devices):
            raise ValueError(f"{len(self.shares)} shares for {len(self.devices)} devices")
        super().__post_init__()
        check_at_least_1(**{f"shares[{index}]": share for index, share in enumerate(self.shares)})


class Decision(CheckedStruct, frozen=True, kw_only=True):
    """The choice for one activation, and what it costs.

    Attributes:
        value: the op that makes it, `convolution_3`.
        choice: `keep` is never written.
        place: the module, `layer1.0.conv2`.
        size_bytes: bytes while it is there; 0 for packs.
        seconds: s that the choice adds to a step; 0 for swaps and packs, whose cost is in the
            order's seconds.
    """

    value: str
    choice: Choice
    place: str = ""
    size_bytes: int = 0
    seconds: float = 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step that was asked about, so that a plan can be run without repeating it.

    Attributes:
        target: a reference model, or `module:function`, which is never imported from a plan alone.
        batch: samples; None for the target's own.
        memory: the limit as it was given, `8GiB` or `40%`.
        update_in_backward: each parameter is updated as soon as its gradient is complete.
        operators: of a plan for a cluster, the architecture of the GPU whose operators it has;
            empty for those of the machine that planned.
    """

    target: str
    batch: int | None = None
    optimizer: str = "adamw"
    autocast: str = "none"
    memory: str = ""
    update_in_backward: bool = False
    operators: str = ""

    def __post_init__(self) -> None:
        check_architecture("operators", self.operators)


class Bucket(CheckedStruct, frozen=True, kw_only=True):
    """Gradients that travel in one message, by parameter name.

    Attributes:
        stages: whose ranks all-reduce them; several if weights are tied across stages.
    """

    parameters: tuple[str, ...]
    size_bytes: int
    stages: tuple[int, ...] = (0,)


class LiveValue(CheckedStruct, frozen=True, kw_only=True):
    """A value that is in memory at the peak, by the op and the module that made it."""

    value: str
    place: str = ""
    size_bytes: int


class StageOrder(CheckedStruct, frozen=True, kw_only=True):
    """What a stage keeps, repeats, packs and swaps when it computes so many samples at a time.

    Attributes:
        stage, num_samples: what it is for; other numbers of samples are planned when they come.
        order: of the stage's own operators.
        in_flight: the most micro-batches past their forward at once, on any rank of the stage.
        held_bytes: bytes that each of them keeps in memory for its backward.
        passing_bytes: bytes beyond that, at the highest moment of a forward and backward.
        swap_bytes: bytes that each of them has in the swap file.
        kept: for readers: up to 20 largest values that are held.
        decisions: for readers: what is not simply kept.
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
        super().__post_init__()
        check_at_least_1(num_samples=self.num_samples, in_flight=self.in_flight)

    @property
    def needed_bytes(self) -> int:
        """What the stage takes on a rank beside parameters and other residents."""
        return self.in_flight * self.held_bytes + self.passing_bytes


class Route(StrEnum):
    """How the samples of a micro-batch find a replica."""

    SPLIT = "split"  # over all replicas of a stage, by their shares
    ROUND_ROBIN = "round-robin"  # whole, to one replica after the other


class PeakMoment(CheckedStruct, frozen=True, kw_only=True):
    """What fills the memory when it is fullest.

    Attributes:
        op, place: the op that runs then, and the module it runs for.
        always_bytes: what no plan can release: parameters, buffers, batch, optimizer state.
        outputs_bytes: gradients and other results so far.
        values: activations and temporaries, the largest first.
    """

    op: str
    place: str = ""
    always_bytes: int
    outputs_bytes: int
    workspace_bytes: int
    values: tuple[LiveValue, ...]


def _from_version_1(fields: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had one type for both kinds; only plans for one device had an `order`.

    Fields keep their names and places, so a fault is named where it stands in the old file. What
    belongs to the other kind only ever had its default, or said again what `order` says.
    """
    is_for_ranks = fields.get("order") is None
    kind, unlike = ("ranks", DevicePlan) if is_for_ranks else ("device", RankPlan)
    actions = fields.get("actions")
    if not is_for_ranks and isinstance(actions, list) and len(actions) != 1:
        raise ValueError(
            f"a plan for one device has an `order`, but there are {len(actions)} lists of `actions`"
        )
    dropped = {*unlike.__struct_fields__} - {*_PlanBase.__struct_fields__} | {"gap"}
    kept = {name: value for name, value in fields.items() if name not in dropped}
    return {"kind": kind, **kept, "version": 2}


class _PlanBase(CheckedStruct, frozen=True, kw_only=True):
    """What every plan says: what it belongs to, and what it is predicted to cost.

    Attributes:
        model: the graph's.
        cluster_fingerprint: for one device, its name: `cpu`, or that of `--device`.
        torch_version: torch that traced the step; another one is refused.
        limit_bytes: bytes per device that it keeps to; null for a strategy without a limit.
        request: what was asked for.
        predicted_peak_bytes: bytes, one number for each device.
        predicted_seconds: s per step, loss and update included; 0 if it was not predicted.
    """

    schema: str = "bayplan/plan"
    version: int = 2
    model: str
    cluster_fingerprint: str
    torch_version: str
    limit_bytes: int | None = None
    request: Request | None = None
    predicted_peak_bytes: tuple[int, ...]
    predicted_seconds: float

    upgrades: ClassVar[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {
        1: _from_version_1
    }

    def __post_init__(self) -> None:
        check_at_least_1(limit_bytes=self.limit_bytes)
        super().__post_init__()


class DevicePlan(_PlanBase, frozen=True, kw_only=True, tag_field="kind", tag="device"):
    """What one device does with each operator and activation of a step.

    Attributes:
        graph_fingerprint: of the captured step; a run of another step is refused (exit code 5).
        limit_counts: which bytes `limit_bytes` is for; predicted peaks are of live ones.
        order: what the device does, operator by operator.
        decisions: the same by activation, for readers.
        peak_moment: what sets the predicted peak, for readers.
    """

    graph_fingerprint: str
    limit_counts: LimitCounts = LimitCounts.LIVE
    order: StepOrder
    decisions: tuple[Decision, ...] = ()
    peak_moment: PeakMoment | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.predicted_peak_bytes) != 1:
            raise ValueError(f"{len(self.predicted_peak_bytes)} predicted peaks for 1 device")


class RankPlan(_PlanBase, frozen=True, kw_only=True, tag_field="kind", tag="ranks"):
    """Stages, who computes them, and what each rank does when.

    Attributes:
        stages: in the order of the forward.
        step_fingerprint: of the operators that stages are cut from, the same for every batch size;
            it is checked before anything runs.
        placement: where the ranks are, as placements are written; ranks are numbered node by node,
            and `stages` must agree with it.
        num_micro_batches: parts of the batch.
        route: which replica computes which samples of a micro-batch: `split` over all by their
            shares, or `round-robin`, whole to one after the other.
        schedule: the name of what ordered the actions: `1f1b`, `gpipe`, `interleaved`,
            `zero-bubble`.
        links: pairs of stages, the earlier first, of which the later reads values of the earlier.
        gradient_links: pairs, the earlier first, of which the earlier reads gradients of the later.
        lags: by stage, how many batches its backward is behind its forward, and so how many updates
            old the weights are that a batch sees there.
        vertical_sync: whether a batch sees weights of one age in all stages.
        static_order: whether every rank keeps the order of its list; otherwise it does whatever is
            ready.
        sync_batch_norm: whether BatchNorm normalises a micro-batch by the statistics of all
            replicas' samples; needs `route` `split`.
        stage_orders: what a stage keeps, repeats, packs and swaps, where memory is limited; stages
            that are not named keep all.
        buckets: gradients that travel together.
        actions: by rank, its full list of actions in order.
        predicted_busy: by rank, the share of the step that it computes in.
    """

    stages: tuple[Stage, ...]
    step_fingerprint: str
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
    buckets: tuple[Bucket, ...] = ()
    actions: tuple[tuple[str, ...], ...]
    predicted_busy: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_1(num_micro_batches=self.num_micro_batches)
        self._check_ranks()
        self._check_stages_named()
        self._check_lags()
        self._check_static_order()
        self._check_actions()

    @property
    def synchronised_stages(self) -> tuple[int, ...]:
        """The stages whose replicas wait for each other inside forward and backward."""
        if not self.sync_batch_norm:
            return ()
        return tuple(index for index, stage in enumerate(self.stages) if len(stage.devices) > 1)

    def _check_ranks(self) -> None:
        """Refuse figures and stages of ranks that have no actions, or that are placed elsewhere."""
        num_ranks = len(self.actions)
        busy, peaks = self.predicted_busy, self.predicted_peak_bytes
        if busy and len(busy) != num_ranks:
            raise ValueError(f"{len(busy)} shares in predicted_busy for {num_ranks} devices")
        for rank, share in enumerate(busy):
            if not 0 <= share <= 1:
                raise ValueError(f"predicted_busy[{rank}] is {share}, must be from 0 to 1")
        if len(peaks) != num_ranks:
            raise ValueError(f"{len(peaks)} predicted peaks for {num_ranks} devices")
        for stage_index, stage in enumerate(self.stages):
            for position, rank in enumerate(stage.devices):
                if rank >= num_ranks:
                    raise ValueError(
                        f"stages[{stage_index}].devices[{position}] is {rank}, but only"
                        f" {num_ranks} devices have actions"
                    )
        if self.placement:
            placement = Placement.parse(self.placement)
            placed = tuple(map(placement.ranks_of, range(len(placement.stages))))
            given = tuple(stage.devices for stage in self.stages)
            if placed != given:
                raise ValueError(
                    f"placement is {self.placement}, so stages are on {placed}, but they have"
                    f" {given}"
                )

    def _check_stages_named(self) -> None:
        """Refuse links, orders and buckets of a stage that is not there."""
        num_stages = len(self.stages)
        for name, links in (("links", self.links), ("gradient_links", self.gradient_links)):
            for position, (early, late) in enumerate(links):
                if not 0 <= early < late < num_stages:
                    raise ValueError(
                        f"{name}[{position}] is {early}, {late}, must lead from a stage to a later"
                        f" one of {num_stages}"
                    )
        for position, order in enumerate(self.stage_orders):
            check_index(f"stage_orders[{position}].stage", order.stage, num_stages)
        for position, bucket in enumerate(self.buckets):
            for index, stage in enumerate(bucket.stages):
                check_index(f"buckets[{position}].stages[{index}]", stage, num_stages)

    def _check_lags(self) -> None:
        """Refuse lags that no order of work has."""
        if self.lags and len(self.lags) != len(self.stages):
            raise ValueError(f"{len(self.lags)} lags for {len(self.stages)} stages")
        if self.lags and self.lags[-1] != 0:
            raise ValueError(
                f"lags ends with {self.lags[-1]}, must be 0: the last stage waits for none"
            )
        for stage, (lag, later) in enumerate(pairwise(self.lags)):
            if not 0 <= lag - later <= 1:
                raise ValueError(
                    f"lags[{stage}] is {lag}, must be that of the next stage, {later}, or one more"
                )

    def _check_static_order(self) -> None:
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

    def _check_actions(self) -> None:
        stages, buckets = (len(self.stages), "stages"), (len(self.buckets), "buckets")
        micro_batches = (self.num_micro_batches, "micro-batches")
        for rank, texts in enumerate(self.actions):
            for position, text in enumerate(texts):
                place = f"actions[{rank}][{position}]"
                try:
                    action = Action.parse(text)
                except ValueError as fault:
                    raise ValueError(f"{place}: {fault}") from None
                indexed = micro_batches if action.kind is not ActionKind.REDUCE else buckets
                for index, (number, word) in ((action.stage, stages), (action.index, indexed)):
                    if index >= number:
                        raise ValueError(f"{place} is {text!r}, but there are only {number} {word}")


Plan = DevicePlan | RankPlan
