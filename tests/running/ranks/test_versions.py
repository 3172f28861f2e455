"""Which weights a batch sees while others are in flight."""

import pytest
import torch
from torch import nn

from bayplan.running.ranks.gradients import Versions


def weights_seen(lags, stage, *, is_vertical, num_batches):
    """Train a number that counts its updates; return what each batch's forward is given.

    The weight lies in one stage; its backward, and so its update, is `lag` calls behind.
    """
    counter = nn.Parameter(torch.zeros(()))
    versions = Versions({"counter": counter}, {"counter": [stage]}, lags, is_vertical=is_vertical)
    seen = []
    for call in range(num_batches + lags[stage]):
        versions.refresh()
        if call < num_batches:
            seen.append(versions.weight("counter"))
        if call >= lags[stage]:
            versions.begin_update([stage], call - lags[stage])
            with torch.no_grad():
                counter += 1
    return [int(weight) for weight in seen], versions


def test_without_lag_every_batch_sees_the_newest_weights():
    counter = nn.Parameter(torch.zeros(()))
    versions = Versions({"counter": counter}, {"counter": [0]}, (0,))
    before = counter.data_ptr()
    for number in range(3):
        assert int(versions.weight("counter")) == number
        versions.begin_update([0], number)
        with torch.no_grad():
            counter += 1
    assert counter.data_ptr() == before, "no copy is made that nobody needs"
    assert versions.staleness == [0, 0, 0]


@pytest.mark.parametrize(
    ("lags", "stage", "expected"),
    [
        ((2, 1, 0), 0, [0, 0, 0, 1, 2, 3]),
        ((2, 1, 0), 1, [0, 0, 1, 2, 3, 4]),
        ((1, 0), 0, [0, 0, 1, 2, 3, 4]),
    ],
)
def test_a_batch_in_flight_keeps_the_weights_its_forward_saw(lags, stage, expected):
    seen, versions = weights_seen(lags, stage, is_vertical=False, num_batches=6)
    assert seen == expected
    assert versions.staleness == [min(number, lags[stage]) for number in range(6)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_vertical_sync_shows_weights_of_one_age_in_all_stages(stage):
    seen, versions = weights_seen((2, 1, 0), stage, is_vertical=True, num_batches=6)
    # The last stage is updated at once, and yet looks back as far as the first.
    assert seen == [0, 0, 0, 1, 2, 3]
    assert versions.staleness == [0, 1, 2, 2, 2, 2]


def test_after_a_flush_the_newest_weights_are_seen():
    _, versions = weights_seen((2, 1, 0), 2, is_vertical=True, num_batches=4)
    versions.settle()
    assert int(versions.weight("counter")) == 4
