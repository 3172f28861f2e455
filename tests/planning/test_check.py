"""`check` without a command line: where its profile comes from, and which changes it tries."""

import msgspec
import pytest
import torch
from torch import nn

from bayplan.costing.catalogue import load_device
from bayplan.data.device import DeviceKind
from bayplan.data.errors import CaptureError, ForeignPlan, OutOfMemory
from bayplan.data.profile import Clock, Origin
from bayplan.devices.device import Cpu
from bayplan.models.targets import Target
from bayplan.planning import verdict as verdicts
from bayplan.planning.memory.planner import Planner
from bayplan.planning.verdict import check
from bayplan.preparing import step
from bayplan.preparing.step import PreparedStep


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache_and_one_thread(cache, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(cache))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Wide(nn.Module):
    """Small weights and large activations, so that the batch decides the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)

    def forward(self, images):
        # Not squared: CUDA's autocast would square in float32, and save no memory.
        return torch.relu(self.conv(images)).abs().mean()


def build_wide(batch_size):
    return Wide(), torch.randn(batch_size or 8, 1, 32, 32), None


def question(build=build_wide, **options) -> PreparedStep:
    target = Target(name="wide", build=build, takes_batch_size=True, default_batch=8)
    return PreparedStep(target=target, **options)


@pytest.fixture(scope="module")
def h100() -> DeviceKind:
    return load_device("h100")


@pytest.fixture
def built(monkeypatch):
    """The batch sizes at which a model was built for real."""
    sizes = []
    original = PreparedStep.build

    def build(asked: PreparedStep):
        sizes.append(asked.samples)
        return original(asked)

    monkeypatch.setattr(PreparedStep, "build", build)
    return sizes


def test_small_step_is_measured_as_it_is(built):
    verdict = check(question(), memory_bytes=2**30)
    assert verdict.fits
    assert verdict.time_origin is Origin.MEASURED
    assert verdict.device == "cpu"
    assert built == [8]


def test_large_step_is_measured_small_and_scaled(built, monkeypatch):
    monkeypatch.setattr(step, "_MEASURED_FLOPS", 1e6)
    verdict = check(question(batch=64), memory_bytes=2**30)
    assert verdict.time_origin is Origin.SCALED
    (measured,) = built
    assert 1 <= measured < 64


def test_scaled_peak_is_that_of_the_step_itself(monkeypatch):
    measured = check(question(batch=16), memory_bytes=2**30)
    monkeypatch.setattr(step, "_MEASURED_FLOPS", 1e6)
    scaled = check(question(batch=16), memory_bytes=2**30)
    assert scaled.time_origin is Origin.SCALED
    assert scaled.plain_peak_bytes == pytest.approx(measured.plain_peak_bytes, rel=0.02)


def test_device_elsewhere_builds_nothing_for_real(built, h100):
    verdict = check(question(device=h100))
    assert verdict.time_origin is Origin.DERIVED
    assert verdict.device == "h100"
    assert built == []


def test_step_too_large_for_this_machine_is_derived_from_a_probe(built, monkeypatch, h100):
    monkeypatch.setattr(Cpu, "free_bytes", 1000)
    monkeypatch.setattr(step, "probe_device", lambda device: h100)
    verdict = check(question(), memory_bytes=2**30)
    assert verdict.fits
    assert verdict.time_origin is Origin.DERIVED
    assert built == []


def test_progress_is_told_in_words():
    heard = []

    def hear(what, *_):
        heard.append(what)

    check(question(batch=3, on_progress=hear), memory_bytes=1, on_progress=hear)
    assert heard[0] == "capturing"
    assert "looking for what would fit" in heard


def test_changes_are_measured_once_each(built):
    """The search tries many sizes, but only what it names is run, and never twice."""
    fits = check(question(batch=9), memory_bytes=2**30)
    built.clear()
    verdict = check(question(batch=9), memory_bytes=fits.plain_peak_bytes * 2 // 3)
    suggested = int(verdict.would_fit[0].removeprefix("--batch "))
    assert built[:2] == [9, suggested]
    assert all(size == 9 for size in built[2:])  # with mixed precision, or another optimizer
    assert len(built) <= 4


def test_scaled_workspace_that_was_too_small_is_noticed(monkeypatch):
    """A suggested batch is held against a profile of its own before it is named."""
    generous = check(question(batch=32), memory_bytes=2**30)
    refused = []
    original = verdicts._Changes._fits

    def refuse_first(self, changed, limit_bytes=None):
        if changed.samples != 32 and not refused:
            refused.append(changed.samples)
            return False
        return original(self, changed, limit_bytes)

    monkeypatch.setattr(verdicts._Changes, "_fits", refuse_first)
    verdict = check(question(batch=32), memory_bytes=generous.plain_peak_bytes // 2)
    (too_large,) = refused
    named = int(verdict.would_fit[0].removeprefix("--batch "))
    assert 0 < named < too_large


def test_model_that_refuses_mixed_precision_is_not_offered_it(h100):
    class Exact(Wide):
        def forward(self, images):
            if torch.is_autocast_enabled("cpu"):
                raise TypeError("float32 only")
            return super().forward(images)

    asked = question(lambda size: (Exact(), *build_wide(size)[1:]), device=h100)
    verdict = check(asked, memory_bytes=1000)
    assert not verdict.fits
    assert not any("autocast" in change for change in verdict.would_fit)


def test_nothing_that_helps_is_no_suggestion(h100):
    verdict = check(question(batch=1, device=h100, optimizer="none"), memory_bytes=1000)
    assert [change.split()[0] for change in verdict.would_fit] == ["--memory"]


def test_profile_of_another_device_is_refused_before_anything_is_captured(h100, monkeypatch):
    profile = question(device=h100).measured_profile(repeats=1)
    monkeypatch.setattr(step, "capture_step", pytest.fail)
    with pytest.raises(ForeignPlan, match="add --device h100"):
        check(question(), profile=profile)
    with pytest.raises(ForeignPlan, match="is of h100, --device asks about v100"):
        check(question(device=load_device("v100")), profile=profile)


def test_threads_come_back_after_the_cpu_clock_even_from_an_error():
    torch.set_num_threads(2)
    broken = question(lambda size: (Wide(), torch.zeros(2, 3), None), again=True)
    with pytest.raises(CaptureError):
        broken.measured_profile(repeats=1, clock=Clock.CPU)
    assert torch.get_num_threads() == 2
    profile = question(again=True).measured_profile(repeats=1, clock=Clock.CPU)
    assert profile.threads == 1
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("name", "precision"),
    [("titan-v", "fp16"), ("p100", "fp16"), ("v100", "fp16"), ("t4", "fp16"), ("a100", "bf16")],
)
def test_precision_that_is_offered_is_one_the_device_has(name, precision):
    kind = load_device(name)
    full = check(question(device=kind, batch=64))
    half = check(question(device=kind, batch=64, autocast=precision))
    between = (full.plain_peak_bytes + half.plain_peak_bytes) // 2
    verdict = check(question(device=kind, batch=64), memory_bytes=between)
    offered = [change for change in verdict.would_fit if change.startswith("--autocast")]
    assert offered == [f"--autocast {precision}"]


def test_device_without_half_precision_is_offered_none(h100):
    only = {"float32": h100.flops_per_s["float32"]}
    kind = msgspec.structs.replace(h100, flops_per_s=only)
    half = check(question(device=kind, batch=64, autocast="bf16"))
    verdict = check(question(device=kind, batch=64), memory_bytes=half.plain_peak_bytes)
    assert not verdict.fits
    assert not any("autocast" in change for change in verdict.would_fit)


def test_without_the_cache_each_step_is_measured_anew_and_once(built):
    limit_bytes = check(question(batch=11), memory_bytes=2**30).plain_peak_bytes
    built.clear()
    check(question(batch=11), memory_bytes=limit_bytes)
    check(question(batch=11, again=True), memory_bytes=limit_bytes - 1)
    assert built.count(11) >= 2
    built.clear()
    renewed = check(question(batch=11, again=True), memory_bytes=2**30)
    assert built == [11]
    assert check(question(batch=11), memory_bytes=2**30) == renewed


def test_one_question_builds_and_traces_once(h100, own_planner_cache, monkeypatch):
    counts = {"built": 0, "captured": 0, "traced": 0}

    def counted(what, function):
        def call(*args, **options):
            counts[what] += 1
            return function(*args, **options)

        return call

    monkeypatch.setattr(step, "capture_step", counted("captured", step.capture_step))
    monkeypatch.setattr(step, "trace_step", counted("traced", step.trace_step))
    asked = question(counted("built", build_wide), device=h100, batch=64)
    planner = Planner(asked, cache=own_planner_cache, time_limit_seconds=0.2)
    limit_bytes = int(0.9 * asked.plain_peak_bytes)
    assert check(asked, memory_bytes=limit_bytes, planner=planner).planned is not None
    assert counts == {"built": 1, "captured": 1, "traced": 1}
    check(asked, memory_bytes=1000, planner=planner)  # tries other sizes and precisions
    assert counts["built"] == counts["traced"] == 1
    num_captured = counts["captured"]
    check(asked, memory_bytes=1000, planner=planner)
    assert counts["captured"] == num_captured


class Failing(Planner):
    """A planner of a step that is captured but cannot be traced as one graph."""

    def order(self, limit, *, strategy="auto"):
        raise CaptureError("the forward is two graphs") from RuntimeError("graph break")


def test_plan_that_fails_is_no_misfit(cache):
    step = question(batch=9)
    limit_bytes = check(step).plain_peak_bytes // 2
    with pytest.raises(CaptureError, match="no plan can be made: the forward is two graphs") as no:
        check(step, memory_bytes=limit_bytes, planner=Failing(step, cache))
    assert str(no.value).startswith("the plain step's peak is ")
    assert "--no-plan" in str(no.value)
    assert isinstance(no.value.__cause__, RuntimeError)
    assert no.value.exit_code == 2
    verdict = check(step, memory_bytes=limit_bytes)
    assert (verdict.fits, verdict.plain_fits) == (False, False)


class OutOfRoom(Planner):
    def order(self, limit, *, strategy="auto"):
        raise OutOfMemory("out of memory while the model was traced")


def test_memory_that_runs_out_while_planning_is_no_verdict(cache):
    step = question(batch=9)
    limit_bytes = check(step).plain_peak_bytes // 2
    with pytest.raises(OutOfMemory):
        check(step, memory_bytes=limit_bytes, planner=OutOfRoom(step, cache))
