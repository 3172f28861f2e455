"""Failures in a user's own code: their frames first, then one line of ours."""

import re
from pathlib import Path

import pytest


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
        if self.conv(images).sum().item() > 0:
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
        ("decides", "self.conv(images).sum().item()", ["needs a tensor's value", "torch.where"]),
        ("mismatched", "self.head(self.conv(images))", ["RuntimeError"]),
        ("own_loss", "output.undefined", ["AttributeError"]),
        ("broken", 'raise RuntimeError("no data here")', ["RuntimeError: no data here"]),
        ("leaves", "sys.exit", ["ends the process", "__main__"]),
    ],
)
@pytest.mark.parametrize("command", ["check", "profile", "capture"])
def test_users_own_failure_shows_their_frames_and_one_line(
    bayplan, add_to_project, project, command, function, line, phrases
):
    add_to_project(FAILING)
    output = () if command == "check" else ("-o", "out.json")
    outcome = bayplan(command, f"train:{function}", *output)
    check_users_traceback(outcome, line, *phrases)
    assert not (project / "out.json").exists()


def test_failure_names_file_line_and_text(bayplan, add_to_project, project):
    add_to_project(FAILING)
    lines = (project / "train.py").read_text().splitlines()
    number = 1 + next(index for index, line in enumerate(lines) if "no such colour" in line)
    last = bayplan("check", "train:raises").err.splitlines()[-1]
    assert f'train.py:{number} (`raise KeyError("no such colour")`)' in last


def test_import_that_fails_shows_the_users_line(bayplan, add_to_project):
    add_to_project("colours = undefined_name")
    outcome = bayplan("check", "train:build")
    check_users_traceback(outcome, "undefined_name", "importing 'train' fails", "NameError")


def test_module_missing_inside_the_users_module_is_theirs(bayplan, project):
    # Its name begins like the target's, and yet it is not the target that is missing.
    (project / "trainer.py").write_text("import trainerlib\n")
    outcome = bayplan("check", "trainer:build")
    assert outcome.code == 2
    assert "No module named 'trainerlib'" in outcome.err
    assert "cannot find module" not in outcome.err
    (project / "tra.py").write_text("import tr\n")
    outcome = bayplan("check", "tra:build")
    assert "importing 'tra' fails: ModuleNotFoundError: No module named 'tr'" in outcome.err


def test_syntax_error_is_named_with_its_line(bayplan, project, check_refusal):
    (project / "typo.py").write_text("def build(:\n")
    outcome = bayplan("check", "typo:build")
    check_refusal(outcome, 2, "SyntaxError", "typo.py, line 1")


def test_script_that_reads_its_own_arguments_is_told_so(bayplan, project):
    (project / "script.py").write_text("import sys\nsys.exit(3)\n")
    outcome = bayplan("check", "script:build")
    assert outcome.code == 2
    assert "ends the process with SystemExit(3)" in outcome.err
    assert '`if __name__ == "__main__":`' in outcome.err


def test_values_that_only_a_real_step_sees_fail_without_our_traceback(
    bayplan, add_to_project, check_refusal
):
    """A class too high passes the capture, which knows no values, and fails in the first step."""
    add_to_project(
        "def too_high():\n"
        "    return Net(), (make_batch(2)[0], torch.tensor([3, 10])), nn.CrossEntropyLoss()\n"
    )
    assert bayplan("check", "train:too_high", "--device", "h100").code == 0
    check_refusal(bayplan("profile", "train:too_high", "--again"), 2, "Target 10 is out of bounds")


def test_forward_that_changes_between_steps_cannot_be_profiled(
    bayplan, add_to_project, check_refusal
):
    add_to_project(
        "class Moody(Net):\n"
        "    calls = 0\n\n"
        "    def forward(self, images):\n"
        "        Moody.calls += 1\n"
        "        return super().forward(images + 1 if Moody.calls > 4 else images)\n\n\n"
        "def moody(batch_size=2):\n"
        "    return Moody(), make_batch(batch_size), nn.CrossEntropyLoss()\n"
    )
    outcome = bayplan("profile", "train:moody", "--again", "-o", "out.json")
    check_refusal(outcome, 2, "aten.add.Tensor at node 0", "changes from step to step")
    assert not Path("out.json").exists()
