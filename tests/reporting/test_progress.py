"""The progress bar: on the stderr of a terminal, and nowhere else."""

import pytest

from bayplan.reporting.progress import ProgressBar


def test_no_terminal_no_word(capsys):
    with ProgressBar() as bar:
        bar("capturing", 0, 1)
        bar("running the step", 1, 4)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_bar_that_is_not_wanted_is_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar(is_shown=False) as bar:
        bar("running the step", 1, 4)
    assert capsys.readouterr().err == ""


def test_terminal_shows_what_is_done_and_is_clean_after(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar() as bar:
        bar("running the step", 1, 4)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "running the step" in captured.err
    assert "25%" in captured.err


def test_a_told_line_is_in_the_bar_or_by_itself(capsys, monkeypatch):
    with ProgressBar() as bar:
        bar.tell("step 1 of 4, loss 2.5", 1, 4)
    assert capsys.readouterr().err == "step 1 of 4, loss 2.5\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar() as bar:
        bar.tell("step 1 of 4, loss 2.5", 1, 4)
    shown = capsys.readouterr().err
    assert "step 1 of 4, loss 2.5" in shown
    assert "25%" in shown


def test_error_passes_through_and_ends_the_bar(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(KeyboardInterrupt), ProgressBar() as bar:
        raise KeyboardInterrupt
    assert bar._progress.live.is_started is False


def test_percentage_never_goes_back(monkeypatch):
    """It stood at 100 % and began again: a second search, work with one part, other work."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    seen = []
    with ProgressBar() as bar:
        for what, done, total in (
            *(("planning", done, 100) for done in (0, 50, 100, 0, 30, 100)),
            ("tracing", 0, 1),
            ("running the step", 1, 4),
            ("running the step", 2, 4),
        ):
            bar(what, done, total)
            (task,) = bar._progress.tasks
            seen.append((task.description, None if task.total is None else task.percentage))
    assert seen == [
        ("planning", None),
        *(("planning", share) for share in (50, 100, 100, 100, 100)),
        ("tracing", None),
        ("running the step", 25),
        ("running the step", 50),
    ]
