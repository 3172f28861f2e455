"""Files that do not belong, are damaged or cannot be written: refused, and none left behind."""

import json
from pathlib import Path

import msgspec
import pytest

from bayplan.costing.catalogue import load_device
from bayplan.data.device import DeviceKind


def test_profile_of_another_model_exits_5(bayplan, add_to_project, project, check_refusal):
    add_to_project(
        "def wide(batch_size=2):\n"
        "    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))\n"
        "    return model, make_batch(batch_size), nn.CrossEntropyLoss()\n"
    )
    assert bayplan("profile", "train:wide", "-o", "wide.json", "--repeats", 1).code == 0
    outcome = bayplan("check", "train:build", "--profile", "wide.json", "--memory", "1GiB")
    check_refusal(outcome, 5, "the profile is of 'train:wide'", "the step is 'train:build'")
    # Another batch size, optimizer or precision is another step as well.
    outcome = bayplan(
        "check", "train:wide", "--batch", 3, "--profile", "wide.json", "--memory", "1GiB"
    )
    check_refusal(outcome, 5, "bayplan profile")
    graph = project / "graph.json"
    assert bayplan("capture", "train:build", "-o", graph).code == 0
    check_refusal(bayplan("simulate", graph, "--profile", "wide.json"), 5, "'train:wide'")


def test_profile_of_another_device_exits_5(bayplan, project, check_refusal):
    for name, options in (("h100.json", ("--device", "h100")), ("here.json", ("--repeats", 1))):
        assert bayplan("profile", "train:build", "-o", name, *options).code == 0
    outcome = bayplan("check", "train:build", "--profile", "h100.json")
    check_refusal(outcome, 5, "derived for h100", "--device h100")
    outcome = bayplan("check", "train:build", "--device", "v100", "--profile", "h100.json")
    check_refusal(outcome, 5, "is of h100", "asks about v100")
    outcome = bayplan("check", "train:build", "--device", "h100", "--profile", "here.json")
    check_refusal(outcome, 5, "is of cpu", "asks about h100")


def test_simulate_refuses_a_profile_of_another_device(bayplan, project, check_refusal):
    assert bayplan("capture", "train:build", "-o", "graph.json").code == 0
    assert bayplan("profile", "train:build", "-o", "here.json", "--repeats", 1).code == 0
    options = ("--profile", "here.json", "--device", "h100", "-o", "record.json")
    outcome = bayplan("simulate", "graph.json", *options)
    check_refusal(outcome, 2, "the profile is of cpu", "asked about is h100", "leave one")
    assert not (project / "record.json").exists()


def test_profile_of_a_gpu_that_is_not_here_needs_a_limit(bayplan, project, check_refusal):
    assert bayplan("profile", "train:build", "-o", "p.json", "--repeats", 1).code == 0
    fields = json.loads((project / "p.json").read_text())
    (project / "p.json").write_text(json.dumps({**fields, "device": "NVIDIA Imaginary"}))
    outcome = bayplan("check", "train:build", "--profile", "p.json")
    check_refusal(outcome, 2, "no NVIDIA Imaginary is here", "--memory")
    options = ("--profile", "p.json", "--memory", "1GiB")
    assert bayplan("check", "train:build", *options).code == 0


def damaged(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_file_with_an_unknown_field_is_refused_by_name(bayplan, project, check_refusal):
    assert bayplan("profile", "train:build", "--device", "h100", "-o", "p.json").code == 0
    fields = json.loads((project / "p.json").read_text())
    path = damaged(project / "p.json", {**fields, "colour": "red"})
    outcome = bayplan("check", "train:build", "--device", "h100", "--profile", path)
    check_refusal(outcome, 2, "p.json", "`colour`")


def test_cluster_file_with_an_unknown_field_is_refused_by_place(bayplan, project, check_refusal):
    (project / "cluster.yaml").write_text(
        "schema: bayplan/cluster\n"
        "version: 1\n"
        "name: lab\n"
        "kinds: {}\n"
        "hosts:\n"
        "  - name: a\n"
        "    memory_bytes: {value: 1e9, source: guess}\n"
        "    colour: red\n"
        "devices: []\n"
    )
    outcome = bayplan("check", "train:build", "--cluster", "cluster.yaml")
    check_refusal(outcome, 2, "cluster.yaml", "`colour`", "$.hosts[0]")


def test_device_file_with_a_fault_is_refused_by_place(bayplan, project, check_refusal):
    kind: DeviceKind = load_device("v100")
    fields = msgspec.to_builtins(kind)
    fields["memory_bytes"] = {"value": -1, "source": "guess"}
    path = damaged(project / "mine.json", fields)
    outcome = bayplan("check", "train:build", "--device", path)
    check_refusal(outcome, 2, "mine.json", "$.memory_bytes")


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ("{", "truncated"),
        ("", "truncated"),
        ({"schema": "bayplan/plan", "version": 1}, "expected 'bayplan/graph'"),
        ({"schema": "bayplan/graph", "version": 99}, "version 99"),
        (
            {
                "schema": "bayplan/graph",
                "version": 1,
                "model": "m",
                "nodes": [],
                "values": [],
                "storages": [],
            },
            "nodes is empty",
        ),
    ],
    ids=["cut", "nothing", "schema", "version", "empty step"],
)
def test_graph_file_that_cannot_be_used_is_refused(
    bayplan, project, content, phrase, check_refusal
):
    path = damaged(project / "graph.json", content)
    check_refusal(bayplan("simulate", path, "--device", "h100"), 2, "graph.json", phrase)


def test_simulate_needs_costs_from_somewhere(bayplan, project, check_refusal):
    assert bayplan("capture", "train:build", "-o", "graph.json").code == 0
    check_refusal(bayplan("simulate", "graph.json"), 2, "needs a profile, or a device")


def test_unwritable_output_is_refused_before_anything_runs(
    bayplan, project, monkeypatch, check_refusal
):
    (project / "file").write_text("mine")
    (project / "folder").mkdir()
    monkeypatch.setattr("bayplan.preparing.step.capture_step", pytest.fail)
    monkeypatch.setattr("bayplan.preparing.step.PreparedStep.build", pytest.fail)
    for command in ("profile", "capture"):
        for output in ("file/out.json", "folder", "/proc/nowhere/out.json"):
            check_refusal(bayplan(command, "train:build", "-o", output), 2, "cannot write", output)
    assert (project / "file").read_text() == "mine"
    assert list((project / "folder").iterdir()) == []


def test_output_into_a_folder_to_be_made_is_fine(bayplan, project):
    assert bayplan("capture", "train:build", "-o", "new/deep/graph.json").code == 0
    assert (project / "new/deep/graph.json").stat().st_size > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_write_leaves_the_old_file_and_nothing_else(
    bayplan, project, monkeypatch, error, check_refusal, files_in
):
    (project / "graph.json").write_text("old")
    before = files_in(project)

    def fail(self, target):
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    outcome = bayplan("capture", "train:build", "-o", "graph.json")
    monkeypatch.undo()
    assert outcome.out == ""
    if isinstance(error, KeyboardInterrupt):
        assert (outcome.code, outcome.err) == (130, "bayplan: interrupted; no file was changed\n")
    else:
        check_refusal(outcome, 2, "cannot write graph.json", "No space left")
    assert (project / "graph.json").read_text() == "old"
    assert files_in(project) == before
