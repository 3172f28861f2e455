"""The short form that people write, and all of what it stands for."""

import msgspec
import pytest

from bayplan.data import files
from bayplan.data.cluster import Cluster, LinkKind
from bayplan.data.cluster_file import ClusterFile
from bayplan.data.errors import FileFault

LAB = """
schema: bayplan/cluster
version: 1
name: lab
hosts:
  - name: node
    count: 2
    memory_bytes: {value: 1e11, source: guess}
    devices: {tiny-gpu: 3, other: 1}
    joints:
      - kind: PIX
        joins: ["0|1", "2|3"]
        latency_seconds: {value: 1e-5, source: guess}
        bandwidth_bytes_per_s: {value: 12e9, source: guess}
      - kind: PHB
        joins: ["0-1|2,3"]
        latency_seconds: {value: 1e-5, source: guess}
        bandwidth_bytes_per_s: {value: 10e9, source: guess}
        reduce_bandwidth_bytes_per_s: {value: 5e9, source: measured}
network:
  wires_per_host: 2
  latency_seconds: {value: 2e-5, source: guess}
  bandwidth_bytes_per_s: {value: 3e9, source: guess}
"""


def read(text=LAB):
    return files.decode(text.encode(), ClusterFile, name="lab.yaml", is_yaml=True)


@pytest.fixture
def find_kind(kind):
    return lambda name: msgspec.structs.replace(kind, name=name)


def test_hosts_that_are_alike_stand_once(find_kind):
    cluster = read().cluster(find_kind)
    assert [host.name for host in cluster.hosts] == ["node-0", "node-1"]
    assert [(device.kind, device.host) for device in cluster.devices] == [
        *[("tiny-gpu", 0)] * 3,
        ("other", 0),
        *[("tiny-gpu", 1)] * 3,
        ("other", 1),
    ]
    pix, phb, net = cluster.joints
    assert pix.joins == (((0,), (1,)), ((2,), (3,)), ((4,), (5,)), ((6,), (7,)))
    assert phb.joins == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert phb.reduce_bandwidth_bytes_per_s.value == 5e9
    assert net.kind is LinkKind.NET
    assert net.joins == (((0, 1), (2, 3), (4, 5), (6, 7)),)


def test_a_file_that_says_everything_is_understood(find_kind):
    whole = read().cluster(find_kind)
    again = files.decode(files.encode(whole), ClusterFile, name="whole.json")
    assert again.cluster(find_kind) == whole
    assert again.cluster(find_kind).fingerprint == whole.fingerprint


def test_a_cluster_of_links_is_understood(cluster, find_kind):
    again = files.decode(files.encode(cluster), ClusterFile, name="pair.json")
    assert again.cluster(find_kind) == cluster


@pytest.mark.parametrize("name", ["lab.yaml", "lab.json"])
def test_what_is_written_by_hand_reads_back(tmp_path, name):
    files.write_by_hand(tmp_path / name, read())
    text = (tmp_path / name).read_text()
    assert files.read(tmp_path / name, ClusterFile) == read()
    assert "links" not in text
    assert text.lstrip("{\n ").startswith(("schema: bayplan/cluster", '"schema"'))


def test_a_thousand_hosts_stay_short(find_kind):
    many = read(LAB.replace("count: 2", "count: 1024")).cluster(find_kind)
    assert len(many.devices) == 4096
    assert len(many.joints) == 3
    assert len(many.joints[2].joins[0]) == 2048


def test_more_cards_than_devices_are_one_each(find_kind):
    many = read(LAB.replace("wires_per_host: 2", "wires_per_host: 64")).cluster(find_kind)
    assert many.joints[-1].joins == (tuple((device,) for device in range(8)),)


def test_the_network_of_one_host_waits_for_others(find_kind):
    one = read(LAB.replace("count: 2", "count: 1"))
    assert [joint.kind for joint in one.cluster(find_kind).joints] == ["PIX", "PHB"]
    three = one.times(3)
    assert three.name == "3xlab"
    assert len(three.cluster(find_kind).devices) == 12


def test_several_need_a_network(cluster):
    lonely = read(LAB[: LAB.index("network:")].replace("count: 2", "count: 1"))
    with pytest.raises(ValueError, match="lab has no network, which 2 of its hosts would need"):
        lonely.times(2)
    numbered = files.decode(files.encode(cluster), ClusterFile, name="pair.json")
    with pytest.raises(ValueError, match="numbers its devices over all hosts"):
        msgspec.structs.replace(numbered, network=read().network).times(2)


def test_hosts_without_a_network_do_not_reach_each_other(find_kind):
    with pytest.raises(ValueError, match="device 4 is not reached from device 0"):
        read(LAB[: LAB.index("network:")]).cluster(find_kind)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"0|1"', '"0|9"', "hosts[0].joints[0].joins[0] is '0|9', but there is no device 9"),
        ('"2|3"', '"2|3|2"', "hosts[0].joints[0].joins[1] names device 2 twice"),
        ('"2|3"', '"2-3"', "hosts[0].joints[0].joins[1] has 1 side, must be two or more"),
        ("12e9", "0", "hosts[0].joints[0].bandwidth_bytes_per_s is 0, must be more"),
        ("3e9", "0", "network.bandwidth_bytes_per_s is 0, must be more"),
        ("wires_per_host: 2", "wires_per_host: 0", "network.wires_per_host is 0, must be at"),
        ("count: 2", "count: 20000", "80000 devices, at most 65536 are allowed"),
        ("devices: {tiny-gpu: 3, other: 1}", "devices: {tiny-gpu: 2}", "there is no device 2"),
    ],
)
def test_a_fault_is_named_with_its_place(find_kind, old, new, message):
    assert old in LAB
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is looked at below
        read(LAB.replace(old, new)).cluster(find_kind)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 2", "count: 0", "count is 0, must be from 1 to 65536 - at `$.hosts[0]`"),
        ("other: 1", "other: -1", "other is -1, must be from 1 to 65536 - at `$.hosts[0]`"),
        ("kind: PIX", "kind: WIFI", "Invalid enum value 'WIFI' - at `$.hosts[0].joints[0].kind`"),
        ("12e9, source: guess", "12e9", "missing required field `source`"),
        ("12e9", "-1", "value is -1"),
        ("network:", "networks:", "unknown field `networks`"),
        ("    devices: {tiny-gpu: 3, other: 1}\n", "", "which its `devices` must list"),
    ],
)
def test_a_file_with_a_fault_is_refused_as_it_is_read(old, new, message):
    assert old in LAB
    with pytest.raises(FileFault) as refusal:
        read(LAB.replace(old, new, 1))
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("lab.yaml: ")


def test_devices_stand_in_one_place(find_kind):
    both = LAB + "devices: [{kind: tiny-gpu, host: 0}]\n"
    with pytest.raises(ValueError, match="devices stand both under hosts and beside them"):
        read(both).cluster(find_kind)


def test_a_kind_may_have_another_name(find_kind, kind):
    text = LAB + "kinds: {other: v100}\n"
    assert read(text).cluster(find_kind).kinds["other"].name == "v100"
    described = msgspec.structs.replace(read(), kinds={"other": kind})
    whole = described.cluster(find_kind)
    assert isinstance(whole, Cluster)
    assert whole.kinds["other"] == kind
    assert whole.kind_of(3) == kind
