"""The main job in two minutes: predict ResNet-50's training step, train it, make it fit in less.

Nothing is allocated for the prediction of memory; the profile that prices time and kernels' scratch
memory is measured at a quarter of the batch. Then a few real steps are recorded, plain and planned
within 60 % of the plain peak, from the same start: the losses are the same to the last bit. The
plan, and what else there was to choose from, is drawn in `report.html`.
"""

from collections.abc import Callable

import torch
from torch import nn

import bayplan
from bayplan.data.units import format_bytes, format_seconds
from bayplan.models import load
from bayplan.reporting.text import comparison_text, record_text
from bayplan.step import TrainingStep

BATCH, PROFILED_BATCH, STEPS, SHARE = 8, 2, 4, 0.6


def main() -> None:
    model, batch, loss_fn, optimizer = build()
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer)

    print(f"capturing one training step of resnet50, batch {BATCH} …", flush=True)
    graph = bayplan.capture(model, batch, loss_fn, optimizer=optimizer, name="resnet50")
    print(f"  {len(graph.nodes)} operators, {graph.num_parameters:,} parameters")

    print(f"measuring its operators at batch {PROFILED_BATCH} …", flush=True)
    small = load("resnet50")(PROFILED_BATCH)[1]
    small_graph = bayplan.capture(model, small, loss_fn, optimizer=optimizer, name="resnet50")
    profile = bayplan.profile(model, small, loss_fn, optimizer=optimizer, name="resnet50")
    print(f"  {format_seconds(profile.step_seconds)} per step at batch {PROFILED_BATCH}")
    del small

    predicted = bayplan.simulate(graph, bayplan.scale(profile, small_graph, graph, step=step))
    print(record_text(predicted))
    print(f"training {STEPS} steps for real …", flush=True)
    plain_losses, plain = train(model, batch, loss_fn, optimizer)
    print(comparison_text(predicted, plain))

    limit_bytes = int(SHARE * plain.steady_peak_bytes)
    print(f"\nplanning for {format_bytes(limit_bytes)}, {SHARE:.0%} of that …", flush=True)
    del model, batch, optimizer, step
    model, batch, loss_fn, optimizer = build()
    bayplan.check(
        model, batch, loss_fn, memory=limit_bytes, optimizer=optimizer, report="report.html"
    )
    bayplan.fit(model, batch, loss_fn, memory=limit_bytes, optimizer=optimizer)
    losses, planned = train(model, batch, loss_fn, optimizer)
    peak = format_bytes(planned.steady_peak_bytes)
    ratio = planned.typical_step_seconds / plain.typical_step_seconds
    print(f"peak {peak} of {format_bytes(limit_bytes)} at {ratio:.2f} x the time")
    print("losses are the same" if losses == plain_losses else "losses differ: this is a bug")
    print("pictures of all this: open report.html")


def build() -> tuple:
    """The same model, batch, loss and optimizer every time."""
    torch.manual_seed(0)
    model, batch, loss_fn = load("resnet50")(BATCH)
    return model, batch, loss_fn, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(
    model: nn.Module, batch: tuple, loss_fn: Callable, optimizer: torch.optim.Optimizer
) -> tuple[list[float], bayplan.RunRecord]:
    """The loop of any training script, recorded but for its first step, which warms kernels up."""
    losses = []

    def one_step() -> None:
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    one_step()
    with bayplan.record() as recording:
        for _ in range(STEPS - 1):
            one_step()
    print("  losses " + ", ".join(f"{loss:.4f}" for loss in losses), flush=True)
    return losses, recording.result


if __name__ == "__main__":
    main()
