import msgspec
import pytest

from bayplan.data import files
from bayplan.data.cluster import Cluster, ClusterDevice, Joint, Link, LinkKind
from bayplan.data.device import Figure
from bayplan.data.errors import UsageError
from bayplan.data.placement import Placement

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


# Joints.


def joint(joins, **fields):
    figures = {
        "latency_seconds": Figure(1e-5, "guess"),
        "bandwidth_bytes_per_s": Figure(1e10, "guess"),
    }
    return Joint(kind=LinkKind.PHB, joins=joins, **(figures | fields))


def test_a_joint_joins_as_links_do(cluster):
    joined = replace(cluster, links=(), joints=(joint((((0,), (1,)),)),))
    assert joined.fingerprint != cluster.fingerprint
    assert files.decode(files.encode(joined), Cluster, name="given") == joined


@pytest.mark.parametrize(
    ("joins", "message"),
    [
        ((), r"joints\[0\]\.joins is empty; say which devices it joins, like '0|1'"),
        ((((0, 1),),), r"joints\[0\]\.joins\[0\] has 1 side, must be two or more"),
        ((((0,), ()),), r"joints\[0\]\.joins\[0\] has a side without devices"),
        ((((0,), (0,)),), r"joints\[0\]\.joins\[0\] names device 0 twice"),
        ((((0,), (1,)), ((0,), (1, 1))), r"joints\[0\]\.joins\[1\] names device 1 twice"),
        ((((0,), (2,)),), r"joints\[0\]\.joins\[0\] is 2, must be from 0 to 1"),
    ],
)
def test_a_joint_that_joins_nothing_is_named(cluster, joins, message):
    with pytest.raises(ValueError, match=message):
        replace(cluster, joints=(joint(joins),))


@pytest.mark.parametrize("value", [0.0, float("inf")])
@pytest.mark.parametrize("name", ["bandwidth_bytes_per_s", "reduce_bandwidth_bytes_per_s"])
def test_a_joint_carries_something(cluster, name, value):
    given = joint((((0,), (1,)),), **{name: Figure(value, "guess")})
    with pytest.raises(ValueError, match=rf"joints\[0\]\.{name} is {value:g}, must be"):
        replace(cluster, joints=(given,))


def test_a_device_that_nothing_reaches_is_named(cluster):
    four = replace(cluster, devices=cluster.devices * 2, links=())  # says nothing of links at all
    with pytest.raises(ValueError, match="device 2 is not reached from device 0 by any link"):
        replace(four, joints=(joint((((0,), (1,)), ((2,), (3,)))),))
    reached = replace(four, joints=(joint((((0,), (1,)), ((1,), (2, 3)))),))
    reached.check_reachable()
    with pytest.raises(ValueError, match="device 1 is not reached"):
        four.check_reachable()


def test_the_same_link_twice_is_refused(cluster):
    (link,) = cluster.links
    with pytest.raises(ValueError, match=r"links\[1\] joins devices 0 and 1 by PIX, as links\[0\]"):
        replace(cluster, links=(link, replace(link, ends=(1, 0))))
    replace(cluster, links=(link, replace(link, kind=LinkKind.NVLINK)))  # two ways are welcome


@pytest.mark.parametrize("name", ["input_samples_per_s", "copy_bytes_per_s"])
def test_a_host_that_gives_nothing_leaves_it_out(cluster, name):
    with pytest.raises(ValueError, match=f"{name} is 0, must be more; leave it out"):
        replace(cluster.hosts[0], **{name: Figure(0, "guess")})


def test_too_many_devices_are_a_slip(cluster):
    with pytest.raises(ValueError, match="65537 devices, at most 65536"):
        replace(cluster, devices=cluster.devices[:1] * 65537, links=())


# Placements on a cluster.


def two_hosts(cluster):
    devices = tuple(ClusterDevice(kind="tiny-gpu", host=host) for host in (0, 1, 0, 1, 1))
    return replace(cluster, hosts=cluster.hosts * 2, devices=devices, links=())


def test_a_placement_counts_the_devices_of_each_host(cluster):
    spread = two_hosts(cluster)
    assert spread.devices_of_hosts == ((0, 2), (1, 3, 4))
    placement = Placement.parse("0:0-1,1:2.1:0-1")
    assert spread.numbers_of(placement) == ((0, 2, 4), (1, 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:0-2", "names device 2 of node 0, but there are 2 devices, 0 to 1 in cluster pair"),
        ("2:0", "names node 2, but there are 2 nodes, 0 to 1 in cluster pair"),
    ],
)
def test_a_placement_on_devices_that_are_not_there(cluster, text, message):
    with pytest.raises(UsageError, match=message):
        two_hosts(cluster).numbers_of(Placement.parse(text))
