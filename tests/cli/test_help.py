"""What `--help` teaches, and that it answers at once."""

import os
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from itertools import pairwise

import pytest

import bayplan as package

COMMANDS = [
    *("check", "profile", "capture", "simulate"),
    *("plan", "run", "tune"),
    *("report", "compare", "explain", "cluster", "doctor"),
]


@pytest.fixture(autouse=True)
def _narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_help_lists_the_commands_in_the_order_of_work(bayplan):
    outcome = bayplan("--help")
    assert outcome.code == 0
    assert outcome.err == ""
    places = [outcome.out.index(f"│ {command} ") for command in COMMANDS]
    assert places == sorted(places)
    assert "  bayplan check resnet50 --batch 32 --memory 8GiB" in outcome.out
    for word in ("module:function", "batch_size", "BAYPLAN_CACHE", "3 does not fit"):
        assert word in outcome.out


def test_no_command_at_all_is_a_call_for_help(bayplan):
    assert bayplan() == bayplan("--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_is_a_snapshot(bayplan, command, snapshot):
    outcome = bayplan(command, "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "\n".join(line.rstrip() for line in outcome.out.splitlines()) == snapshot


@pytest.mark.parametrize("command", COMMANDS)
def test_only_the_width_breaks_paragraphs_and_no_example_wraps(bayplan, command):
    """Lines broken for 100 columns were broken again at 80, into long and short ones by turns."""
    lines = bayplan(command, "--help").out.splitlines()
    text = [line.rstrip() for line in lines if not line.startswith(("│", "╭", "╰"))]
    for line, following in pairwise(text):
        if line and following and not following.startswith((" ", "- ")):
            assert len(line) + 1 + len(following.split()[0]) > 80, (line, following)
            assert not line.startswith("  "), f"an example is too long: {line}"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "doctor"])
def test_help_shows_examples_to_copy(bayplan, command):
    text = bayplan(command, "--help").out
    examples = text[text.index("Examples:\n") :]
    assert f"\n  bayplan {command} " in examples


def test_defaults_are_shown(bayplan):
    text = " ".join(bayplan("profile", "--help").out.replace("│", " ").split())
    for default in ("[default: adamw]", "[default: none]", "[default: 5]", "[default: wall]"):
        assert default in text


def test_version_is_that_of_the_package(bayplan):
    assert bayplan("--version").out.strip() == metadata.version("bayplan") == package.__version__


@pytest.mark.skipif(shutil.which("bash") is None, reason="completes in bash")
def test_installed_completion_knows_commands_and_options(bayplan, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    installed = bayplan("--install-completion", "--shell", "bash")
    assert installed.code == 0
    script = tmp_path / ".local/share/bash-completion/completions/bayplan"
    assert str(script) in installed.out
    for words, expected in (
        (("bayplan", "ch"), "check"),
        (("bayplan", "doctor", "--js"), "--json"),
    ):
        asked = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        done = subprocess.run(
            ["bash", "-c", f"{asked}; _bayplan; echo ${{COMPREPLY[@]}}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [expected]


@pytest.mark.alone  # a busy neighbour costs processor time, too
def test_help_answers_in_0_3_seconds_of_cpu_time():
    # The fastest of several: a busy machine only ever adds.
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", "from bayplan.cli import main; main(['--help'])"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 0.3:
            break
    assert min(seconds) < 0.3
