"""Options about many ranks, and the commands' part that is about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bayplan.cli.options import as_json
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.data.placement import Placement
    from bayplan.data.plan import RankPlan
    from bayplan.planning.pipelines.placing import RankPlanOptions
    from bayplan.running.swaps.swap_space import SwapSpace

__all__ = [
    "IMAGENET_SAMPLES",
    "RANKS_HELP",
    "RankOptions",
    "check_local_run",
    "plan_for_ranks",
    "refuse_beside_placement",
    "run_plan_on_ranks",
]

IMAGENET_SAMPLES = 1_281_167  # what an epoch is in most published tables

RANKS_HELP = """\
On many ranks: --placement 0:0-6.0:7 puts the first stage on devices 0 to 6 of node 0 and the
second on device 7; a stage after each dot, several nodes by commas (0:0-7,1:0-7.0:0-7,1:0-7), and
'' for data parallel on --ranks devices. Stages are cut by --shares of measured time (11:7), of
operators as OneFlow does (--shares-by ops) or of parameters, or at modules (--cut-at layer3).
Gradients are those of one device, whatever the numbers of replicas."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What may be said about a plan for many ranks."""

    placement: Annotated[
        str | None,
        Parameter(help="Devices of each stage, like 0:0-6.0:7; '' for data parallel. See below."),
    ] = None
    ranks: Annotated[
        int | None, Parameter(help="How many devices '' means. Default: one for each core here.")
    ] = None
    shares: Annotated[
        str | None, Parameter(help="How much each stage gets, like 11:7. Default: equal.")
    ] = None
    shares_by: Annotated[str, Parameter(help="Shares of what: time, ops or parameters.")] = "time"
    cut_at: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Instead of shares: modules that later stages begin with."),
    ] = ()
    micro_batches: Annotated[int, Parameter(help="Parts of the batch that follow each other.")] = 1
    schedule: Annotated[
        str,
        Parameter(help="The order of work: 1f1b, gpipe, interleaved, zero-bubble, one-by-one."),
    ] = "1f1b"
    route: Annotated[
        str, Parameter(help="Replicas split each micro-batch, or take turns: split, round-robin.")
    ] = "split"
    depth: Annotated[
        int, Parameter(help="More than 1 lets more micro-batches be in flight, for uneven times.")
    ] = 1

    staleness: Annotated[
        int,
        Parameter(
            help="Let batches overlap: a batch may see weights that are so many updates old. The"
            " numbers are then not those of one device."
        ),
    ] = 0
    versions: Annotated[
        str | None,
        Parameter(help="The same by stage, as versions of its weights in use at once, like 2:1."),
    ] = None
    vertical_sync: Annotated[
        bool, Parameter(negative="", help="A batch sees weights of one age in all stages.")
    ] = False
    static_order: Annotated[
        bool,
        Parameter(
            help="Ranks keep the order that is planned; --no-static-order lets each do whatever is"
            " ready, within what is planned to be in flight."
        ),
    ] = True
    sync_batch_norm: Annotated[
        bool,
        Parameter(
            negative="",
            help="BatchNorm's statistics are those of all replicas' samples, of each micro-batch.",
        ),
    ] = False

    buckets: Annotated[
        Path | None,
        Parameter(
            help="Gradients that travel together, by a file of `bayplan tune`. Default: planned."
        ),
    ] = None

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
        if self.placement is None and self != RankOptions():
            raise UsageError(
                "these options are about many ranks; say where, with --placement, or with --cluster"
            )
        return self.placement is not None

    def plan_options(
        self,
        optimizer: str,
        *,
        pack: bool = True,
        space: "SwapSpace | None" = None,
        max_swap_bytes: int | None = None,
        time_limit: float = 10.0,
    ) -> "RankPlanOptions":
        """The same, understood, with what one device's plans may be told as well."""
        from bayplan.data import files
        from bayplan.data.exchange import BucketFile
        from bayplan.data.placement import Placement
        from bayplan.data.plan import Route
        from bayplan.data.units import parse_bytes
        from bayplan.planning.clusters.split import state_per_parameter
        from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy

        assert self.placement is not None, "see `is_given`"
        return RankPlanOptions(
            placement=Placement.parse(self.placement, num_devices=self._num_devices()),
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

    def _num_devices(self) -> int | None:
        if self.placement:
            return None
        if self.ranks is not None:
            return self.ranks
        import os

        return len(os.sched_getaffinity(0))


def refuse_beside_placement(**given: object) -> None:
    """Refuse options of one device's plans, by name, rather than pass over them."""
    for name, value in given.items():
        if value:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} is about one device; leave it out, or leave out --placement"
                + ("; a limit for each rank is --memory-per-rank" if name == "memory" else "")
            )


def _parsed_numbers(option: str, text: str | None, example: str) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(":")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"{option} is {text!r}; write whole numbers from 1 on, like {example}")
    return tuple(map(int, parts))


def _one_of(option: str, word: str, known: list[str]) -> str:
    from bayplan.data.errors import did_you_mean

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
    swap_dir: Path | None = None,
    swap_size: str | None = None,
    pack: bool = True,
    time_limit: float = 10.0,
    is_local: bool = False,
) -> "RankPlan":
    """RankPlan a target for many ranks, of this machine only where that is asked for."""
    if options.memory_per_rank is None:
        for name, is_given in (
            ("--swap-dir", swap_dir is not None or swap_size is not None),
            ("--no-pack", not pack),
        ):
            if is_given:
                raise UsageError(f"{name} is about a limit; give one with --memory-per-rank")
    from bayplan.api import swap_space

    space = swap_space(swap_dir, swap_size)
    plan_options = options.plan_options(optimizer, pack=pack, space=space, time_limit=time_limit)
    if len(plan_options.placement.places) < 2:
        raise UsageError(
            f"placement {plan_options.placement} is one device, which needs no ranks; leave out"
            " --placement, or name two devices or more"
        )
    if is_local:
        check_is_local(plan_options.placement)
    from bayplan import api
    from bayplan.prepared_step import prepare
    from bayplan.reporting.progress import ProgressBar

    with ProgressBar() as bar:
        step = prepare(target, batch, optimizer=optimizer, autocast=autocast)
        return api.plan_for_ranks(step, plan_options, on_progress=bar)


def check_is_local(placement: "Placement") -> None:
    """Refuse to start ranks of other machines here."""
    counts = placement.devices_per_node
    if len(counts) > 1:
        each = max(counts)
        raise UsageError(
            f"placement {placement} names {len(counts)} nodes, but `bayplan run` starts ranks of"
            " this machine, which is node 0; on several, write the plan to a file with `bayplan"
            f" plan` and start torchrun --nnodes {len(counts)} --nproc-per-node {each} on each"
        )


def check_local_run(
    plan: "RankPlan", target: str | None, *, swap_dir: Path | None, swap_size: str | None
) -> None:
    """Refuse, before a process is started, what every one of them would refuse."""
    from bayplan.data.placement import Placement
    from bayplan.data.units import parse_bytes
    from bayplan.prepared_step import step_of_plan
    from bayplan.running.ranks.local_run import check_room
    from bayplan.simulating.checking import check_rank_plan

    if plan.placement:
        check_is_local(Placement.parse(plan.placement))
    check_rank_plan(plan)
    step_of_plan(plan, target=target)
    check_room(plan, swap_dir, swap_bytes=None if swap_size is None else parse_bytes(swap_size))


def run_plan_on_ranks(
    plan: "RankPlan",
    *,
    steps: int,
    target: str | None,
    output: Path | None,
    logs: Path,
    seed: int,
    swap_dir: Path | None = None,
    swap_size: str | None = None,
    epoch_samples: int,
    histogram: bool = False,
    json: bool,
) -> int:
    """Carry a plan out on ranks of this machine, and show what each did; also after Ctrl-C."""
    from bayplan.data import files
    from bayplan.data.units import parse_bytes
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.ranks import exchange_text, pipeline_text, ranks_text
    from bayplan.running.ranks.local_run import INTERRUPTED, run_on_ranks

    with ProgressBar() as bar:
        for line in pipeline_text(plan).splitlines():
            bar.say(line)
        bar.say(f"starting {len(plan.actions)} processes, which trace and compile their stages")
        done = run_on_ranks(
            plan,
            num_steps=steps,
            log_folder=logs,
            target=target,
            seed=seed,
            swap=swap_dir,
            swap_bytes=None if swap_size is None else parse_bytes(swap_size),
            epoch_samples=epoch_samples,
            on_line=bar.say,
            on_step=lambda step: bar.tell(str(step), step.done, step.total),
        )
    if done.measured is None:
        if done.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(f"logs of all ranks are in {logs}")
        return done.exit_code
    if output is not None:
        files.write(output, done.measured)
    if json:
        print(as_json(done.measured))
    else:
        print(f"losses {', '.join(f'{loss:.4f}' for loss in done.measured.losses)}")
        print(ranks_text(done.measured))
        if histogram:
            print(exchange_text(done.measured))
        print(f"logs of all ranks are in {logs}")
    if done.exit_code == INTERRUPTED:
        num_steps = len(done.measured.step_seconds)
        raise KeyboardInterrupt(f"the figures are those of {num_steps} of {steps} steps")
    return done.exit_code
