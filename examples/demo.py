"""The main job in one minute: predict ResNet-50's training step, then train and compare.

Nothing is allocated for the prediction of memory; the profile that prices time and kernels' scratch
memory is measured at a quarter of the batch. Then a few real steps are recorded.
"""

import torch

import bayplan
from bayplan.data.units import format_bytes, format_seconds
from bayplan.models import load
from bayplan.reporting.text import comparison_text, record_text
from bayplan.training import TrainingStep

BATCH, PROFILED_BATCH, STEPS = 8, 2, 4


def main() -> None:
    torch.manual_seed(0)
    model, batch, loss_fn = load("resnet50")(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    print(f"capturing one training step of resnet50, batch {BATCH} …", flush=True)
    graph = bayplan.capture(model, batch, loss_fn, optimizer=optimizer, name="resnet50")
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer)
    print(f"  {len(graph.nodes)} operators, {graph.num_parameters:,} parameters")

    print(f"measuring its operators at batch {PROFILED_BATCH} …", flush=True)
    small = load("resnet50")(PROFILED_BATCH)[1]
    small_graph = bayplan.capture(model, small, loss_fn, optimizer=optimizer, name="resnet50")
    profile = bayplan.profile(model, small, loss_fn, optimizer=optimizer, name="resnet50")
    print(f"  {format_seconds(profile.step_seconds)} per step at batch {PROFILED_BATCH}")
    del small

    predicted = bayplan.simulate(graph, bayplan.scale(profile, small_graph, graph, step=step))
    print(f"predicted for batch {BATCH}: peak {format_bytes(predicted.peak_bytes)}")
    print(record_text(predicted))

    print(f"training {STEPS} steps for real …", flush=True)
    with bayplan.record() as recording:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            print(f"  loss {loss.item():.4f}", flush=True)
    print(comparison_text(predicted, recording.result))


if __name__ == "__main__":
    main()
