"""What may be chosen, and what is refused before anything runs."""

import msgspec
import pytest

from bayplan.data.errors import UsageError
from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.running.tuning.space import Range, SearchSpace

MIB = 1 << 20
PLANNED = ExchangeSettings()
RING = ExchangeSettings(fusion_threshold_bytes=MIB, algorithm=Algorithm.RING)
SHARED = ExchangeSettings(fusion_threshold_bytes=8 * MIB, algorithm=Algorithm.SHARED)
THRESHOLDS = Range("fusion_threshold_bytes", MIB, 64 * MIB)


def threshold(setting, mib):
    return msgspec.structs.replace(setting, fusion_threshold_bytes=mib * MIB)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SearchSpace(()), "no setting to choose from"),
        (lambda: SearchSpace((RING, PLANNED, RING)), "more than once: fusion_threshold=1MiB"),
        (lambda: SearchSpace((RING,), (THRESHOLDS, THRESHOLDS)), "two ranges of one setting"),
        (lambda: Range("algorithm", 1, 2), "'algorithm' has no range; those with one: fusion"),
        (lambda: Range("cycle_time_ms", 5, 5), "from 5 to 5, its end must be above its start"),
        (lambda: Range("cycle_time_ms", 5, float("inf")), "from 5 to inf, its end must be finite"),
        (lambda: Range("fusion_threshold_bytes", 0, 5), "from 0 to 5, its start must be 1 or more"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_range_beyond_the_settings_own_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"cycle_time_ms is 2000, must be from 0 to 1000"):
        SearchSpace((PLANNED,), (Range("cycle_time_ms", 0, 2000),))


def test_kinds_are_what_is_left_without_what_has_a_range():
    space = SearchSpace((PLANNED, RING, threshold(RING, 4), SHARED), (THRESHOLDS,))
    assert space.kinds == (RING, threshold(SHARED, 1))  # planned buckets have no threshold


def test_a_space_contains_its_candidates_and_what_lies_in_its_ranges():
    space = SearchSpace((PLANNED, RING), (THRESHOLDS,))
    assert space.contains(PLANNED)
    assert space.contains(threshold(RING, 64))
    assert not space.contains(threshold(RING, 65))
    assert not space.contains(SHARED)
    assert not SearchSpace((PLANNED, RING)).contains(threshold(RING, 2))
