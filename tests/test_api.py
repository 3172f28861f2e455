"""The verbs of `import bayplan`, alone and joined."""

import subprocess
import sys

import msgspec
import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing.catalogue import load_device
from bayplan.costing.roofline import derive_profile
from bayplan.data import files
from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.profile import Origin
from bayplan.data.record import Source
from bayplan.devices.meters import resident_tensor_bytes


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(cache))


def make(batch: int = 4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, (torch.randn(batch, 64), torch.randint(10, (batch,))), nn.CrossEntropyLoss()


def test_every_public_name_is_there_and_no_other():
    for name in bayplan.__all__:
        assert getattr(bayplan, name) is not None
    assert dir(bayplan) == sorted(bayplan.__all__)


def test_first_use_draws_no_random_number():
    script = "import random, bayplan; state = random.getstate(); bayplan.fit; bayplan.tune"
    subprocess.run(
        [sys.executable, "-c", f"{script}; assert random.getstate() == state"], check=True
    )
    with pytest.raises(AttributeError, match="no attribute 'capturee'"):
        _ = bayplan.capturee


def test_import_waits_for_no_torch():
    code = "import sys, bayplan, bayplan.cli, bayplan.data.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_capture_profile_simulate_in_one_line_each():
    model, batch, loss_fn = make()
    graph = bayplan.capture(model, batch, loss_fn, optimizer=torch.optim.AdamW, name="mine")
    profile = bayplan.profile(
        model, batch, loss_fn, optimizer=torch.optim.AdamW, name="mine", repeats=1
    )
    record = bayplan.simulate(graph, profile)
    assert graph.model == profile.model == record.model == "mine"
    assert record.source is Source.SIMULATED
    assert record.fingerprint == graph.fingerprint
    assert record.step_seconds == (profile.step_seconds,)
    assert sum(record.devices[0].peak_by_kind.values()) == record.peak_bytes
    assert any("Python" in left_out for left_out in record.not_counted)


def test_prediction_and_recording_agree_on_the_peak():
    """The whole promise in small: simulated and measured peak of the same steps."""
    others = resident_tensor_bytes(torch.device("cpu"))  # left over from other tests
    model, batch, loss_fn = make(batch=2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = bayplan.capture(model, batch, loss_fn, optimizer=optimizer)
    profile = bayplan.profile(model, batch, loss_fn, optimizer=optimizer, repeats=1)
    predicted = bayplan.simulate(graph, profile).peak_bytes
    with bayplan.record() as recording:
        for _ in range(3):
            optimizer.zero_grad()
            output = model(batch[0])
            loss = loss_fn(output, batch[1])
            loss.backward()
            optimizer.step()
            del output, loss
    measured = recording.result.steady_peak_bytes - others
    assert predicted == pytest.approx(measured, rel=0.01)


def test_device_may_be_a_name_a_file_or_a_kind(tmp_path):
    model, batch, loss_fn = make()
    graph = bayplan.capture(model, batch, loss_fn)
    kind = load_device("v100")
    files.write(tmp_path / "mine.json", kind)
    records = [
        bayplan.simulate(graph, device=device)
        for device in ("v100", kind, str(tmp_path / "mine.json"))
    ]
    assert records[0] == records[1] == records[2]
    assert any("CUDA" in left_out for left_out in records[0].not_counted)
    assert records[0] == bayplan.simulate(graph, derive_profile(graph, kind), device="v100")


def test_faster_device_takes_less_time_and_the_same_memory():
    model, batch, loss_fn = make(batch=256)
    graph = bayplan.capture(model, batch, loss_fn)
    slow, fast = (bayplan.simulate(graph, device=name) for name in ("p100", "h100"))
    assert fast.typical_step_seconds < slow.typical_step_seconds
    assert fast.peak_bytes == slow.peak_bytes


def test_derived_profile_of_a_gpu_is_rounded_as_a_gpu_rounds():
    """Every block of a few bytes takes 512 on CUDA and 64 on a CPU."""
    model, batch, loss_fn = make(batch=1)
    graph = bayplan.capture(model, batch, loss_fn)
    there = bayplan.simulate(graph, device="h100")
    assert there.peak_bytes % 512 == 0
    nothing_inside = msgspec.structs.replace(
        derive_profile(graph, load_device("h100")), device="cpu"
    )
    here = bayplan.simulate(graph, nothing_inside)
    objects_bytes = here.devices[0].peak_by_kind["objects"]  # no blocks, and not on a GPU
    assert (here.peak_bytes - objects_bytes) % 64 == 0
    assert here.peak_bytes - objects_bytes < there.peak_bytes


def test_simulate_needs_a_profile_or_a_device():
    model, batch, loss_fn = make()
    graph = bayplan.capture(model, batch, loss_fn)
    with pytest.raises(UsageError, match="needs a profile, or a device"):
        bayplan.simulate(graph)
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        bayplan.simulate(graph, device="h10")


def test_profile_of_another_device_is_refused():
    model, batch, loss_fn = make()
    graph = bayplan.capture(model, batch, loss_fn)
    profile = bayplan.profile(model, batch, loss_fn, repeats=1)
    with pytest.raises(
        UsageError, match="profile is of cpu, the device asked about is h100; leave"
    ):
        bayplan.simulate(graph, profile, device="h100")
    with pytest.raises(UsageError, match="is of v100, the device asked about is h100"):
        bayplan.simulate(graph, derive_profile(graph, load_device("v100")), device="h100")


def test_model_without_parameters_cannot_be_profiled():
    inputs = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(UsageError, match="ReLU has no parameters, so no parameter requires a grad"):
        bayplan.profile(nn.ReLU(), inputs, lambda output: output.sum())


def test_unknown_clock_is_a_mistake_of_the_user():
    with pytest.raises(UsageError, match="no clock 'cpuu'; did you mean 'cpu'"):
        bayplan.profile(*make(), clock="cpuu")
    with pytest.raises(UsageError, match="no clock 'wal'; did you mean 'wall'"):
        bayplan.record(clock="wal")


def test_optimizer_of_another_model_is_refused():
    other = torch.optim.SGD(make()[0].parameters(), lr=0.1)
    for verb in (bayplan.capture, bayplan.profile):
        with pytest.raises(UsageError, match="holds 4 parameters, none of them among the 4"):
            verb(*make(), optimizer=other)


def test_profile_of_another_step_is_refused():
    model, batch, loss_fn = make()
    other = bayplan.capture(*make(batch=8))
    profile = bayplan.profile(model, batch, loss_fn, repeats=1)
    with pytest.raises(ForeignPlan, match="make a new one with `bayplan profile`"):
        bayplan.simulate(other, profile)


def test_profile_is_carried_over_to_another_batch():
    small, large = (bayplan.capture(*make(batch=batch)) for batch in (4, 64))
    profile = bayplan.profile(*make(batch=4), repeats=1)
    scaled = bayplan.scale(profile, small, large)
    assert scaled.origin is Origin.SCALED
    assert bayplan.simulate(large, scaled).peak_bytes > bayplan.simulate(small, profile).peak_bytes


def test_errors_are_value_errors_that_callers_may_catch():
    assert issubclass(bayplan.BayplanError, ValueError)
    with pytest.raises(ValueError, match="repeats is -1"):
        bayplan.profile(*make(), repeats=-1)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.relu(layer(inputs))
        return inputs.square().mean()


@pytest.mark.parametrize("is_built", [True, False])
def test_check_and_plan_leave_a_module_as_it_is(own_planner_cache, is_built):
    """The module itself was once trained where the step is measured here."""
    model, batch, loss_fn = make()
    model.append(nn.BatchNorm1d(10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if is_built else "sgd"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"optimizer": optimizer, "again": True}
    assert bayplan.check(model, batch, loss_fn, memory="1GiB", **options).fits
    bayplan.plan(model, batch, loss_fn, memory="100%", time_limit_seconds=0.5, **options)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not is_built or not optimizer.state


def test_each_command_is_a_function_of_the_same_name(own_planner_cache):
    model, batch = Deep(), torch.randn(2048, 64)
    verdict = bayplan.check(model, batch, memory="1GiB", device="t4")
    assert verdict.fits
    plan = bayplan.plan(model, batch, memory="80%", time_limit_seconds=0.5)
    assert plan.request is None  # a module that was handed over cannot be built by name
    assert "strategy auto" in bayplan.explain(plan)
    measured = bayplan.run(plan, model, batch, num_steps=2)
    assert len(measured.step_seconds) == 2
    predicted = bayplan.simulate(bayplan.capture(model, batch), device="t4")
    difference = bayplan.compare(predicted, measured)
    assert difference is not None
    assert "peak" in bayplan.report(predicted, against=measured)


def test_a_target_is_named_as_on_the_command_line(own_planner_cache):
    verdict = bayplan.check("resnet18", 4, device="t4", memory="8GiB", optimizer="sgd")
    assert (verdict.model, verdict.batch, verdict.optimizer) == ("resnet18", 4, "sgd")
    with pytest.raises(bayplan.BayplanError, match="makes its own batch"):
        bayplan.check("resnet18", torch.ones(2))


def test_a_plan_for_a_cluster_is_replayed_there(own_planner_cache):
    options = {"cluster": "rtx-4090-4", "optimizer": "sgd"}
    plan = bayplan.plan("alexnet", 16, placement="0:0-3", **options)
    record = bayplan.simulate(plan, cluster="rtx-4090-4")
    assert record.typical_step_seconds == pytest.approx(plan.predicted_seconds)
    with pytest.raises(bayplan.BayplanError, match="say which"):
        bayplan.simulate(plan)


def test_ranks_of_other_machines_are_not_started(own_planner_cache):
    plan = bayplan.plan("alexnet", 4, placement="0:0.1:0", cluster="titanv-2x8", optimizer="sgd")
    with pytest.raises(bayplan.BayplanError, match=r"names 2 nodes.*torchrun --nnodes 2"):
        bayplan.run(plan)
