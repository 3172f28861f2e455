"""Where a step runs, where there is no accelerator."""

import pytest
import torch
from torch import nn

import bayplan
from bayplan.data.errors import UsageError
from bayplan.devices.choosing import chosen_device, device_for_ranks, is_chosen
from bayplan.devices.device import HOST, accelerators_here

if accelerators_here():
    pytest.skip("there is an accelerator", allow_module_level=True)


@pytest.mark.parametrize("on", [None, "auto", "cpu", torch.device("cpu")])
def test_the_host_is_chosen(on):
    assert chosen_device(on) is device_for_ranks(on, 1000) is HOST
    assert is_chosen(on) is (on not in (None, "auto"))


@pytest.mark.parametrize(
    ("on", "why"),
    [
        ("cuda", "no cuda device here, only cpu: torch .* is built without CUDA; install a wheel"),
        ("cuda:3", "--on cuda:3: there is no cuda device here"),
        (
            "xpu",
            "no xpu device here, only cpu: torch .* built without it, or its driver finds none",
        ),
        ("meta", "no meta device here"),
        ("gpu", "torch knows no such device; write auto, cpu, cuda, cuda:1"),
        ("", "torch knows no such device"),
    ],
)
def test_what_is_not_here_is_refused(on, why, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match=why):
        chosen_device(on)


def test_a_wheel_with_cuda_that_finds_no_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(UsageError, match="torch finds no GPU; look at `nvidia-smi`"):
        chosen_device("cuda")


def test_parameters_on_meta_cannot_run_but_can_be_asked_about():
    model, batch = nn.Linear(4, 4, device="meta"), torch.ones(2, 4)
    with pytest.raises(UsageError, match=r"2 parameters are on meta, .* \(weight is the first\)"):
        bayplan.check(model, batch, lambda output: output.sum())
    assert bayplan.check(model, batch, lambda output: output.sum(), device="h100").fits
