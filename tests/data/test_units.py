import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.data.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        (1024, 1024),
        ("512 B", 512),
        ("1.5kB", 1500),
        ("1.5 KiB", 1536),
        ("7606 MB", 7_606_000_000),
        ("8GiB", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("8 GB", 8_000_000_000),
        ("  2 TiB ", 2 * 2**40),
        ("0.5m", 2**19),
        ("0.6", 1),
    ],
)
def test_bytes_are_read(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 GiB free", "-8GiB", "8,5GiB", "1e9", "8XiB", "nan"])
def test_nonsense_is_refused_with_an_example(text):
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert str(caught.value) == (
        f"cannot read {text!r} as bytes; write a number and a unit, like 8GiB"
    )


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0001kB", 0])
def test_nothing_is_refused(text):
    with pytest.raises(
        UsageError, match=r"is not a usable limit; write at least 1 byte, like 8GiB"
    ):
        parse_bytes(text)


@given(st.integers(1, 2**63))
def test_whole_bytes_are_read_exactly(size_bytes):
    assert parse_bytes(size_bytes) == parse_bytes(f"{size_bytes} B") == size_bytes


def test_a_number_beyond_all_floats_is_still_a_number():
    assert parse_bytes("9" * 400) == int("9" * 400)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (8 * 2**30, "8.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_printed(size_bytes, text):
    assert format_bytes(size_bytes) == text


def test_more_digits_can_be_asked_for():
    assert format_bytes(1_234_567, digits=3) == "1.177 MiB"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(2**20 - 1, "1.0 MiB"), (2**30 - 1, "1.0 GiB"), (1023.9, "1.0 KiB")],
)
def test_rounding_up_moves_to_the_next_unit(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.integers(1, 2**60))
def test_printed_bytes_read_back_within_the_rounding(size_bytes):
    read = parse_bytes(format_bytes(size_bytes, digits=3))
    assert read == pytest.approx(size_bytes, rel=0.5e-3, abs=1)  # reading back rounds once more


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (66, "66.0 s"),
        (1234.5, "1234 s"),
        (9.996, "10.0 s"),
        (0.99951, "1.00 s"),
        (0.4213, "421 ms"),
        (0.00012, "120 us"),
        (2e-9, "2 ns"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_are_printed_with_three_digits(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(1e-6, 999))
def test_printed_seconds_are_within_the_rounding(seconds):
    number, unit = format_seconds(seconds).split()
    factor = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert math.isclose(float(number) * factor, seconds, rel_tol=0.51e-2)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (1000, "1.0 k"),
        (25_557_032, "25.6 M"),
        (7e9, "7.0 G"),
        (-2e12, "-2.0 T"),
        (999_960, "1.0 M"),
    ],
)
def test_counts_are_printed(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(3.53e9, "3.53 GB/s"), (125e6, "125 MB/s"), (1e3, "1 kB/s"), (12, "12 B/s")]
)
def test_rates_are_printed_in_thousands(rate, text):
    assert format_rate(rate) == text


def test_an_allocator_rounds_up():
    assert [round_up(size_bytes, 512) for size_bytes in (0, 1, 512, 1000)] == [0, 512, 512, 1024]


def test_a_number_of_thousands_of_digits_is_refused_and_not_repeated():
    # Python refuses to read it with a ValueError of its own, which no command expects.
    with pytest.raises(UsageError, match="as bytes; write a number") as refused:
        parse_bytes("9" * 6000 + "GiB")
    assert len(str(refused.value)) < 150
