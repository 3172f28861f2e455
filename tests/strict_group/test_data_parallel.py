"""Gradients that are averaged and tuned on the strict group, while their sums are late.

Ranks are processes that have the test accelerator registered (`own_process.py`).
"""

import os
import zlib
from contextlib import contextmanager

import pytest
import torch
from strict import late_messages, ranks
from torch import distributed, nn

import bayplan
from bayplan.data.errors import UsageError
from bayplan.running.collectives.data_parallel import exchange_of
from bayplan.running.tuning.search import TuningOptions

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well
TOLERANCE = 1e-12


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 3)).double()


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return inputs.to("bay"), torch.randint(3, (8,), generator=generator).to("bay")


def trained_alone(num_ranks, num_steps):
    """Every rank's part, one after the other, with the mean of their gradients."""
    model = build().to("bay")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        for rank in reversed(range(num_ranks)):  # rank 0's buffers are those that stay
            buffers = {name: one.clone() for name, one in model.named_buffers()}
            inputs, targets = batch_of(rank, step)
            (nn.functional.cross_entropy(model(inputs), targets) / num_ranks).backward()
            if rank:
                model.load_state_dict(buffers, strict=False)
        optimizer.step()
    return model.state_dict()


@contextmanager
def closing(model):
    yield
    exchange_of(model).close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", ["planned", "fusion_threshold=4KiB", "compression=bf16"])
def test_ranks_have_the_mean_of_their_gradients(settings):
    with ranks() as (rank, size), late_messages(0.002):
        model = build().to("bay")
        bayplan.data_parallel(model, settings=settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with closing(model):
            for step in range(5):
                optimizer.zero_grad()
                inputs, targets = batch_of(rank, step)
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            told = exchange_of(model).text()
        wanted, found = trained_alone(size, 5), model.state_dict()
        tolerance = 5e-2 if "bf16" in settings else TOLERANCE
        names = [name for name in wanted if rank == 0 or "running" not in name]
        for name in names:
            torch.testing.assert_close(found[name], wanted[name], rtol=tolerance, atol=tolerance)
        assert "sums were under way for" in told


@pytest.mark.ranks(2)
def test_times_of_sums_are_the_devices_and_not_the_hosts():
    late_seconds = 0.05
    with ranks() as (rank, _):
        model = build().to("bay")
        bayplan.data_parallel(model)
        with closing(model), late_messages(late_seconds):
            inputs, targets = batch_of(rank, 0)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            times = exchange_of(model).times
            # The host has gone on before; to ask is to wait.
            assert all(made.own_seconds >= late_seconds for made in times.sums)
            assert times.exchange_seconds >= late_seconds
            assert float(times.done) - float(times.begun) >= late_seconds
            first, last = min(times.ready_seconds.values()), max(times.ready_seconds.values())
            assert float(times.begun) <= first <= last <= float(times.ended)
            assert exchange_of(model).costs.seconds(4 << 20) > 0


@pytest.mark.ranks(2)
def test_parameters_that_one_rank_does_not_use_have_the_mean_too():
    with ranks() as (rank, _), late_messages(0.002):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).to("bay")
        bayplan.data_parallel(model, check_finite=True)
        with closing(model):
            model["b" if rank else "a"](torch.ones(1, 2, device="bay")).sum().backward()
            grads = {name: one.grad.cpu() for name, one in model.named_parameters()}
            for name in grads:
                assert torch.equal(grads[name], torch.full_like(grads[name], 0.5))


@pytest.mark.ranks(2)
def test_what_would_need_a_thread_is_refused():
    with ranks():
        model = build().to("bay")
        with pytest.raises(UsageError, match=r"cycle_time is 5 ms: .* gloo can bear and strict"):
            bayplan.data_parallel(model, settings="cycle_time=5")
        with pytest.raises(UsageError, match="cannot be summed by reduce_scatter here; there are"):
            bayplan.data_parallel(model, settings="algorithm=reduce_scatter")


@pytest.mark.ranks(2)
def test_the_exchange_is_tuned_and_numbers_stay(tmp_path):
    os.environ["BAYPLAN_CACHE"] = str(tmp_path)
    with ranks() as (rank, size), late_messages(0.001):
        model = build().to("bay")
        bayplan.data_parallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        tuning = bayplan.tune(model, is_fresh=True, options=TuningOptions(most_steps=60))
        with closing(model):
            number = 0
            while not tuning.is_finished:
                with tuning.step():
                    optimizer.zero_grad()
                    inputs, targets = batch_of(rank, number)
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
                number += 1
            own = torch.tensor([zlib.crc32(str(tuning.settings).encode())], device="bay")
            of_all = [torch.empty_like(own) for _ in range(size)]
            distributed.all_gather(of_all, own)
            assert len({each.item() for each in of_all}) == 1
            tuning.close()
        wanted, found = trained_alone(size, number), model.state_dict()
        for name in wanted:
            if rank == 0 or "running" not in name:
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-9)
