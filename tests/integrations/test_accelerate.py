"""Accelerate: the numbers of plain training, predicted next to measured, and refusals."""

import pytest
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import bayplan
from bayplan.data.errors import UsageError
from bayplan.integrations.accelerate import fit


def train(model, dataset, memory=None, accelerator=None, **settings):
    accelerator = accelerator or Accelerator(cpu=True, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(dataset, 256, shuffle=True)
    )
    watch = None
    if memory is not None:
        watch = fit(
            accelerator,
            model,
            loader,
            F.cross_entropy,
            memory=memory,
            optimizer=optimizer,
            time_limit_seconds=1,
        )
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                losses.append(F.cross_entropy(model(x), y))
                accelerator.backward(losses[-1])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return (losses, accelerator.unwrap_model(model).state_dict()), watch


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_same_bits(settings, mixed_precision, network, dataset, assert_bits):
    settings = {**settings, "mixed_precision": mixed_precision}
    plain, _ = train(network(), dataset, **settings)
    model = network()
    planned, watch = train(model, dataset, "70%", **settings)
    assert_bits(plain, planned)
    assert bayplan.plan_of(model).decisions  # something is recomputed or packed
    figures = watch.figures()
    kept = sum(each.nbytes for each in model.parameters()) if len(settings) > 1 else 0
    assert figures["bayplan/predicted_peak_bytes"] == bayplan.plan_of(model).order.peak_bytes + kept
    # All tensors of the process are measured, those of the data set too. The last batch of an epoch
    # is planned when it comes, which leaves a megabyte of Python objects that is of no step.
    expected = figures["bayplan/predicted_peak_bytes"] + sum(x.nbytes for x in dataset.tensors)
    assert figures["bayplan/measured_peak_bytes"] == pytest.approx(expected, abs=400 << 10)
    assert figures["bayplan/measured_seconds"] > 0


def test_gradients_kept_between_batches_are_taken_off_a_limit_in_bytes(network, dataset):
    batch = tuple(each[:256] for each in dataset.tensors)
    plain_bytes = bayplan.capture(network(), batch, F.cross_entropy).num_parameters * 4
    model, limit_bytes = network(), 1 << 20
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    fit(accelerator, accelerator.prepare(model), batch, F.cross_entropy, memory=limit_bytes)
    assert bayplan.plan_of(model).limit_bytes == limit_bytes - plain_bytes


def test_first_samples_are_read_without_a_number_drawn(network, dataset):
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(network(), DataLoader(dataset, 256, shuffle=True))
    before = torch.get_rng_state()
    fit(accelerator, model, loader, F.cross_entropy, memory="100%", measure=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_loader_without_numbered_samples_is_refused(network):
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.randn(32), 0

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(network(), DataLoader(Endless(), 8))
    with pytest.raises(UsageError, match="give a batch as it yields them"):
        fit(accelerator, model, loader, F.cross_entropy, memory="70%")


def test_compiling_accelerator_is_refused(network, dataset):
    accelerator = Accelerator(cpu=True, dynamo_backend="aot_eager")
    model, loader = accelerator.prepare(network(), DataLoader(dataset, 256))
    with pytest.raises(UsageError, match="leave dynamo_backend out"):
        fit(accelerator, model, loader, F.cross_entropy, memory="70%")


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (nn.DataParallel, "copies are not planned"),
        (lambda model: torch.compile(model, backend="eager"), "is compiled"),
        (lambda model: model.compile(backend="eager") or model, "is compiled"),
    ],
)
def test_wrapped_models_are_refused(wrap, says, network, dataset):
    batch = tuple(each[:256] for each in dataset.tensors)
    with pytest.raises(UsageError, match=says):
        fit(Accelerator(cpu=True), wrap(network()), batch, F.cross_entropy, memory="70%")


def test_sharded_models_are_refused(network, dataset, tmp_path):
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    model = fully_shard(network(), mesh=distributed.init_device_mesh("cpu", (1,)))
    batch = tuple(each[:256] for each in dataset.tensors)
    with pytest.raises(UsageError, match="sharded"):
        fit(Accelerator(cpu=True), model, batch, F.cross_entropy, memory="70%")
