"""`fit` without a command line: where its profile comes from, and which changes it tries."""

import msgspec
import pytest
import torch
from torch import nn

from bayplan import fitting
from bayplan.data.device import DeviceKind
from bayplan.data.errors import CaptureError, ForeignPlan
from bayplan.data.profile import Clock, Origin
from bayplan.fitting import fit, profile_question
from bayplan.profiling.catalogue import load_device
from bayplan.questions import Question
from bayplan.targets import Target


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
        return torch.relu(self.conv(images)).square().mean()


def build_wide(batch_size):
    return Wide(), torch.randn(batch_size or 8, 1, 32, 32), None


def question(build=build_wide, **options) -> Question:
    target = Target(name="wide", build=build, takes_batch_size=True, default_batch=8)
    return Question(target=target, **options)


@pytest.fixture(scope="module")
def h100() -> DeviceKind:
    return load_device("h100")


@pytest.fixture
def built(monkeypatch):
    """The batch sizes at which a model was built for real."""
    sizes = []
    original = Question.build

    def build(asked: Question):
        sizes.append(asked.samples)
        return original(asked)

    monkeypatch.setattr(Question, "build", build)
    return sizes


def test_small_step_is_measured_as_it_is(built):
    verdict = fit(question(), memory_bytes=2**30)
    assert verdict.fits
    assert verdict.time_origin is Origin.MEASURED
    assert verdict.device == "cpu"
    assert built == [8]


def test_large_step_is_measured_small_and_scaled(built, monkeypatch):
    monkeypatch.setattr(fitting, "_MEASURED_FLOPS", 1e6)
    verdict = fit(question(batch=64), memory_bytes=2**30)
    assert verdict.time_origin is Origin.SCALED
    (measured,) = built
    assert 1 <= measured < 64


def test_scaled_peak_is_that_of_the_step_itself(monkeypatch):
    measured = fit(question(batch=16), memory_bytes=2**30)
    monkeypatch.setattr(fitting, "_MEASURED_FLOPS", 1e6)
    scaled = fit(question(batch=16), memory_bytes=2**30)
    assert scaled.time_origin is Origin.SCALED
    assert scaled.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


def test_device_elsewhere_builds_nothing_for_real(built, h100):
    verdict = fit(question(device=h100))
    assert verdict.time_origin is Origin.DERIVED
    assert verdict.device == "h100"
    assert built == []


def test_step_too_large_for_this_machine_is_derived_from_a_probe(built, monkeypatch, h100):
    monkeypatch.setattr(fitting, "available_memory_bytes", lambda device: 1000)
    monkeypatch.setattr(fitting, "probe_cpu", lambda: h100)
    verdict = fit(question(), memory_bytes=2**30)
    assert verdict.fits
    assert verdict.time_origin is Origin.DERIVED
    assert built == []


def test_progress_is_told_in_words():
    heard = []
    fit(question(batch=3), memory_bytes=1, on_progress=lambda what, *_: heard.append(what))
    assert heard[0] == "capturing"
    assert "looking for what would fit" in heard


def test_changes_are_measured_once_each(built):
    """The search tries many sizes, but only what it names is run, and never twice."""
    fits = fit(question(batch=9), memory_bytes=2**30)
    built.clear()
    verdict = fit(question(batch=9), memory_bytes=fits.peak_bytes * 2 // 3)
    suggested = int(verdict.would_fit[0].removeprefix("--batch "))
    assert built[:2] == [9, suggested]
    assert all(size == 9 for size in built[2:])  # with mixed precision, or another optimizer
    assert len(built) <= 4


def test_scaled_workspace_that_was_too_small_is_noticed(monkeypatch):
    """A suggested batch is held against a profile of its own before it is named."""
    generous = fit(question(batch=32), memory_bytes=2**30)
    refused = []
    original = fitting._Changes._fits

    def refuse_first(self, changed, limit_bytes=None):
        if changed.samples != 32 and not refused:
            refused.append(changed.samples)
            return False
        return original(self, changed, limit_bytes)

    monkeypatch.setattr(fitting._Changes, "_fits", refuse_first)
    verdict = fit(question(batch=32), memory_bytes=generous.peak_bytes // 2)
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
    verdict = fit(asked, memory_bytes=1000)
    assert not verdict.fits
    assert not any("autocast" in change for change in verdict.would_fit)


def test_nothing_that_helps_is_no_suggestion(h100):
    verdict = fit(question(batch=1, device=h100, optimizer="none"), memory_bytes=1000)
    assert [change.split()[0] for change in verdict.would_fit] == ["--memory"]


def test_profile_of_another_device_is_refused_before_anything_is_captured(h100, monkeypatch):
    asked = question(device=h100)
    graph = asked.capture()
    profile = profile_question(asked, graph, repeats=1, on_progress=lambda *_: None)
    monkeypatch.setattr(Question, "capture", pytest.fail)
    with pytest.raises(ForeignPlan, match="add --device h100"):
        fit(question(), profile=profile)
    with pytest.raises(ForeignPlan, match="is of h100, --device asks about v100"):
        fit(question(device=load_device("v100")), profile=profile)


def test_threads_come_back_after_the_cpu_clock_even_from_an_error():
    torch.set_num_threads(2)
    asked = question()
    graph = question(batch=9).capture()  # of another step than the one that runs
    with pytest.raises(CaptureError):
        profile_question(
            question(lambda size: (Wide(), torch.zeros(2, 3), None)),
            graph,
            repeats=1,
            clock=Clock.CPU,
            use_cache=False,
            on_progress=lambda *_: None,
        )
    assert torch.get_num_threads() == 2
    graph = asked.capture()
    profile = profile_question(
        asked, graph, repeats=1, clock=Clock.CPU, use_cache=False, on_progress=lambda *_: None
    )
    assert profile.threads == 1
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("name", "precision"),
    [("titan-v", "fp16"), ("p100", "fp16"), ("v100", "fp16"), ("t4", "fp16"), ("a100", "bf16")],
)
def test_precision_that_is_offered_is_one_the_device_has(name, precision):
    kind = load_device(name)
    full = fit(question(device=kind, batch=64))
    half = fit(question(device=kind, batch=64, autocast=precision))
    between = (full.peak_bytes + half.peak_bytes) // 2
    verdict = fit(question(device=kind, batch=64), memory_bytes=between)
    offered = [change for change in verdict.would_fit if change.startswith("--autocast")]
    assert offered == [f"--autocast {precision}"]


def test_device_without_half_precision_is_offered_none(h100):
    only = {"float32": h100.flops_per_s["float32"]}
    kind = msgspec.structs.replace(h100, flops_per_s=only)
    half = fit(question(device=kind, batch=64, autocast="bf16"))
    verdict = fit(question(device=kind, batch=64), memory_bytes=half.peak_bytes)
    assert not verdict.fits
    assert not any("autocast" in change for change in verdict.would_fit)


def test_without_the_cache_each_step_is_measured_anew_and_once(built):
    limit_bytes = fit(question(batch=11), memory_bytes=2**30).peak_bytes
    built.clear()
    fit(question(batch=11), memory_bytes=limit_bytes)
    fit(question(batch=11), memory_bytes=limit_bytes - 1, use_cache=False)
    assert built.count(11) >= 2
    built.clear()
    renewed = fit(question(batch=11), memory_bytes=2**30, use_cache=False)
    assert built == [11]
    assert fit(question(batch=11), memory_bytes=2**30) == renewed
