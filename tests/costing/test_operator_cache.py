"""Prices kept between runs: added to, keyed by what they depend on, never in the way."""

import json
from pathlib import Path

import pytest
import torch

from bayplan.costing.cache import OperatorPrices, Prices, kept_prices
from bayplan.data import files
from bayplan.data.profile import Clock
from bayplan.data.program import Cost

CPU = torch.device("cpu")


def opened(cache: Path, **changed):
    return kept_prices(cache, **{"device": CPU, "clock": Clock.WALL, "method": "malloc", **changed})


def the_file(cache: Path) -> Path:
    (path,) = (cache / "operators").glob("*.json")
    return path


def test_prices_are_there_the_next_time(tmp_path):
    with opened(tmp_path) as prices:
        assert prices == {}
        prices["relu"] = Cost(0.5, 7)
    with opened(tmp_path) as prices:
        assert prices == {"relu": Cost(0.5, 7)}
        prices["add"] = Cost(0.1, 0)
    assert files.read(the_file(tmp_path), OperatorPrices).prices.keys() == {"relu", "add"}


def test_nothing_new_writes_nothing(tmp_path):
    with opened(tmp_path):
        pass
    assert not (tmp_path / "operators").exists()
    with opened(tmp_path) as prices:
        prices["relu"] = Cost(0.5, 7)
    before = the_file(tmp_path).stat().st_mtime_ns
    with opened(tmp_path):
        pass
    assert the_file(tmp_path).stat().st_mtime_ns == before


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path):
    def interrupted() -> None:
        with opened(tmp_path) as prices:
            prices["relu"] = Cost(0.5, 7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with opened(tmp_path) as prices:
        assert prices == {"relu": Cost(0.5, 7)}


def test_prices_measured_anew_replace_those_that_are_kept(tmp_path):
    with opened(tmp_path) as prices:
        prices["relu"] = Cost(0.5, 7)
        prices["add"] = Cost(0.1, 0)
    anew: Prices = {}
    with opened(tmp_path, anew=anew) as prices:
        assert prices == {}
        prices["relu"] = Cost(0.25, 7, 0.01)
    with opened(tmp_path, anew=anew) as prices:
        assert prices == {"relu": Cost(0.25, 7, 0.01)}, "what was measured anew is known since"
    with opened(tmp_path) as prices:
        assert prices == {"relu": Cost(0.25, 7, 0.01), "add": Cost(0.1, 0)}


def test_prices_without_a_spread_are_read(tmp_path):
    with opened(tmp_path) as prices:
        prices["relu"] = Cost(0.5, 7, 0.25)
    path = the_file(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prices": {"relu": [0.5, 7]}}))
    with opened(tmp_path) as prices:
        assert prices == {"relu": Cost(0.5, 7)}


@pytest.mark.parametrize("changed", [{"clock": Clock.CPU}, {"method": "sampled"}])
def test_other_circumstances_have_other_prices(tmp_path, changed):
    with opened(tmp_path) as prices:
        prices["relu"] = Cost(0.5, 7)
    with opened(tmp_path, **changed) as prices:
        assert prices == {}


def test_number_of_threads_matters(tmp_path):
    num_threads = torch.get_num_threads()
    with opened(tmp_path) as prices:
        prices["relu"] = Cost(0.5, 7)
    try:
        torch.set_num_threads(num_threads + 1)
        with opened(tmp_path) as prices:
            assert prices == {}
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"schema": "bayplan/plan", "version": 1, "prices": {}}',
        '{"schema": "bayplan/operator-prices", "version": 3, "prices": {"relu": [-1.0, 0]}}',
        '{"schema": "bayplan/operator-prices", "version": 3, "prices": {"relu": [1.0, -5]}}',
    ],
)
def test_damaged_file_is_made_anew(tmp_path, damage):
    with opened(tmp_path) as prices:
        prices["relu"] = Cost(0.5, 7)
    the_file(tmp_path).write_text(damage)
    with opened(tmp_path) as prices:
        assert prices == {}
        prices["add"] = Cost(0.1, 0)
    assert files.read(the_file(tmp_path), OperatorPrices).prices == {"add": Cost(0.1, 0)}


def test_cache_that_cannot_be_written_costs_nothing_else(tmp_path):
    (tmp_path / "operators").touch()
    with opened(tmp_path) as prices:
        prices["relu"] = Cost(0.5, 7)
    with opened(tmp_path) as prices:
        assert prices == {}


@pytest.mark.parametrize("price", [(-1.0, 0), (float("nan"), 0), (float("inf"), 0), (1.0, -1)])
def test_impossible_price_is_refused(price):
    with pytest.raises(ValueError, match="relu"):
        OperatorPrices(prices={"relu": price})
