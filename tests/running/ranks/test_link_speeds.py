"""How fast ranks of this machine talk."""

import pytest

from bayplan.data.links import LinkSpeed
from bayplan.running.ranks import link_speeds


def test_speeds_are_measured_once_and_kept(tmp_path, monkeypatch):
    measured = link_speeds.local_link_speeds(tmp_path)
    assert measured is not None
    for speed in (measured.message, measured.reduce):
        assert 0 < speed.latency_seconds < 10
        assert speed.bytes_per_second > 1000
    (kept,) = (tmp_path / "links").iterdir()
    monkeypatch.setattr(link_speeds, "launch", lambda *args, **options: 1)
    assert link_speeds.local_link_speeds(tmp_path) == measured
    kept.write_text("{}")  # damaged, so it would be measured anew; ranks that fail tell nothing
    assert link_speeds.local_link_speeds(tmp_path) is None


def test_ctrl_c_while_ranks_measure_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(link_speeds, "launch", lambda *args, **options: 130)
    with pytest.raises(KeyboardInterrupt):
        link_speeds.local_link_speeds(tmp_path)


@pytest.mark.parametrize(
    "fields", [{"latency_seconds": -1.0}, {"bytes_per_second": 0.0}, {"cores": -1.0}]
)
def test_speeds_below_zero_are_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        LinkSpeed(**{"latency_seconds": 0.0, "bytes_per_second": 1.0, **fields})
