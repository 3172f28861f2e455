"""Mistakes of a user: one clear screen, the right exit code, nothing of ours, no file left."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from bayplan.data.device import DeviceKind
from bayplan.profiling.catalogue import load_device

ONE_SCREEN = 24


def check_refusal(outcome, code: int, *phrases: str) -> None:
    """What every refusal has in common."""
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert outcome.err.startswith("bayplan: ")
    assert "Traceback" not in outcome.err
    assert len(outcome.err.splitlines()) <= ONE_SCREEN
    for phrase in phrases:
        assert phrase in outcome.err


def files_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (["fit", "resnet05"], ["no reference model 'resnet05'", "did you mean", "'resnet50'"]),
        (["fit", "zzz"], ["known: alexnet", "module:function"]),
        (["fit", "missing:build"], ["cannot find module 'missing'", "PYTHONPATH"]),
        (["fit", "pkg.missing:build"], ["cannot find module 'pkg.missing'"]),
        (["fit", "train:biuld"], ["has no function 'biuld'", "did you mean 'build'"]),
        (["fit", "train:Missing"], ["has no function 'Missing'"]),
        (["fit", "train.py:build"], ["write module:function", "my_project.train:build"]),
        (["fit", "./train:build"], ["write module:function"]),
        (["fit", ":build"], ["write module:function"]),
        (["fit", "train:"], ["write module:function"]),
        (["fit", "train:build", "--batch", "0"], ["--batch is 0", "at least 1"]),
        (["fit", "train:build", "--batch", "-3"], ["--batch is -3", "at least 1"]),
        (["fit", "train:build", "--batch", "many"], ["--batch", '"many"']),
        (["fit", "train:build", "--memory", "8XB"], ["cannot read '8XB' as bytes", "8GiB"]),
        (["fit", "train:build", "--memory", ""], ["cannot read '' as bytes"]),
        (["fit", "train:build", "--memory", "0"], ["no memory at all"]),
        (["fit", "train:build", "--memory", "-1GiB"], ["'-1GiB' as bytes"]),
        (["fit", "train:build", "--device", "h10"], ["no device 'h10'", "did you mean 'h100'"]),
        (["fit", "train:build", "--device", "qqq"], ["known: a10, a100"]),
        (["fit", "train:build", "--device", "no.yaml"], ["cannot read no.yaml"]),
        (["fit", "train:build", "--optimizer", "adamx"], ["no optimizer 'adamx'", "'adam'"]),
        (["fit", "train:build", "--autocast", "bf61"], ["no autocast 'bf61'", "'bf16'"]),
        (["fit", "train:build", "--cluster", "no.yaml"], ["cannot read no.yaml"]),
        (["fit", "train:build", "--profile", "no.json"], ["cannot read no.json"]),
        (
            ["fit", "train:build", "--device", "h100", "--cluster", "c.yaml"],
            ["--device and --cluster", "give one"],
        ),
        (["fit", "train:build", "--bach", "2"], ["--bach", "--batch", "bayplan fit --help"]),
        (["fit"], ["TARGET", "bayplan fit --help"]),
        (["fitt", "resnet18"], ["fitt", '"fit"']),
        (["profile", "train:build", "--repeats", "0"], ["repeats is 0", "at least 1"]),
        (["profile", "train:build", "--clock", "cup"], ["no clock 'cup'", "'cpu'"]),
        (["capture", "train:build"], ["--output"]),
        (["simulate", "no.json", "--device", "h100"], ["cannot read no.json"]),
        (["report", "no.json"], ["cannot read no.json"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].islower() else "",
)
def test_mistake_is_named_with_what_would_help(bayplan, project, arguments, phrases):
    before = files_in(project)
    check_refusal(bayplan(*arguments), 2, *phrases)
    assert files_in(project) == before


FUNCTIONS = """\
def number():
    return 3


def pair():
    return Net(), make_batch(2)


def swapped():
    return make_batch(2), Net(), nn.CrossEntropyLoss()


def word_for_loss():
    return Net(), make_batch(2), "mse"


def no_batch():
    return build(4)


def two_needed(batch_size, width):
    return build(batch_size)


def no_scalar(batch_size=2):
    return Net(), make_batch(batch_size), nn.CrossEntropyLoss(reduction="none")


def frozen(batch_size=2):
    return Net().requires_grad_(False), make_batch(batch_size), nn.CrossEntropyLoss()


def tensor_for_pair(batch_size=2):
    return Net(), make_batch(batch_size)[0], nn.CrossEntropyLoss()
"""


@pytest.mark.parametrize(
    ("function", "options", "phrases"),
    [
        ("number", (), ["must return (model, batch, loss)", "it returns int"]),
        ("pair", (), ["must return (model, batch, loss)", "tuple of 2 items"]),
        ("swapped", (), ["must return (model, batch, loss)", "a module first"]),
        ("word_for_loss", (), ["returns a loss that is no function but str"]),
        ("no_batch", ("--batch", 2), ["takes no batch size", "--batch 2", "batch_size"]),
        ("two_needed", (), ["needs width", "give those a default"]),
        ("no_scalar", (), ["loss of one number", "(2,)"]),
        ("frozen", (), ["nothing to train", "requires_grad"]),
        ("tensor_for_pair", (), ["pair (inputs, targets)", "a tensor of shape (2, 3, 16, 16)"]),
    ],
)
def test_wrong_function_is_told_what_it_must_return(
    bayplan, add_to_project, function, options, phrases
):
    add_to_project(FUNCTIONS)
    check_refusal(bayplan("fit", f"train:{function}", *options), 2, *phrases)


def check_users_traceback(outcome, line: str, *phrases: str) -> None:
    """Their frames first, then one line of ours, and no frame of ours or torch's."""
    assert outcome.code == 2
    assert outcome.out == ""
    *trace, last = outcome.err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert last.startswith("bayplan: ")
    frames = re.findall(r'File "(.*)", line', outcome.err)
    assert frames
    assert all(Path(frame).name == "train.py" for frame in frames)
    assert any(line in part for part in trace)
    for phrase in phrases:
        assert phrase in last


FAILING = """\
def check(images):
    raise KeyError("no such colour")


class Raises(Net):
    def forward(self, images):
        check(images)
        return super().forward(images)


class Decides(Net):
    def forward(self, images):
        if images.sum().item() > 0:
            images = images * 2
        return super().forward(images)


class Mismatched(Net):
    def forward(self, images):
        return self.head(self.conv(images))


def raises(batch_size=2):
    return Raises(), make_batch(batch_size), nn.CrossEntropyLoss()


def decides(batch_size=2):
    return Decides(), make_batch(batch_size), nn.CrossEntropyLoss()


def mismatched(batch_size=2):
    return Mismatched(), make_batch(batch_size), nn.CrossEntropyLoss()


def own_loss(batch_size=2):
    def loss(output, targets):
        return output.undefined

    return Net(), make_batch(batch_size), loss


def broken(batch_size=2):
    raise RuntimeError("no data here")


def leaves(batch_size=2):
    import sys

    sys.exit("usage: train.py --lr LR")
"""


@pytest.mark.parametrize(
    ("function", "line", "phrases"),
    [
        ("raises", 'raise KeyError("no such colour")', ["fails in its own code", "KeyError"]),
        ("decides", "images.sum().item()", ["needs a tensor's value", "torch.where"]),
        ("mismatched", "self.head(self.conv(images))", ["RuntimeError"]),
        ("own_loss", "output.undefined", ["AttributeError"]),
        ("broken", 'raise RuntimeError("no data here")', ["RuntimeError: no data here"]),
        ("leaves", "sys.exit", ["ends the process", "__main__"]),
    ],
)
@pytest.mark.parametrize("command", ["fit", "profile", "capture"])
def test_users_own_failure_shows_their_frames_and_one_line(
    bayplan, add_to_project, project, command, function, line, phrases
):
    add_to_project(FAILING)
    output = () if command == "fit" else ("-o", "out.json")
    outcome = bayplan(command, f"train:{function}", *output)
    check_users_traceback(outcome, line, *phrases)
    assert not (project / "out.json").exists()


def test_failure_names_file_line_and_text(bayplan, add_to_project, project):
    add_to_project(FAILING)
    lines = (project / "train.py").read_text().splitlines()
    number = 1 + next(index for index, line in enumerate(lines) if "no such colour" in line)
    last = bayplan("fit", "train:raises").err.splitlines()[-1]
    assert f'train.py:{number} (`raise KeyError("no such colour")`)' in last


def test_import_that_fails_shows_the_users_line(bayplan, add_to_project):
    add_to_project("colours = undefined_name")
    outcome = bayplan("fit", "train:build")
    check_users_traceback(outcome, "undefined_name", "importing 'train' fails", "NameError")


def test_module_missing_inside_the_users_module_is_theirs(bayplan, project):
    # Its name begins like the target's, and yet it is not the target that is missing.
    (project / "trainer.py").write_text("import trainerlib\n")
    outcome = bayplan("fit", "trainer:build")
    assert outcome.code == 2
    assert "No module named 'trainerlib'" in outcome.err
    assert "cannot find module" not in outcome.err
    (project / "tra.py").write_text("import tr\n")
    outcome = bayplan("fit", "tra:build")
    assert "importing 'tra' fails: No module named 'tr'" in outcome.err


def test_syntax_error_is_named_with_its_line(bayplan, project):
    (project / "typo.py").write_text("def build(:\n")
    outcome = bayplan("fit", "typo:build")
    check_refusal(outcome, 2, "SyntaxError", "typo.py, line 1")


def test_script_that_reads_its_own_arguments_is_told_so(bayplan, project):
    (project / "script.py").write_text("import sys\nsys.exit(3)\n")
    outcome = bayplan("fit", "script:build")
    assert outcome.code == 2
    assert "ends the process with SystemExit(3)" in outcome.err
    assert '`if __name__ == "__main__":`' in outcome.err


def test_values_that_only_a_real_step_sees_fail_without_our_traceback(bayplan, add_to_project):
    """A class too high passes the capture, which knows no values, and fails in the first step."""
    add_to_project(
        "def too_high():\n"
        "    return Net(), (make_batch(2)[0], torch.tensor([3, 10])), nn.CrossEntropyLoss()\n"
    )
    assert bayplan("fit", "train:too_high", "--device", "h100").code == 0
    check_refusal(
        bayplan("profile", "train:too_high", "--no-cache"), 2, "Target 10 is out of bounds"
    )


def test_forward_that_changes_between_steps_cannot_be_profiled(bayplan, add_to_project):
    add_to_project(
        "class Moody(Net):\n"
        "    calls = 0\n\n"
        "    def forward(self, images):\n"
        "        Moody.calls += 1\n"
        "        return super().forward(images + 1 if Moody.calls > 4 else images)\n\n\n"
        "def moody(batch_size=2):\n"
        "    return Moody(), make_batch(batch_size), nn.CrossEntropyLoss()\n"
    )
    outcome = bayplan("profile", "train:moody", "--no-cache", "-o", "out.json")
    check_refusal(outcome, 2, "aten.add.Tensor at node 0", "changes from step to step")
    assert not Path("out.json").exists()


def test_profile_of_another_model_exits_5(bayplan, add_to_project, project):
    add_to_project(
        "def wide(batch_size=2):\n"
        "    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))\n"
        "    return model, make_batch(batch_size), nn.CrossEntropyLoss()\n"
    )
    assert bayplan("profile", "train:wide", "-o", "wide.json", "--repeats", 1).code == 0
    outcome = bayplan("fit", "train:build", "--profile", "wide.json", "--memory", "1GiB")
    check_refusal(outcome, 5, "the profile is of 'train:wide'", "the step is 'train:build'")
    # Another batch size, optimizer or precision is another step as well.
    outcome = bayplan(
        "fit", "train:wide", "--batch", 3, "--profile", "wide.json", "--memory", "1GiB"
    )
    check_refusal(outcome, 5, "bayplan profile")
    graph = project / "graph.json"
    assert bayplan("capture", "train:build", "-o", graph).code == 0
    check_refusal(bayplan("simulate", graph, "--profile", "wide.json"), 5, "'train:wide'")


def test_profile_of_another_device_exits_5(bayplan, project):
    for name, options in (("h100.json", ("--device", "h100")), ("here.json", ("--repeats", 1))):
        assert bayplan("profile", "train:build", "-o", name, *options).code == 0
    outcome = bayplan("fit", "train:build", "--profile", "h100.json")
    check_refusal(outcome, 5, "derived for h100", "--device h100")
    outcome = bayplan("fit", "train:build", "--device", "v100", "--profile", "h100.json")
    check_refusal(outcome, 5, "is of h100", "asks about v100")
    outcome = bayplan("fit", "train:build", "--device", "h100", "--profile", "here.json")
    check_refusal(outcome, 5, "is of cpu", "asks about h100")


def test_profile_of_a_gpu_that_is_not_here_needs_a_limit(bayplan, project, monkeypatch):
    assert bayplan("profile", "train:build", "-o", "p.json", "--repeats", 1).code == 0
    fields = json.loads((project / "p.json").read_text())
    (project / "p.json").write_text(json.dumps({**fields, "device": "NVIDIA Imaginary"}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcome = bayplan("fit", "train:build", "--profile", "p.json")
    check_refusal(outcome, 2, "no NVIDIA Imaginary is here", "--memory")
    options = ("--profile", "p.json", "--memory", "1GiB")
    assert bayplan("fit", "train:build", *options).code == 0


def damaged(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_file_with_an_unknown_field_is_refused_by_name(bayplan, project):
    assert bayplan("profile", "train:build", "--device", "h100", "-o", "p.json").code == 0
    fields = json.loads((project / "p.json").read_text())
    path = damaged(project / "p.json", {**fields, "colour": "red"})
    outcome = bayplan("fit", "train:build", "--device", "h100", "--profile", path)
    check_refusal(outcome, 2, "p.json", "`colour`")


def test_cluster_file_with_an_unknown_field_is_refused_by_place(bayplan, project):
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
    outcome = bayplan("fit", "train:build", "--cluster", "cluster.yaml")
    check_refusal(outcome, 2, "cluster.yaml", "`colour`", "$.hosts[0]")


def test_device_file_with_a_fault_is_refused_by_place(bayplan, project):
    kind: DeviceKind = load_device("v100")
    fields = msgspec.to_builtins(kind)
    fields["memory_bytes"] = {"value": -1, "source": "guess"}
    path = damaged(project / "mine.json", fields)
    outcome = bayplan("fit", "train:build", "--device", path)
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
def test_graph_file_that_cannot_be_used_is_refused(bayplan, project, content, phrase):
    path = damaged(project / "graph.json", content)
    check_refusal(bayplan("simulate", path, "--device", "h100"), 2, "graph.json", phrase)


def test_simulate_needs_costs_from_somewhere(bayplan, project):
    assert bayplan("capture", "train:build", "-o", "graph.json").code == 0
    check_refusal(bayplan("simulate", "graph.json"), 2, "needs a profile, or a device")


def test_unwritable_output_is_refused_before_anything_runs(bayplan, project, monkeypatch):
    (project / "file").write_text("mine")
    (project / "folder").mkdir()
    monkeypatch.setattr("bayplan.questions.Question.capture", pytest.fail)
    monkeypatch.setattr("bayplan.questions.Question.build", pytest.fail)
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
    bayplan, project, monkeypatch, error
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


def test_bug_of_ours_says_so_and_exits_1(bayplan, project, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("an invariant broke")

    monkeypatch.setattr("bayplan.api.simulate_step", fail)
    outcome = bayplan("fit", "train:build", "--device", "h100")
    assert outcome.code == 1
    assert "an invariant broke" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("bayplan: this is a bug of bayplan")
