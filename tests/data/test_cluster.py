import msgspec
import pytest

from bayplan.data import files
from bayplan.data.cluster import Cluster, ClusterDevice, Link
from bayplan.data.device import Figure

replace = msgspec.structs.replace


def with_link(cluster: Cluster, **fields: object) -> Cluster:
    return replace(cluster, links=(replace(cluster.links[0], **fields),))


def test_a_cluster_has_a_device(cluster):
    with pytest.raises(ValueError, match="devices is empty; a cluster has at least one"):
        replace(cluster, devices=(), links=())


def test_an_unknown_kind_is_named(cluster):
    with pytest.raises(ValueError, match=r"devices\[1\]\.kind is 'h100', not one of kinds"):
        replace(cluster, devices=(cluster.devices[0], ClusterDevice(kind="h100", host=0)))


@pytest.mark.parametrize("host", [-1, 1])
def test_an_unknown_host_is_named(cluster, host):
    devices = (cluster.devices[0], ClusterDevice(kind="tiny-gpu", host=host))
    with pytest.raises(ValueError, match=rf"devices\[1\]\.host is {host}, must be from 0 to 0"):
        replace(cluster, devices=devices)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ((0, 2), r"links\[0\]\.ends\[1\] is 2, must be from 0 to 1"),
        ((-1, 0), r"links\[0\]\.ends\[0\] is -1, must be from 0 to 1"),
        ((1, 1), r"links\[0\] joins device 1 to itself"),
    ],
)
def test_a_link_to_nowhere_is_named(cluster, ends, message):
    with pytest.raises(ValueError, match=message):
        with_link(cluster, ends=ends)


def test_a_link_carries_something(cluster):
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s is 0"):
        with_link(cluster, bandwidth_bytes_per_s=Figure(0.0, "guess"))


def test_a_link_is_of_a_known_kind(cluster):
    content = files.encode(cluster).replace(b'"PIX"', b'"WIFI"')
    with pytest.raises(files.FileFault) as caught:
        files.decode(content, Cluster, name="given")
    assert str(caught.value) == "given: Invalid enum value 'WIFI' - at `$.links[0].kind`"


def test_a_link_has_two_ends(cluster):
    content = files.encode(cluster).replace(b'"ends": [\n    0,\n    1\n   ]', b'"ends": [0]')
    with pytest.raises(
        files.FileFault, match=r"Expected `array` of length 2 - at `\$\.links\[0\]\.ends`"
    ):
        files.decode(content, Cluster, name="given")


def test_fingerprint_survives_a_file(cluster):
    read = files.decode(files.encode(cluster), Cluster, name="given")
    assert read.fingerprint == cluster.fingerprint


def test_fingerprint_does_not_depend_on_the_order_of_kinds(cluster, kind):
    other = replace(kind, name="other")
    one = replace(cluster, kinds={"tiny-gpu": kind, "other": other})
    two = replace(cluster, kinds={"other": other, "tiny-gpu": kind})
    assert one.fingerprint == two.fingerprint != cluster.fingerprint


@pytest.mark.parametrize(
    "fields",
    [{"ends": (1, 0)}, {"shared": "switch"}, {"latency_seconds": Figure(2e-5, "data sheet")}],
)
def test_fingerprint_changes_with_a_link(cluster, fields):
    assert with_link(cluster, **fields).fingerprint != cluster.fingerprint


def test_links_are_shared_only_when_said_so(cluster):
    assert isinstance(cluster.links[0], Link)
    assert cluster.links[0].shared == ""
