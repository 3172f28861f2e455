"""The best plan for VGG16 on the reports' eight TITAN V, with the constants fitted to their rows.

All of it is simulated: nobody has run these plans there.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from published.captured import Parts, capture_stage, profiled_device, seconds_of, whole_step
from published.constants import Constants
from published.rows import iterations_of
from published.simulating import UPDATE_PASSES, with_rates
from reports_000_002.rows import RUNS

from bayplan.costing.catalogue import read_cluster
from bayplan.data.chain import Chain, Layer
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind, OpClass
from bayplan.planning.clusters.planner import ClusterPlan, plan_on
from bayplan.planning.clusters.split import Training
from bayplan.tracing.stages.staged import StagedStep

__all__ = ["best_plans", "chain_of", "places_to_cut"]

MODEL = "vgg16"
_RUN = next(run for run in RUNS if run.name == "OneFlow VGG16, 11:7")
# Before what a stage may begin with; a ReLU belongs to what it follows.
_BEGINNINGS = ("convolution", "max_pool2d", "addmm", "_adaptive_avg_pool2d", "mean")
_FEW, _SAMPLES = 8, 32  # that costs are known of; the more are those of a replica in the reports
_SPREAD = 0.08  # what the rows are off by on average, and more


def places_to_cut(model: str) -> tuple[int, ...]:
    """The forward operators that a stage may begin with."""
    step = StagedStep(whole_step(model, 2), (0,)).step
    names = [op.name for op in step.program.ops[: step.program.first_backward - 1]]
    return (0, *(at for at, name in enumerate(names) if at and name.startswith(_BEGINNINGS)))


def chain_of(model: str, constants: Constants, firsts: tuple[int, ...]) -> Chain:
    """A model as OneFlow would run it on one host: every place to cut begins a layer."""
    device = profiled_device()
    layers = []
    for at in range(len(firsts)):
        few, stage = (
            capture_stage(model, firsts, at, samples, device) for samples in (_FEW, _SAMPLES)
        )
        forward, fixed_forward = _line(few.forward, stage.forward, device, constants)
        backward, fixed_backward = _line(few.backward, stage.backward, device, constants)
        layers.append(
            Layer(
                name=f"{at}",
                forward_seconds=forward,
                backward_seconds=backward,
                fixed_forward_seconds=fixed_forward,
                fixed_backward_seconds=fixed_backward,
                parameter_bytes=stage.parameter_bytes,
                held_bytes=stage.held_bytes,
                passing_bytes=max(0, stage.passing_bytes),
                sent_bytes=stage.sent_bytes,
            )
        )
    return Chain(
        name=model,
        num_samples=_SAMPLES,
        layers=tuple(layers),
        device="titan-v",
        source="derived: PipeDream's V100 profiles, factors fitted to reports 000 to 002",
        spread=_SPREAD,
    )


def _line(
    few: Sequence[Parts], many: Sequence[Parts], device: DeviceKind, constants: Constants
) -> tuple[float, float]:
    """Seconds of all samples, and of these what does not grow with them.

    That is the traffic of weights and the launch of every operator. That small batches fill a
    device less is not known, so micro-batches of a few samples are priced too low.
    """
    factors = (constants.compute_factor, constants.memory_factor)
    low, high = seconds_of(few, *factors), seconds_of(many, *factors)
    fixed = max(0.0, high - (high - low) * _SAMPLES / (_SAMPLES - _FEW))
    launches = len(many) * device.launch_seconds.value
    return high + launches, fixed + launches


def best_plans(constants: Constants) -> list[dict[str, Any]]:
    """With weights that are always fresh, and with those of the first stages a step old."""
    cluster = with_rates(read_cluster("titanv-8"), constants)
    chain = chain_of(MODEL, constants, places_to_cut(MODEL))
    told = [
        row.epoch_seconds for row in _RUN.reported if row.data == "synthetic" and row.epoch_seconds
    ]
    best_reported = min(told)
    found = []
    for staleness in (0, 1):
        plan = plan_on(
            chain,
            cluster,
            _RUN.batch,
            training=_training(cluster, constants),
            staleness=staleness,
        )
        found.append(_described(plan, staleness, best_reported))
    return found


def _training(cluster: Cluster, constants: Constants) -> Training:
    kind = cluster.kind_of(0)
    rate = (
        kind.bandwidth_bytes_per_s.value * profiled_device().efficiency[OpClass.ELEMENTWISE].value
    )
    return Training(
        state_per_parameter=1.0,  # momentum
        update_seconds_per_byte=UPDATE_PASSES / rate * constants.memory_factor,
        bucket_bytes=16 * 2**20,
        link_spread=_SPREAD,
    )


def _described(plan: ClusterPlan, staleness: int, best_reported: float) -> dict[str, Any]:
    iterations = iterations_of(_RUN, is_real=False)
    judged, split = plan.best.judgement, plan.best.split
    epoch = iterations * judged.seconds
    return {
        "model": MODEL,
        "batch": _RUN.batch,
        "source": "simulated",
        "staleness": staleness,
        "name": plan.best.name,
        "stages": [
            {"layers": [stage.first, stage.last], "devices": list(stage.devices)}
            for stage in split.stages
        ],
        "micro_batches": split.num_micro_batches,
        "schedule": split.schedule,
        "lags": list(split.lags),
        "epoch_seconds": epoch,
        "low_epoch_seconds": iterations * judged.low_seconds,
        "high_epoch_seconds": iterations * judged.high_seconds,
        "best_reported_epoch_seconds": best_reported,
        "speedup_over_best_reported": best_reported / epoch,
        "binding": str(judged.binding),
        "largest_device_mib": max(stage.memory.total_bytes for stage in judged.stages) / 2**20,
        "alternatives": [
            {"name": one.name, "epoch_seconds": iterations * one.judgement.seconds}
            for one in plan.alternatives
            if one.is_possible
        ],
        "judgement": msgspec.to_builtins(judged),
    }
