"""What was found is found again, by the same model on the same ranks only."""

import msgspec
import pytest
from torch import nn

from bayplan.data import files
from bayplan.data.exchange import ComparedSetting, ExchangeSettings, TuningKey, TuningRecord
from bayplan.running.tuning.tuned import keep_tuning, kept_tuning, parameters_fingerprint

KEY = TuningKey.of(model="m", hosts=["a", "b"], devices=["cpu", "cpu"], torch_version="2.13")
RECORD = TuningRecord(
    key=KEY,
    best=ExchangeSettings(fusion_threshold_bytes=1 << 20),
    step_seconds=0.1,
    step_spread=0.01,
    num_steps=80,
    verdict="planned is best",
    compared=(ComparedSetting(setting=ExchangeSettings(), ratio=1.1, spread=0.01),),
)


def file_of(cache, key=KEY):
    return cache / "tuning" / f"{key.name}.json"


@pytest.fixture(autouse=True)
def users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path))


def test_what_was_kept_is_found_again_in_the_users_cache(tmp_path):
    assert kept_tuning(KEY) is None
    keep_tuning(RECORD)
    assert kept_tuning(KEY) == RECORD
    assert file_of(tmp_path).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"host_of_rank": (0, 0)},
        {"devices": ("cpu", "NVIDIA H100")},
        {"torch_version": "2.14"},
    ],
)
def test_another_model_topology_device_or_torch_has_its_own(change):
    keep_tuning(RECORD)
    assert kept_tuning(msgspec.structs.replace(KEY, **change)) is None


def test_names_of_hosts_do_not_matter_but_which_ranks_share_one():
    def key(*hosts):
        return TuningKey.of(model="m", hosts=hosts, devices=["cpu"] * 4, torch_version="2")

    assert key("a", "a", "b", "b") == key("x", "x", "y", "y") != key("a", "b", "a", "b")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"schema": "bayplan/plan", "version": 1}',
        b'{"schema": "bayplan/tuning", "version": 99}',
        files.encode(RECORD).replace(b'"step_seconds": 0.1', b'"step_seconds": -1'),
        files.encode(RECORD).replace(b'"step_seconds": 0.1', b'"step_seconds": 0'),
        files.encode(RECORD).replace(b'"ratio": 1.1', b'"ratio": 0'),
        files.encode(RECORD).replace(b"1048576", b"-1"),
        files.encode(RECORD).replace(b'"best"', b'"worst"'),
        files.encode(msgspec.structs.replace(RECORD, key=msgspec.structs.replace(KEY, model="x"))),
    ],
)
def test_a_damaged_or_foreign_file_is_as_good_as_none(content, tmp_path):
    assert content != files.encode(RECORD), "the damage was done"
    files.write_bytes(file_of(tmp_path), content)
    assert kept_tuning(KEY) is None


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "tuning").write_text("in the way")
    keep_tuning(RECORD)
    assert kept_tuning(KEY) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host_of_rank": (), "devices": ()}, "host_of_rank is empty"),
        ({"devices": ("cpu",)}, "host_of_rank names 2 ranks, devices 1"),
    ],
)
def test_a_key_of_no_ranks_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(KEY, **fields)


def test_the_fingerprint_of_parameters_tells_names_shapes_and_types():
    assert parameters_fingerprint(nn.Linear(3, 4)) == parameters_fingerprint(nn.Linear(3, 4))
    others = [nn.Linear(4, 3), nn.Linear(3, 4).bfloat16(), nn.Sequential(nn.Linear(3, 4))]
    assert len({*map(parameters_fingerprint, [nn.Linear(3, 4), *others])}) == 4
