"""How far figures may be off."""

import pytest

from bayplan.costing.catalogue import cluster_names, load_device, read_cluster
from bayplan.data.device import Figure
from bayplan.simulating.network import compute_spread, link_spread, source_spread, worst_spread


def test_what_was_measured_is_trusted_most_and_a_guess_least():
    words = ("measured here", "fit to published reports: x", "data sheet: HBM2", "guess: 5 us")
    shares = [source_spread(word) for word in words]
    assert shares == sorted(shares)
    assert len(set(shares)) == 4
    assert source_spread("somebody said so") == source_spread("guess")


def test_the_least_trusted_figure_decides():
    figures = [Figure(1.0, "measured here"), Figure(2.0, "guess: twice that")]
    assert worst_spread(figures) == source_spread("guess")
    assert worst_spread([]) == 0.0


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_of_the_catalogue_has_an_interval(name):
    cluster = read_cluster(name)
    assert 0 < link_spread(cluster) <= 0.3
    assert 0 < compute_spread(cluster.kinds.values()) <= 0.3


def test_devices_of_data_sheets_are_guesses():
    assert compute_spread([load_device("a100")]) == pytest.approx(0.3)
