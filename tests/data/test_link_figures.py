import pytest

from bayplan.costing.catalogue import device_names
from bayplan.data.cluster import LinkKind
from bayplan.data.topology import network_figures, nvlink_figures, pcie_figures, ports_of

PCIE = [LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.NODE, LinkKind.SYS]


@pytest.mark.parametrize("name", device_names())
def test_every_device_of_the_catalogue_has_ports(name):
    ports = ports_of(name)
    assert ports is not None
    assert bool(ports.num_nvlinks) == bool(ports.nvlink_bytes_per_s)


@pytest.mark.parametrize("name", device_names())
def test_what_is_farther_is_never_faster(name):
    figures = [pcie_figures(kind, ports_of(name)) for kind in PCIE]
    rates = [figure["bandwidth_bytes_per_s"].value for figure in figures]
    latencies = [figure["latency_seconds"].value for figure in figures]
    assert rates == sorted(rates, reverse=True)
    assert latencies == sorted(latencies)


def test_figures_that_are_known():
    assert pcie_figures(LinkKind.PIX, ports_of("titan-v"))["bandwidth_bytes_per_s"].value == 12e9
    assert nvlink_figures(12, ports_of("a100"))["bandwidth_bytes_per_s"].value == 240e9
    assert nvlink_figures(18, ports_of("H100"))["bandwidth_bytes_per_s"].value == pytest.approx(
        370e9, rel=0.01
    )
    assert network_figures(400)["bandwidth_bytes_per_s"].value == 48e9
    assert ports_of("abacus") is None
