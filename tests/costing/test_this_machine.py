"""This machine as a cluster, with links that are given: `tests/cli/test_clusters.py` measures."""

import os

import pytest
import torch

from bayplan.costing.catalogue import expand, read_cluster
from bayplan.costing.probe import keep, probe_copy, probe_machine
from bayplan.data.cluster import LinkKind
from bayplan.data.errors import UsageError
from bayplan.data.links import LinkSpeed, LinkSpeeds
from bayplan.devices.device import accelerators_here
from bayplan.simulating.cluster_network import ClusterNetwork

LINKS = LinkSpeeds(
    message=LinkSpeed(latency_seconds=1e-4, bytes_per_second=2e9),
    reduce=LinkSpeed(latency_seconds=2e-4, bytes_per_second=3e9),
)


@pytest.fixture(scope="module")
def several_cores():
    number = len(os.sched_getaffinity(0))
    if number < 2 or accelerators_here():
        pytest.skip("for a machine of several cores and no GPU")
    return number


@pytest.fixture(scope="module")
def probed(several_cores):
    threads = torch.get_num_threads()
    found = probe_machine(lambda: LINKS)
    assert torch.get_num_threads() == threads
    return found


def test_each_core_is_a_device(probed, several_cores):
    cluster = expand(probed, where="here")
    assert len(cluster.devices) == several_cores
    kind = cluster.kind_of(0)
    assert 1e8 < kind.flops_per_s["float32"].value < 1e13
    assert kind.memory_bytes.value * several_cores <= cluster.hosts[0].memory_bytes.value
    assert kind.bandwidth_bytes_per_s.source.startswith("measured by a probe")


def test_links_are_those_that_were_measured(probed, several_cores):
    network = ClusterNetwork(expand(probed, where="here"))
    assert network.route(0, 1).kind is LinkKind.MEMORY
    assert network.message(0, 1, 2e9).alone_seconds == pytest.approx(1.0001)
    transfer = network.reduce(range(several_cores), 3e9)
    expected = LINKS.reduce_seconds(3 * 10**9, several_cores)
    assert transfer.alone_seconds == pytest.approx(expected)


def test_what_is_kept_is_read_by_name(probed, tmp_path, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path))
    keep(probed)
    assert read_cluster("this-machine") == expand(probed, where="here")


def test_cores_that_cannot_talk_are_said(several_cores):
    with pytest.raises(UsageError, match="two processes of this machine could not talk"):
        probe_machine(lambda: None)


def test_copies_are_measured():
    cpu = torch.device("cpu")
    latency, bytes_per_s = probe_copy(cpu, cpu)
    assert 0 < latency < 1
    assert bytes_per_s > 1e6


def test_what_is_probed_is_a_choice(several_cores):
    assert (
        len(expand(probe_machine(lambda: LINKS, on="cpu"), where="here").devices) == several_cores
    )
    with pytest.raises(UsageError, match="--on cuda:1: there is no cuda device here"):
        probe_machine(lambda: LINKS, on="cuda:1")
