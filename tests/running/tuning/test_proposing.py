"""Proposals of Optuna: inside their ranges, where good ones lie, and the same every time."""

import math
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bayplan.data.errors import UsageError
from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.running.tuning import tuned
from bayplan.running.tuning.space import Range, SearchSpace, propose

MIB = 1 << 20
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
SPACE = SearchSpace(
    (
        ExchangeSettings(),
        *(
            ExchangeSettings(fusion_threshold_bytes=size * MIB, algorithm=name)
            for size in SIZES
            for name in (Algorithm.RING, Algorithm.SHARED)
        ),
    ),
    (Range("fusion_threshold_bytes", MIB, 128 * MIB), Range("cycle_time_ms", 0, 10)),
)


def log_seconds(setting):
    """Best at 8 MiB, shared memory, no waiting."""
    off = math.log2((setting.fusion_threshold_bytes or MIB) / (8 * MIB))
    return off**2 + setting.cycle_time_ms + (setting.algorithm is not Algorithm.SHARED)


def proposals(seed=0, count=40):
    believed = [(one, log_seconds(one)) for one in SPACE.candidates]
    return propose(SPACE, believed, count=count, seed=seed)


def test_proposals_lie_inside_and_crowd_where_good_ones_are():
    found = proposals()
    assert found
    assert all(SPACE.contains(one) for one in found)
    assert len(set(found)) == len(found)
    sizes = [one.fusion_threshold_bytes for one in found if one.fusion_threshold_bytes]
    assert 3 < statistics.median(sizes) / MIB < 20
    assert sum(one.algorithm is Algorithm.SHARED for one in found) > len(found) / 2
    assert all(size_bytes % 4096 == 0 for size_bytes in sizes)


def test_the_same_seed_proposes_the_same():
    assert proposals(seed=3) == proposals(seed=3) != proposals(seed=4)


def test_nothing_is_proposed_where_no_candidate_has_a_number_to_change():
    space = SearchSpace((ExchangeSettings(),), (Range("fusion_threshold_bytes", 1, MIB),))
    assert propose(space, [(ExchangeSettings(), 0.0)], count=3, seed=0) == []


def test_without_optuna_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'bayplan\[tune\]'"):
        proposals()


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_model_is_tuned_without_ranges_where_optuna_is_not_installed(is_installed, monkeypatch):
    if not is_installed:
        monkeypatch.setitem(sys.modules, "optuna", None)
    exchange = SimpleNamespace(costs=SimpleNamespace(seconds_of={"ring": None, "shared": None}))
    space = tuned._space(exchange)
    assert len(space.candidates) == 7
    assert len(space.ranges) == is_installed


def test_a_tuner_is_there_without_waiting_for_optuna_or_torch():
    script = (
        "import sys, bayplan.running.tuning.tuner; print({'optuna', 'torch'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
