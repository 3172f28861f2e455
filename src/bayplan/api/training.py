"""Verbs that train: `fit`, `run`, and `record` of a loop that is there."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bayplan.api.plans import swap_space
from bayplan.data.errors import PlanBroken, UsageError
from bayplan.data.placement import Placement
from bayplan.data.plan import DevicePlan, Plan, RankPlan
from bayplan.data.profile import Clock
from bayplan.data.record import DataPosition, RunRecord
from bayplan.data.units import Limit, Progress, no_progress, parse_bytes
from bayplan.devices.choosing import device_for_ranks
from bayplan.devices.device import Device
from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import device_of_training
from bayplan.preparing.sources import planned_on, prepare, step_of_plan
from bayplan.reporting.log import say, speaks_by_default
from bayplan.reporting.plans import busy_text, fit_line, short_text
from bayplan.reporting.progress import ProgressBar
from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions
from bayplan.running.fitted import fit as fit_model
from bayplan.running.fitted import plans_of
from bayplan.running.inputs.feed import FeedOptions
from bayplan.running.inputs.sources import Data, open_data
from bayplan.running.inputs.training import check_data
from bayplan.running.ranks.failures import write_line
from bayplan.running.ranks.local_run import check_room, run_on_ranks
from bayplan.running.recorder import Recorder
from bayplan.running.runner import run_plan
from bayplan.simulating.checking import check_rank_plan
from bayplan.step import Batch, LossFunction
from bayplan.tracing.fake import OptimizerSource

__all__ = ["check_rank_run", "fit", "plan_of", "record", "run"]


def fit(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    memory: str | int | Limit,
    limit_counts: str | None = None,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    swap: Path | str | None = None,
    pack: bool = True,
    update_in_backward: bool = False,
    fullgraph: bool = False,
    time_limit_seconds: float = 10.0,
    again: bool = False,
    progress: bool | None = None,
    on_progress: Progress = no_progress,
) -> nn.Module:
    """Make a model's training step fit a memory limit; returns the same module.

    Parameters, `state_dict` and your own loop stay as they are, and so do all numbers: losses,
    gradients and buffers come out bit for bit as before. Calls of the module run as planned; a
    batch of another size is planned anew when it first comes. Hooks are called as ever; see
    `docs/loops.md` for what planning makes of loops.

    It says in one line what came of it: through the logger `bayplan` where logging is set up, else
    on stderr. `plan_of` tells all of it.

    Args:
        model: will be changed in place, as by its own `compile`.
        batch, loss_fn: as for `capture`.
        memory: the limit for the whole step: `8GiB`, bytes, or a share of the plain peak, `40%`.
        limit_counts: which bytes that is, as for `check`.
        optimizer: the one you train with, so that its state is counted; or as for `check`.
        autocast: dtype of mixed precision that you call the model under, or `bf16`, `fp16`.
        swap: a directory for activations that pay to be swapped; None swaps nothing.
        pack: whether activations may be packed, without loss.
        update_in_backward: whether each parameter is updated as soon as its gradient is complete,
            so that gradients are never all there at once. Needs the optimizer itself, whose
            `step()` then only ends the step. Not for loops that clip, scale, accumulate or log
            gradients: an applied `.grad` refuses to be computed with.
        fullgraph: whether to refuse a forward that torch cannot trace as one graph. Otherwise it
            is planned as its pieces together, within one limit, without swaps; a warning says so.
        time_limit_seconds: for the search.
        again: measures and plans anew, and replaces what the cache has of this step.
        progress: whether to say anything: a bar where stderr is a terminal, and the line at the
            end. None says it unless `BAYPLAN_LOG=off`, and on rank 0 alone.
        on_progress: hears what is being done.

    Raises:
        DoesNotFit: says what binds and the smallest limit that works.

    Example:
        >>> layers = [torch.nn.Linear(64, 64) for _ in range(6)]
        >>> model, batch = torch.nn.Sequential(*layers), torch.ones(2048, 64)
        >>> loss_fn = lambda y: y.square().mean()
        >>> model = fit(model, batch, loss_fn, memory="90%", time_limit_seconds=1)
        >>> model(batch).square().mean().backward()
    """
    started = time.perf_counter()
    speaks = progress if progress is not None else speaks_by_default() and not _is_other_rank()
    with ProgressBar(is_shown=speaks) as bar:

        def tell(what: str, done: int, total: int) -> None:
            bar(what, done, total)
            on_progress(what, done, total)

        fitting = fit_model(
            model,
            batch,
            loss_fn,
            memory=memory,
            limit_counts=limit_counts,
            optimizer=optimizer,
            autocast=autocast,
            swap=swap,
            pack=pack,
            update_in_backward=update_in_backward,
            fullgraph=fullgraph,
            time_limit_seconds=time_limit_seconds,
            again=again,
            on_progress=tell,
        )
    if speaks and fitting.pieces is None and fitting.plans:  # else a warning has said it
        seconds = time.perf_counter() - started
        plan = plan_of(model)
        say(fit_line(plan, seconds=seconds, is_kept=fitting.decide.took_kept))
        say(busy_text(plan.order.price_spread, "again=True"), is_warning=True)
        say(short_text(plan.order.plain_seconds))
    return model


def _is_other_rank() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_rank() > 0


def plan_of(model: nn.Module, *, number: int = 0) -> DevicePlan:
    """The plan that a model runs since `fit`, for `explain` or to look at its figures.

    Its `order` has the predicted `peak_bytes`, `seconds` of forward and backward, `time_ratio` and
    `time_ratio_spread`. What loss and update take is not measured by `fit`, so `predicted_seconds`
    is 0.

    Args:
        model: fitted.
        number: 0 for the batch that it was fitted to; 1 and on for batches of other sizes, in the
            order in which they came.

    Raises:
        UsageError: the model was not fitted, or has fewer plans.
    """
    plans = plans_of(model)
    if not 0 <= number < len(plans):
        raise UsageError(f"no plan {number}: the model has {len(plans)}, counted from 0")
    return plans[number]


def run(
    plan: Plan,
    model: nn.Module | str | None = None,
    batch: Batch = None,
    loss_fn: LossFunction = None,
    *,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    num_steps: int | None = None,
    data: Path | str | None = None,
    epochs: int | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    swap: Path | str | None = None,
    swap_size: str | int | None = None,
    logs: Path | str | None = None,
    seed: int = 0,
    on: str | torch.device | None = None,
    checkpoint: Path | str | None = None,
    every: int = 50,
    keep: int = 2,
    resume: bool = False,
    on_progress: Progress = no_progress,
) -> RunRecord:
    """Train exactly as a plan says, and return what was measured.

    Args:
        plan: for one device, or for ranks of this machine, each of which is a process.
        model: the module that a plan for one device was made for; or, for a plan that names a
            function of your own, that target. Reference models are built by name.
        batch, loss_fn, optimizer, autocast: of that module, as when it was planned.
        num_steps: after one to warm up, 5 by default. With data, the steps of the run.
        data: to train on: a folder of images, tar shards or tokens, or `synthetic:1281167`. By
            default every step has the batch that came with the model.
        epochs: passes over the data; with `num_steps`, what comes first ends the run.
        workers: processes that read samples; None for as many as seem right.
        skip_unreadable: gives the place of a sample that cannot be read to another one.
        swap: a directory for what the plan swaps.
        swap_size: the largest swap file.
        logs: the folder for the log of each rank; by default logs of a failed run are kept, in a
            temporary one.
        seed: of every rank, and of a target; a module of yours is taken as it is.
        on: a device of this machine to run a target on; by default the one that it was planned for.
        checkpoint: a folder to save the training into. All steps since its beginning then count.
        every, keep: steps between two checkpoints, and how many stay.
        resume: go on from the newest whole one, if there is one, whichever plan saved it.
        on_progress: hears of each step.

    Raises:
        ForeignPlan: the plan is for another step or machine.
        PlanBroken: the run was above its limit, far from the prediction, or a rank failed.
    """
    target = model if isinstance(model, str) else None
    opened = None if data is None else open_data(str(data))
    options = FeedOptions(
        epochs=epochs,
        steps=num_steps,
        workers=workers,
        skip_unreadable=skip_unreadable,
        position=DataPosition(seed=seed),
    )
    num_steps = 5 if num_steps is None else num_steps
    saves = None
    if checkpoint is not None:
        saves = CheckpointOptions(folder=Path(checkpoint), every=every, keep=keep, resume=resume)
        if saves.is_done(num_steps if opened is None else options.steps, options.epochs):
            raise UsageError(f"{checkpoint} has a checkpoint of the last step; train for more")
    if isinstance(plan, RankPlan):
        if isinstance(model, nn.Module):
            raise UsageError(
                "a plan for ranks is run by processes that build their model themselves; name it as"
                " module:function, or use bayplan.bind under torchrun"
            )
        max_bytes = None if swap_size is None else parse_bytes(swap_size)
        folder = None if swap is None else Path(swap)
        device = check_rank_run(
            plan, target, swap=folder, swap_bytes=max_bytes, on=on, data=opened, feed=options
        )
        lines: list[str] = []
        done = run_on_ranks(
            plan,
            num_steps=num_steps,
            log_folder=None if logs is None else Path(logs),
            target=target,
            seed=seed,
            device=device,
            swap=folder,
            swap_bytes=max_bytes,
            checkpoints=saves,
            data=opened,
            options=options,
            on_line=lines.append,
            on_step=lambda step: on_progress(str(step), step.done, step.total),
        )
        if done.measured is None:
            where = [] if logs is None else [f"logs of all ranks are in {logs}"]
            raise PlanBroken("\n".join([*lines[-4:], *where, "the run failed"]))
        return done.measured
    if isinstance(model, nn.Module):
        prepared = prepare(model, batch, loss_fn, optimizer=optimizer, autocast=autocast)
    else:
        prepared = step_of_plan(plan, target=target, on=on)
    done = run_plan(
        plan,
        prepared,
        num_steps=num_steps,
        seed=None if isinstance(model, nn.Module) else seed,
        space=swap_space(swap, swap_size, device=prepared.model_device),
        on_step=lambda step: on_progress(str(step), step.done, step.total),
        data=opened,
        options=options,
        checkpoints=saves,
        tell=write_line,
    )
    if done.stopped_by:
        raise KeyboardInterrupt(f"the run ended after {len(done.losses)} steps")
    done.check(plan)
    return done.measured


def check_rank_run(
    plan: RankPlan,
    target: str | None,
    *,
    swap: Path | None,
    swap_bytes: int | None,
    on: str | torch.device | None = None,
    data: Data | None = None,
    feed: FeedOptions | None = None,
) -> Device:
    """Refuse, before a process is started, what every rank would refuse; returns where they run."""
    check_rank_plan(plan)
    if plan.placement:
        Placement.parse(plan.placement).check_is_local()
    step = step_of_plan(plan, target=target)
    check_data(data, step, feed or FeedOptions())
    device = device_for_ranks(planned_on(plan, on), len(plan.actions))
    check_room(plan, swap, swap_bytes=swap_bytes, device=device)
    return device


def record(
    path: Path | str | None = None,
    *,
    device: torch.device | str | None = None,
    curve: bool = False,
    clock: Clock | str = Clock.WALL,
) -> Recorder:
    """Measure an existing training loop: `with bayplan.record("run.json"): ...`.

    Args:
        path: where the record is written when the block is left, also by Ctrl-C; None for nowhere.
        device: whose memory; by default the one that most parameters are on; before any are made,
            the accelerator if there is one.
        curve: also record live bytes over time (CPU only), at a higher cost.
        clock: of the step times; `cpu` is the processor time of the whole process.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1000))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with record() as recording:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         weight.square().sum().backward()
        ...         optimizer.step()
        >>> len(recording.result.step_seconds)
        3
    """
    return Recorder(
        path,
        cache=cache_directory(),
        device=device_of_training() if device is None else torch.device(device),
        curve=curve,
        clock=Clock.parse(clock),
    )
