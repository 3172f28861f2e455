"""Ways and wires on clusters that can be drawn."""

import msgspec
import pytest

from bayplan.data.cluster import ClusterDevice, Joint, Link, LinkKind
from bayplan.data.device import Figure
from bayplan.simulating.wiring import Wiring

replace = msgspec.structs.replace


def figure(value):
    return Figure(value, "guess")


def joint(kind, joins, bandwidth, **fields):
    return Joint(
        kind=kind,
        joins=joins,
        latency_seconds=figure(1e-5),
        bandwidth_bytes_per_s=figure(bandwidth),
        **fields,
    )


def link(ends, bandwidth, kind=LinkKind.PIX, shared=""):
    return Link(
        ends=ends,
        kind=kind,
        latency_seconds=figure(1e-5),
        bandwidth_bytes_per_s=figure(bandwidth),
        shared=shared,
    )


@pytest.fixture
def make(cluster):
    def make(number, *, joints=(), links=(), num_hosts=1):
        devices = tuple(
            ClusterDevice(kind="tiny-gpu", host=at * num_hosts // number) for at in range(number)
        )
        hosts = cluster.hosts * num_hosts
        return replace(cluster, hosts=hosts, devices=devices, joints=joints, links=links)

    return make


def names(route):
    return [wire.name for wire in route.wires]


def test_a_message_passes_all_wires_up_and_down(make):
    tree = make(
        4,
        joints=(
            joint(LinkKind.PIX, (((0,), (1,)), ((2,), (3,))), 12e9),
            joint(LinkKind.SYS, (((0, 1), (2, 3)),), 5e9),
        ),
    )
    wiring = Wiring(tree)
    assert names(wiring.route(0, 1)) == ["PIX 0 of 0-1 out", "PIX 1 of 0-1 in"]
    far = wiring.route(1, 2)
    assert names(far) == [
        "PIX 1 of 0-1 out",
        "SYS 0-1 of 0-3 out",
        "PIX 2 of 2-3 in",
        "SYS 2-3 of 0-3 in",
    ]
    assert far.bandwidth_bytes_per_s == 5e9
    assert far.kind is LinkKind.SYS


def test_the_narrowest_wire_decides(make):
    tree = make(
        4,
        joints=(
            joint(LinkKind.PIX, (((0,), (1,)), ((2,), (3,))), 3e9),
            joint(LinkKind.SYS, (((0, 1), (2, 3)),), 5e9),
        ),
    )
    assert Wiring(tree).route(0, 3).bandwidth_bytes_per_s == 3e9


def test_nvlinks_are_not_passed_by_others(make):
    pairs = make(
        4,
        joints=(
            joint(LinkKind.NVLINK, (((0,), (1,)), ((2,), (3,))), 40e9),
            joint(LinkKind.SYS, (((0,), (1,), (2,), (3,)),), 5e9),
        ),
    )
    wiring = Wiring(pairs)
    assert names(wiring.route(0, 2)) == ["SYS 0 of 0-3 out", "SYS 2 of 0-3 in"]
    assert wiring.route(0, 1).kind is LinkKind.NVLINK  # the faster of two ways
    assert list(wiring.neighbours_by_pairs(3)) == [2]


def test_cards_are_not_for_messages_within_a_host(make):
    wide = make(
        4,
        num_hosts=2,
        joints=(
            joint(LinkKind.SYS, (((0,), (1,)), ((2,), (3,))), 5e9),
            joint(LinkKind.NET, (((0,), (1,), (2,), (3,)),), 12e9),
        ),
    )
    wiring = Wiring(wide)
    assert wiring.route(0, 1).kind is LinkKind.SYS
    assert wiring.route(0, 2).kind is LinkKind.NET


def test_both_directions_may_share_a_wire(make):
    half = make(2, joints=(joint(LinkKind.MEMORY, (((0,), (1,)),), 1e9, is_duplex=False),))
    wiring = Wiring(half)
    assert names(wiring.route(0, 1)) == ["MEMORY 0 of 0-1", "MEMORY 1 of 0-1"]
    assert set(names(wiring.route(1, 0))) == set(names(wiring.route(0, 1)))


def test_links_share_by_their_word(make):
    shared = make(4, links=(link((0, 1), 8e9, shared="up"), link((2, 3), 6e9, shared="up"),
                            link((1, 2), 9e9)))  # fmt: skip
    wiring = Wiring(shared)
    assert wiring.route(0, 1).wires == wiring.route(2, 3).wires
    assert names(wiring.route(0, 1)) == ["shared up"]
    assert len(wiring.route(1, 2).wires) == 2


def test_devices_pass_messages_on_where_no_joint_reaches(make):
    line = make(4, links=(link((0, 1), 8e9), link((1, 2), 6e9), link((2, 3), 9e9)))
    route = Wiring(line).route(0, 3)
    assert route.num_hops == 3
    assert route.latency_seconds == pytest.approx(3e-5)
    assert route.bandwidth_bytes_per_s == 6e9
    assert len(route.wires) == 6


def test_a_step_of_a_ring_is_two_messages_unless_measured(make):
    plain = make(2, joints=(joint(LinkKind.PIX, (((0,), (1,)),), 1e9),))
    assert Wiring(plain).route(0, 1).step_seconds == 2e-5
    measured = joint(
        LinkKind.PIX,
        (((0,), (1,)),),
        1e9,
        reduce_latency_seconds=figure(7e-5),
        reduce_bandwidth_bytes_per_s=figure(5e8),
    )
    route = Wiring(make(2, joints=(measured,))).route(0, 1)
    assert route.step_seconds == 7e-5
    assert {wire.reduce_bytes_per_s for wire in route.wires} == {5e8}
    assert route.bandwidth_bytes_per_s == 1e9


def test_joints_of_one_kind_keep_their_wires_apart(make):
    double = make(
        2,
        joints=(
            joint(LinkKind.NVLINK, (((0,), (1,)),), 20e9),
            joint(LinkKind.NVLINK, (((0,), (1,)),), 40e9),
        ),
    )
    assert names(Wiring(double).route(0, 1))[0] == "NVLINK.2 0 of 0-1 out"


def test_a_cluster_that_says_nothing_of_links_has_no_ways(make):
    with pytest.raises(ValueError, match="2 devices, and neither links nor joints between them"):
        Wiring(make(2))
    Wiring(make(1))
