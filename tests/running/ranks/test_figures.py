"""Numbers that all ranks of a machine see."""

import pytest

from bayplan.running.ranks.local_run import SharedFigures, StepLine, step_line


@pytest.fixture
def two(tmp_path):
    """Two ranks' views of the same page."""
    path = tmp_path / "figures"
    SharedFigures.create(path, num_ranks=2)
    return SharedFigures(path), SharedFigures(path)


def test_what_one_writes_the_other_reads(two):
    one, other = two
    assert other.peaks_bytes == (0, 0)
    one.tell_peak(0, 7)
    other.tell_peak(1, 2**40)
    assert one.peaks_bytes == other.peaks_bytes == (7, 2**40)


def test_all_stop_before_the_same_step(two):
    one, other = two
    assert not other.is_over(10**9)
    one.stop_before(3)
    assert [other.is_over(step) for step in range(5)] == [False, False, False, True, True]
    one.stop_before(5)  # of a second signal, when others may have stopped
    assert other.is_over(3)


def test_a_step_s_line_names_the_fullest_rank():
    line = step_line(
        1,
        4,
        loss=0.25,
        num_samples=6,
        num_measured=1,
        seconds=2.0,
        peaks_bytes=(2**20, 2**30, 2**21),
    )
    assert line == (
        "step 1 of 4, loss 0.2500, 3.0 samples/s, peak 1.0 MiB (1.0 GiB on rank 1), 6.00 s left"
    )
    assert StepLine.parse(line) == StepLine(1, 4, line)


@pytest.mark.parametrize(
    "line", ["", "step one of 4, x", "a step 1 of 4, x", "bayplan: rank 1: no"]
)
def test_other_lines_are_no_step(line):
    assert StepLine.parse(line) is None
