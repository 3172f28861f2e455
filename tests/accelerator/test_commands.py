"""Commands and verbs where there is an accelerator: they run on it, and on another if told to.

Each test runs in a process that has the test accelerator registered (`own_process.py`).
"""

import io
import json
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import bay
import pytest
import torch
from device_here import DEVICE, KIND, LAST, tell
from torch import nn

import bayplan
from bayplan.cli import main
from bayplan.costing import probe
from bayplan.costing.catalogue import read_cluster
from bayplan.data.errors import OutOfMemory, UsageError
from bayplan.data.files import read
from bayplan.data.units import parse_bytes
from bayplan.devices.device import device_of
from bayplan.models.targets import resolve_target

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well

NAME = "Bay test accelerator"
TARGETS = """
import numpy
import torch
from torch import nn


def build(batch_size=64):
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 10))
    images = torch.from_numpy(numpy.ones((batch_size, 64), numpy.float32))
    batch = images, torch.arange(batch_size) % 10
    return model, batch, nn.CrossEntropyLoss(weight=torch.ones(10, device="cpu"))


def on_second():
    return nn.Linear(4, 4).to("bay:1"), torch.ones(2, 4), lambda output: output.sum()


def on_both():
    model = nn.Sequential(nn.Linear(4, 4).to("bay:0"), nn.Linear(4, 4).to("bay:1"))
    return model, torch.ones(2, 4), lambda output: output.sum()


def on_meta():
    return nn.Linear(4, 4, device="meta"), torch.ones(2, 4), lambda output: output.sum()


def large():
    return nn.Linear(2**13, 2**13), torch.ones(2, 2**13), lambda output: output.sum()
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def command(*words: object) -> Outcome:
    """Run a command in a folder that has the targets."""
    (Path.cwd() / "train.py").write_text(TARGETS)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def settle(tmp_path: str) -> None:
    os.chdir(tmp_path)
    sys.modules.pop("train", None)
    torch.compiler.reset()


@pytest.mark.gpu
def test_a_plan_is_made_and_run_on_the_accelerator(tmp_path):
    settle(tmp_path)
    name = device_of(DEVICE).name
    asked = ("train:build", "--memory", "90%", "-o", "a.json", "--time-limit", 1)
    asked += ("--limit-counts", "live", "--on", "auto")
    assert command("plan", *asked).code == 0
    plan = json.loads(Path("a.json").read_text())
    assert plan["cluster_fingerprint"] == name
    asked = ("--target", "train:build", "--steps", 2, "-o", "run.json", "--on", "auto")
    done = command("run", "a.json", *asked)
    assert "predicted" in done.out, done.err
    record = read("run.json", bayplan.RunRecord)
    (peak,) = plan["predicted_peak_bytes"]
    tell("peak of a run", predicted=peak, measured=record.steady_peak_bytes)
    seconds = plan["predicted_seconds"], record.typical_step_seconds
    tell("seconds of a step", predicted=seconds[0], measured=seconds[1])
    assert done.code == 0, done.err  # the peak is the predicted one within 1 %
    assert record.method == f"{KIND}-allocator"
    assert record.devices[0].device == name
    elsewhere = command("run", "a.json", "--target", "train:build", "--on", "cpu")
    assert elsewhere.code == 5
    assert f"the plan is for {name}, here is cpu; say where with --on" in elsewhere.err


@pytest.mark.gpu
def test_what_is_swapped_goes_to_pinned_memory(tmp_path):
    settle(tmp_path)
    asked = ("train:build", "--strategy", "swap", "--swap-dir", ".", "-o", "s.json")
    assert command("plan", *asked, "--time-limit", 1).code == 0
    assert json.loads(Path("s.json").read_text())["order"]["swaps"]
    done = command("run", "s.json", "--target", "train:build", "--swap-dir", ".", "--steps", 2)
    assert done.code == 0, done.err


def test_a_plan_for_the_processor_is_run_there(tmp_path):
    settle(tmp_path)
    asked = ("train:build", "--memory", "90%", "-o", "c.json", "--time-limit", 1, "--on", "cpu")
    assert command("plan", *asked).code == 0
    done = command("run", "c.json", "--target", "train:build", "--steps", 2, "-o", "run.json")
    assert "predicted" in done.out, done.err
    assert json.loads(Path("run.json").read_text())["devices"][0]["device"] == "cpu"


def test_a_step_is_measured_where_it_is_asked_for(tmp_path):
    settle(tmp_path)
    there = command("profile", "train:build", "--repeats", 1, "--on", "bay:1", "-o", "p.json")
    assert there.code == 0, there.err
    profile = json.loads(Path("p.json").read_text())
    assert (profile["device"], profile["method"]) == (NAME, "bay-allocator")
    here = command("profile", "train:build", "--repeats", 1, "--on", "cpu")
    assert " on cpu: " in here.out
    bay.set_cap(1 << 30, 0)
    verdict = command("check", "train:build", "--json")
    assert verdict.code == 0, verdict.err
    told = json.loads(verdict.out)
    assert told["device"] == NAME
    assert told["limit_bytes"] <= 1 << 30


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--on", "cuda"), "there is no cuda device here, only cpu and bay"),
        (("--on", "bay:2"), "this machine has 2 bay devices, 0 to 1"),
        (("--on", "what"), "torch knows no such device"),
        (("--on", "bay", "--device", "h100"), "--on bay runs the step on a device of this machine"),
    ],
)
def test_devices_that_cannot_be_are_refused(tmp_path, words, told):
    settle(tmp_path)
    refused = command("check", "train:build", *words)
    assert refused.code == 2
    assert told in refused.err


def test_more_ranks_than_accelerators_are_refused_before_anything_starts(tmp_path):
    settle(tmp_path)
    asked = ("train:build", "--batch", 12, "--placement", "0:0-2", "--steps", 1)
    refused = command("run", *asked)
    assert refused.code == 2
    assert "3 ranks need as many bay devices, and this machine has 2" in refused.err
    tuned = command("tune", "train:build", "--ranks", 3)
    assert tuned.code == 2
    assert "3 ranks need as many bay devices, and this machine has 2" in tuned.err
    one = command("run", *asked, "--on", "bay:1")
    assert one.code == 2
    assert "--on bay:1 is one device, and each of 3 ranks takes one; say --on bay" in one.err
    assert not Path("logs").exists()


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("on_both", "2 on bay:0 (0.weight, …), 2 on bay:1 (1.weight, …)"),
        ("on_meta", "2 parameters are on meta"),
    ],
)
def test_models_on_several_devices_or_on_none_are_refused(tmp_path, target, told):
    settle(tmp_path)
    refused = command("check", f"train:{target}")
    assert refused.code == 2
    assert told in refused.err


def test_a_target_is_built_on_its_device(tmp_path):
    settle(tmp_path)
    command("--version")  # writes the targets
    sys.path.insert(0, str(tmp_path))
    for chosen, home in {None: "bay:0", "auto": "bay:0", "cpu": "cpu", "bay:1": "bay:1"}.items():
        model, batch, loss_fn = resolve_target("train:build").on(chosen).build(8)
        tensors = [*model.parameters(), *batch, loss_fn.weight]
        assert {tensor.device for tensor in tensors} == {torch.device(home)}
    second = resolve_target("train:on_second")
    assert next(second.on(None).build(None)[0].parameters()).device == torch.device("bay:1")
    assert next(second.on("cpu").build(None)[0].parameters()).device == torch.device("cpu")


def test_a_module_stays_where_it_is():
    model, batch = nn.Linear(4, 4).to("bay"), torch.ones(2, 4).to("bay")
    with pytest.raises(UsageError, match=r"the model is on bay:0, and on='cpu' is another device"):
        bayplan.check(model, batch, lambda output: output.sum(), on="cpu")
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to("bay"))
    with pytest.raises(UsageError, match="are on 2 devices"):
        bayplan.check(half, batch, lambda output: output.sum())


def test_memory_that_runs_out_is_told_of_the_device(tmp_path):
    settle(tmp_path)
    command("--version")
    bay.set_cap(64 << 20, 0)
    sys.path.insert(0, str(tmp_path))
    from bayplan.preparing.sources import prepare

    with pytest.raises(OutOfMemory, match=r"it asked for 256.* of bay memory are free"):
        prepare("train:large").build()


@pytest.mark.gpu
def test_recording_takes_its_device_from_the_parameters():
    def recorded(device: str) -> bayplan.RunRecord:
        torch.manual_seed(0)
        model, batch = nn.Linear(300, 300).to(device), torch.ones(64, 300).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bayplan.record() as recording:
            for _ in range(3):
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()
        return recording.result

    own = device_of(LAST)
    on_host, there = recorded("cpu"), recorded(LAST)
    assert on_host.devices[0].device == "cpu"
    assert (there.devices[0].device, there.method) == (own.name, f"{KIND}-allocator")
    torch.accelerator.empty_cache()
    assert own.live.allocated < there.peak_bytes <= own.peak.allocated + 10**6


def test_the_doctor_says_what_was_never_run_on_a_real_one(tmp_path):
    settle(tmp_path)
    told = command("doctor")
    assert told.code == 0
    assert f"bay:1        {NAME}" in told.out
    assert "bay:0 memory counted by its allocator; saw 8.0 MiB of a block of 8.0 MiB" in told.out
    assert "bayplan has not been run on a real accelerator yet" in told.out
    assert "make test-gpu" in told.out
    alone = command("doctor", "--on", "cpu")
    assert "bay:" not in alone.out


def test_one_device_of_several_is_probed(tmp_path):
    settle(tmp_path)
    written = Path(tmp_path, "here.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_MATRIX_SIZE", 32)  # the kernels are the CPU's
        told = command("cluster", "--probe", "--on", "bay:1", "-o", str(written))
    assert told.code == 0, told.err
    assert [kind.title for kind in read_cluster(str(written)).kinds.values()] == [f"{NAME}, probed"]
    assert len(read_cluster(str(written)).devices) == 1


def test_a_run_that_meets_less_memory_says_both_figures_and_a_smaller_plan_that_runs(tmp_path):
    # It said that the *model* ran out "while it was built or traced", with exit code 3.
    settle(tmp_path)
    asked = ("run", "train:build", "--batch", 4096, "--steps", 2, "--time-limit", 1)
    plain = command(*asked, "--limit-counts", "live", "--memory", "1GiB", "--json")
    assert plain.code == 0, plain.err
    peak = json.loads(plain.out)["devices"][0]["step_peak_bytes"][-1]
    torch.compiler.reset()
    torch.accelerator.empty_cache()
    there = int(0.8 * peak)
    bay.set_cap(torch.accelerator.memory_reserved(0) + there, 0)
    short = command(*asked, "--limit-counts", "live", "--memory", "1GiB")
    assert short.code == 4, short.err
    (found,) = re.findall(r"predicted was a peak of ([\d.]+ \w+), .* had ([\d.]+ \w+)", short.err)
    assert parse_bytes(found[0]) == pytest.approx(peak, rel=0.01)
    assert parse_bytes(found[1]) == pytest.approx(there, rel=0.05)
    (smaller,) = re.findall(r"Try --memory (\w+)", short.err)
    torch.compiler.reset()
    torch.accelerator.empty_cache()
    done = command(*asked, "--limit-counts", "live", "--memory", smaller, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["losses"] == json.loads(plain.out)["losses"]
