"""Settings of the exchange: ranges, contradictions, text, JSON."""

import msgspec
import pytest

from bayplan.data.errors import UsageError
from bayplan.data.exchange import EXCHANGE_HELP, Algorithm, Compression, ExchangeSettings

ALL = ExchangeSettings(
    fusion_threshold_bytes=64 << 20,
    cycle_time_ms=2.5,
    cache_enabled=True,
    hierarchical_allreduce=True,
    hierarchical_allgather=True,
    algorithm=Algorithm.HIERARCHICAL,
    strip_bytes=(1 << 18) + 1,
    compression=Compression.BF16,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fusion_threshold_bytes": -1}, "bytes is -1, must be from 0 to 1073741824"),
        ({"fusion_threshold_bytes": 2**30 + 1}, "is 1073741825, must be from 0 to 1073741824"),
        ({"cycle_time_ms": -0.1}, r"cycle_time_ms is -0.1, must be from 0 to 1000"),
        ({"cycle_time_ms": 1001}, "cycle_time_ms is 1001, must be from 0 to 1000"),
        ({"cycle_time_ms": float("nan")}, "cycle_time_ms is nan, must be from 0 to 1000"),
        ({"strip_bytes": 4095}, "strip_bytes is 4095, must be from 4096 to 1073741824"),
        ({"strip_bytes": 2**31}, "strip_bytes is 2147483648, must be from 4096 to 1073741824"),
    ],
)
def test_a_setting_outside_its_range_is_refused_with_both_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        ExchangeSettings(**fields)


@pytest.mark.parametrize(
    ("algorithm", "hierarchical", "message"),
    [
        (Algorithm.RING, True, "algorithm is ring, hierarchical_allreduce is on"),
        (Algorithm.HIERARCHICAL, False, "algorithm is hierarchical, hierarchical_allreduce is off"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(algorithm, hierarchical, message):
    with pytest.raises(ValueError, match=message):
        ExchangeSettings(algorithm=algorithm, hierarchical_allreduce=hierarchical)


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": Algorithm.RING, "hierarchical_allreduce": False},
        {"algorithm": Algorithm.HIERARCHICAL, "hierarchical_allreduce": True},
        {"algorithm": Algorithm.AUTO, "hierarchical_allreduce": True},
        {"fusion_threshold_bytes": 0},
        {"fusion_threshold_bytes": 1 << 30, "cycle_time_ms": 1000, "strip_bytes": 1 << 12},
    ],
)
def test_the_ends_of_ranges_and_settings_that_agree_are_taken(fields):
    assert ExchangeSettings(**fields)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (ExchangeSettings(), "planned"),
        (ExchangeSettings(fusion_threshold_bytes=0), "fusion_threshold=0"),
        (ExchangeSettings(fusion_threshold_bytes=1 << 30), "fusion_threshold=1GiB"),
        (ExchangeSettings(fusion_threshold_bytes=1000), "fusion_threshold=1000"),
        (
            ALL,
            "fusion_threshold=64MiB,cycle_time=2.5,cache_enabled=on,hierarchical_allreduce=on,"
            "hierarchical_allgather=on,algorithm=hierarchical,strip=262145,compression=bf16",
        ),
    ],
)
def test_text_and_json_give_back_the_same_settings(settings, text):
    assert str(settings) == text
    assert ExchangeSettings.parse(text) == settings
    assert msgspec.json.decode(msgspec.json.encode(settings), type=ExchangeSettings) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fusion_treshold=1MiB", "did you mean 'fusion_threshold'"),
        ("algorithm", "algorithm has no value"),
        ("algorithm=tree", "Invalid enum value 'tree'"),
        ("cycle_time=soon", "cycle_time is 'soon', must be milliseconds, like 5"),
        ("cycle_time=5000", r"cycle_time_ms is 5000.0, must be from 0 to 1000"),
        ("cache_enabled=1", "cache_enabled is '1', must be on or off"),
        ("fusion_threshold=some", "cannot read 'some' as bytes"),
        ("fusion_threshold=2GiB", "is 2147483648, must be from 0 to 1073741824"),
    ],
)
def test_text_that_is_no_setting_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        ExchangeSettings.parse(text)


def test_json_is_checked_as_any_other_input():
    with pytest.raises(msgspec.ValidationError, match=r"cycle_time_ms is 2000\.0"):
        msgspec.json.decode(b'{"cycle_time_ms": 2000}', type=ExchangeSettings)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"torus_allreduce": true}', type=ExchangeSettings)


def test_every_setting_says_what_it_does_and_pointless_ones_say_why():
    assert set(EXCHANGE_HELP) == set(ExchangeSettings.__struct_fields__)
    pointless = [name for name, text in EXCHANGE_HELP.items() if "No effect here: " in text]
    assert pointless == ["cache_enabled", "hierarchical_allgather"]
    assert "nothing is negotiated" in EXCHANGE_HELP["cache_enabled"]
