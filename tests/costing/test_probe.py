"""The probe of this processor, with its three measurements made up."""

import torch

import bayplan
from bayplan.costing import probe
from bayplan.costing.probe import probe_cpu
from bayplan.costing.roofline import derive_profile
from bayplan.data.device import OpClass
from bayplan.data.profile import Origin
from bayplan.devices.device import Cpu


def test_description_follows_from_three_times(monkeypatch):
    seconds = iter((0.5, 0.25, 1e-6))  # a matrix product, a copy, an operator on one number
    monkeypatch.setattr(probe, "_fastest", lambda work, *devices: next(seconds))
    monkeypatch.setattr(probe, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(Cpu, "free_bytes", 2**30)
    kind = probe_cpu()
    assert kind.name == "cpu"
    assert kind.flops_per_s["float32"].value == 2 * 1024**3 / 0.5
    assert kind.bandwidth_bytes_per_s.value == 2 * 2**20 / 0.25  # read and written
    assert kind.launch_seconds.value == 1e-6
    assert kind.memory_bytes.value == 2**30
    assert kind.context_bytes.value == 0
    assert set(kind.efficiency) == set(OpClass)
    assert "measured" in kind.bandwidth_bytes_per_s.source
    assert "guess" in kind.vector_flops_per_s.source


def test_fastest_of_several_counts(monkeypatch):
    readings = iter((0.0, 3.0, 10.0, 11.0, 20.0, 25.0, 30.0, 32.0, 40.0, 44.0))
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(readings))
    calls = []
    assert probe._fastest(lambda: calls.append(1)) == 1.0
    assert len(calls) == 5


def test_this_processor_can_be_derived_for(monkeypatch):
    monkeypatch.setattr(probe, "_MATRIX_SIZE", 64)
    monkeypatch.setattr(probe, "_COPY_BYTES", 2**16)
    generator = torch.get_rng_state()
    kind = probe_cpu()
    assert torch.equal(torch.get_rng_state(), generator)
    graph = bayplan.capture(torch.nn.Linear(8, 8), torch.ones(2, 8), lambda output: output.sum())
    profile = derive_profile(graph, kind)
    assert profile.origin is Origin.DERIVED
    assert profile.device == "cpu"
    assert profile.step_seconds > 0
