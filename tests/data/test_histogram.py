"""The histogram of messages: its classes, its cells, and report 004's tables given back."""

import json
from math import sqrt
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.data.histogram import COLUMNS, histogram, histogram_text
from bayplan.data.record import size_class

KIB, MIB = 2**10, 2**20
REPORT = json.loads((Path(__file__).parents[2] / "benchmarks/report_004/report.json").read_text())
NUM_RANKS = REPORT["num_ranks"]


@pytest.mark.parametrize(
    ("size_bytes", "name"),
    [
        (1, "(0, 1KB]"),
        (KIB, "(0, 1KB]"),
        (KIB + 1, "(1KB, 1MB]"),
        (MIB, "(1KB, 1MB]"),
        (MIB + 1, "(1MB, 10MB]"),
        (10 * MIB, "(1MB, 10MB]"),
        (10 * MIB + 1, "(10MB, 20MB]"),
        (64 * MIB, "(60MB, 70MB]"),
        (100 * MIB, "(90MB, 100MB]"),
        (100 * MIB + 1, "(100MB, 150MB]"),
        (392 * MIB, "(350MB, 400MB]"),
        (2000 * MIB, "(1950MB, 2000MB]"),
    ],
)
def test_a_class_ends_with_its_upper_limit(size_bytes, name):
    (row,) = histogram([(size_bytes, 1.0)], num_ranks=2)
    assert row.size_class == name


@given(st.integers(1, 10**10))
def test_every_size_is_in_its_class(size_bytes):
    begin, end = size_class(size_bytes)
    assert begin < size_bytes <= end


def test_cells_of_a_class():
    """Four ranks: each moves 1.5 times the message."""
    messages = [(4 * MIB, 0.5), (8 * MIB, 0.5), (64 * MIB, 1.0), (600, 0.0)]
    rows = histogram(messages, num_ranks=4)
    assert histogram_text(rows).splitlines() == [
        "|   |count|mean size/MB|rate/Mbps|total time/s|mean time/ms|share of time|",
        "|---|---|---|---|---|---|---|",
        "|(0, 1KB]|1|0.00|0.00|0.00|0.00|0.00%|",
        "|(1MB, 10MB]|2|6.00|144.00|1.00|500.00|50.00%|",
        "|(60MB, 70MB]|1|64.00|768.00|1.00|1000.00|50.00%|",
    ]
    assert json.loads(msgspec.json.encode(rows[1])) == {
        "size_class": "(1MB, 10MB]",
        "count": 2,
        "mean_bytes": 6.0 * MIB,
        "bus_bits_per_second": 144.0 * MIB,
        "total_seconds": 1.0,
        "mean_seconds": 0.5,
        "share_of_time": 0.5,
    }


def test_no_messages_make_no_rows():
    assert histogram([], num_ranks=4) == []
    assert histogram_text([]).count("\n") == 1


def test_a_single_rank_moves_nothing():
    (row,) = histogram([(MIB, 1.0)], num_ranks=1)
    assert row.bus_bits_per_second == 0.0


def test_what_no_message_can_be_is_refused():
    with pytest.raises(ValueError, match=r"seconds is -1\.0, must be 0 or more"):
        histogram([(1, -1.0)], num_ranks=2)
    with pytest.raises(UsageError, match="messages of 0 ranks"):
        histogram([(1, 1.0)], num_ranks=0)


def messages_like(count, mean_mib, rate, total_seconds):
    """Messages of one size whose times spread just so much that the mean of rates is the report's.

    Half of them are faster and half slower by the same part d of the mean time: the mean of rates
    is then 1 / (1 - d^2) of the rate of the mean.
    """
    seconds = total_seconds / count
    size_bytes = mean_mib * MIB
    plain = 1.5 * 8 * mean_mib / seconds
    spread = sqrt(max(0.0, 1 - plain / rate))
    half = count // 2
    yield from [(round(size_bytes), seconds * (1 - spread))] * half
    yield from [(round(size_bytes), seconds * (1 + spread))] * half
    yield from [(round(size_bytes), seconds)] * (count - 2 * half)


@pytest.mark.parametrize("run", REPORT["runs"], ids=lambda run: run["run"])
def test_report_004_is_given_back(run):
    """Cells as printed, up to what the report's own rounding leaves open.

    It prints two digits. Sizes below 1 MB are too coarse for their rate; above, a class of mixed
    sizes has a mean of rates that differs by up to 2.5 % from that of one size.
    """
    messages = [
        message
        for _, count, mean_mib, rate, total, mean, _ in run["classes"]
        for message in messages_like(count, mean_mib or 5e-4, rate, total or count * mean / 1e3)
    ]
    text = histogram_text(histogram(messages, num_ranks=NUM_RANKS))
    rows = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == [one[0] for one in run["classes"]]
    for row, (_, count, mean_mib, rate, total, mean, share) in zip(
        rows, run["classes"], strict=True
    ):
        shown = dict(zip(COLUMNS, row[1:], strict=True))
        assert shown["count"] == str(count)
        assert shown["mean size/MB"] == f"{mean_mib:.2f}"
        assert float(shown["total time/s"]) == pytest.approx(total, abs=0.005)
        # The total has two digits too, so a mean is only known to its count's part of one.
        assert float(shown["mean time/ms"]) == pytest.approx(mean, abs=0.011 + 5.0 / count)
        assert float(shown["share of time"][:-1]) == pytest.approx(share, abs=0.02)
        if mean_mib >= 1:
            assert float(shown["rate/Mbps"]) == pytest.approx(rate, rel=0.025)
        if mean_mib in (64.0, 392.0):
            assert float(shown["rate/Mbps"]) == pytest.approx(rate, rel=2e-3)
