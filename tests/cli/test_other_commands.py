"""`profile`, `capture`, `simulate`, `report` and `doctor`, alone and one after the other."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch

from bayplan.data import files
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.data.record import RunRecord, Source


def test_profile_of_a_reference_model_is_written_and_printed(bayplan, project):
    outcome = bayplan("profile", "resnet18", "--batch", 1, "--repeats", 1, "-o", "r18.json")
    assert outcome.code == 0
    assert outcome.err == ""
    first = outcome.out.splitlines()[0]
    assert re.match(r"resnet18 on cpu: [\d.]+ m?s per step ± ", first)
    for word in ("forward", "backward", "update", "overhead", "by operator", "slowest nodes"):
        assert word in outcome.out
    assert "convolution_backward" in outcome.out
    assert "models/resnet.py:" in outcome.out
    profile = files.read(project / "r18.json", Profile)
    assert (profile.model, profile.origin, profile.device) == ("resnet18", Origin.MEASURED, "cpu")
    assert profile.versions["torch"] == torch.__version__
    assert any(profile.workspace_bytes)


def test_profile_as_json_is_what_the_file_holds(bayplan, project):
    outcome = bayplan("profile", "train:build", "--json", "-o", "p.json")
    printed = msgspec.json.decode(outcome.out, type=Profile)
    assert printed == files.read(project / "p.json", Profile)
    assert printed.step_seconds > 0


def test_profile_is_kept_and_found_again(bayplan, project, monkeypatch, tmp_path):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "own cache"))
    first = bayplan("profile", "train:build", "--json").out
    assert bayplan("profile", "train:build", "--json").out == first
    renewed = bayplan("profile", "train:build", "--json", "--again").out
    assert renewed != first
    assert bayplan("profile", "train:build", "--json").out == renewed
    # The same step under another name costs the same, and is called by its own name.
    (project / "other.py").write_text("from train import build\n")
    other = msgspec.json.decode(bayplan("profile", "other:build", "--json").out, type=Profile)
    assert other.model == "other:build"
    assert other.seconds == msgspec.json.decode(renewed, type=Profile).seconds


def test_profile_for_a_device_runs_nothing(bayplan, project, monkeypatch):
    monkeypatch.setattr("bayplan.preparing.step.PreparedStep.build", pytest.fail)
    outcome = bayplan("profile", "train:build", "--device", "titan-v", "-o", "p.json")
    assert outcome.code == 0
    assert "on titan-v" in outcome.out
    assert "(derived, nothing ran)" in outcome.out
    assert files.read(project / "p.json", Profile).origin is Origin.DERIVED


def test_cpu_clock_uses_one_thread_and_gives_the_others_back(bayplan, project):
    torch.set_num_threads(2)
    outcome = bayplan("profile", "train:build", "--clock", "cpu", "--repeats", 1, "--json")
    assert outcome.code == 0
    profile = msgspec.json.decode(outcome.out, type=Profile)
    assert (profile.clock, profile.threads) == (Clock.CPU, 1)
    assert torch.get_num_threads() == 2


def test_capture_then_simulate_then_report(bayplan, project):
    outcome = bayplan("capture", "train:build", "--batch", 4, "-o", "graph.json")
    assert outcome.code == 0
    graph = files.read(project / "graph.json", StepGraph)
    assert graph.fingerprint in outcome.out
    assert f"{len(graph.nodes)} nodes" in outcome.out

    outcome = bayplan("simulate", "graph.json", "--device", "h100", "-o", "record.json")
    assert outcome.code == 0
    record = files.read(project / "record.json", RunRecord)
    assert record.source is Source.SIMULATED
    assert record.fingerprint == graph.fingerprint
    assert outcome.out == bayplan("report", "record.json").out
    printed = bayplan("simulate", "graph.json", "--device", "h100", "--json").out
    assert msgspec.json.decode(printed, type=RunRecord) == record


def test_a_record_is_drawn_as_a_timeline(bayplan, project):
    assert bayplan("capture", "train:build", "--batch", 4, "-o", "graph.json").code == 0
    assert bayplan("simulate", "graph.json", "--device", "h100", "-o", "record.json").code == 0
    assert bayplan("report", "record.json", "--trace", "trace.json").code == 0
    trace = json.loads((project / "trace.json").read_text())
    record = files.read(project / "record.json", RunRecord)
    assert trace["otherData"]["source"] == "simulated"
    curve = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(curve) == len(record.devices[0].curve.seconds)
    assert max(sum(event["args"].values()) for event in curve) == record.peak_bytes

    device = msgspec.structs.replace(record.devices[0], curve=None, events=())
    files.write(project / "bare.json", msgspec.structs.replace(record, devices=(device,)))
    outcome = bayplan("report", "bare.json", "--trace", "other.json")
    assert outcome.code == 2
    assert "neither events nor a memory curve" in outcome.err
    assert not (project / "other.json").exists()


@pytest.mark.parametrize("where", [("--device", "h100"), ()], ids=["derived", "measured"])
def test_simulate_agrees_with_fit(bayplan, project, where):
    assert bayplan("capture", "train:build", "-o", "graph.json", *where).code == 0
    assert bayplan("profile", "train:build", "-o", "profile.json", *where).code == 0
    options = ("--profile", "profile.json", *where, "--json")
    record = msgspec.json.decode(bayplan("simulate", "graph.json", *options).out, type=RunRecord)
    verdict = json.loads(bayplan("check", "train:build", "--memory", "1GiB", *options).out)
    assert verdict["plain_peak_bytes"] == record.peak_bytes
    assert verdict["plain_step_seconds"] == record.typical_step_seconds


def test_graph_can_be_simulated_where_the_model_is_not(bayplan, project):
    assert bayplan("capture", "train:build", "-o", "graph.json").code == 0
    (project / "train.py").unlink()
    assert bayplan("simulate", "graph.json", "--device", "v100").code == 0


def test_report_holds_prediction_against_reality(bayplan, project):
    assert bayplan("capture", "train:build", "-o", "graph.json").code == 0
    for device in ("h100", "v100"):
        assert (
            bayplan("simulate", "graph.json", "--device", device, "-o", f"{device}.json").code == 0
        )
    simulated = files.read(project / "h100.json", RunRecord)
    measured = msgspec.structs.replace(simulated, source=Source.MEASURED, method="malloc")
    files.write("measured.json", measured)
    outcome = bayplan("report", "h100.json", "--against", "measured.json")
    assert outcome.code == 0
    head, peak, step = outcome.out.splitlines()[-3:]
    assert head.split() == ["predicted", "measured", "error"]
    assert peak.endswith("+0.00 %")
    assert step.endswith("+0.00 %")
    # Two of one source are neither right nor wrong.
    outcome = bayplan("report", "h100.json", "--against", "v100.json")
    assert outcome.out.splitlines()[-3].split() == ["first", "second", "change"]


def test_doctor_finds_this_machine_good(bayplan, planner_cache):
    outcome = bayplan("doctor")
    assert outcome.code == 0
    assert "BAD" not in outcome.out
    assert torch.__version__ in outcome.out
    assert str(planner_cache) in outcome.out
    for name in ("resnet50", "llama-7b", "h100", "titan-v"):
        assert name in outcome.out


def test_doctor_exits_2_where_something_is_amiss(bayplan, project, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    outcome = bayplan("doctor")
    assert outcome.code == 2
    line = next(line for line in outcome.out.splitlines() if line.startswith("BAD torch"))
    assert "-> install torch 2.13" in line


def test_doctor_advises_where_the_cache_cannot_be_written(bayplan, project, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv("BAYPLAN_CACHE", str(project / "file" / "cache"))
    outcome = bayplan("doctor")
    assert outcome.code == 0
    line = next(line for line in outcome.out.splitlines() if line.startswith("tip cache"))
    assert line.endswith("-> set BAYPLAN_CACHE to a folder that can")
