"""Messages and sums on clusters whose answers are known by hand."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.costing.catalogue import read_cluster
from bayplan.data.cluster import Cluster, ClusterDevice, Host, Joint, LinkKind
from bayplan.data.device import DeviceKind, Figure, OpClass
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import Network
from bayplan.simulating.rings import find_rings, ring_flows
from bayplan.simulating.wiring import Wiring

GB = 1e9


def figure(value):
    return Figure(value, "guess")


KIND = DeviceKind(
    name="tiny",
    memory_bytes=figure(1e9),
    context_bytes=figure(0),
    bandwidth_bytes_per_s=figure(1e11),
    flops_per_s={"float32": figure(1e12)},
    vector_flops_per_s=figure(1e12),
    efficiency={op_class: figure(0.5) for op_class in OpClass},
    launch_seconds=figure(1e-6),
)


def joint(kind, joins, bandwidth, latency=1e-5):
    return Joint(
        kind=kind,
        joins=joins,
        latency_seconds=figure(latency),
        bandwidth_bytes_per_s=figure(bandwidth),
    )


def make(number, joints, num_hosts=1):
    return Cluster(
        name="drawn",
        kinds={"tiny": KIND},
        hosts=(Host(name="host", memory_bytes=figure(1e12)),) * num_hosts,
        devices=tuple(
            ClusterDevice(kind="tiny", host=at * num_hosts // number) for at in range(number)
        ),
        joints=tuple(joints),
    )


def bus_bandwidth(network, devices):
    """In the words of nccl-tests: what a ring moves, as if all wires were as fast."""
    number = len(devices)
    return 2 * (number - 1) / number * GB / network.reduce(devices, GB).seconds


@pytest.fixture(scope="module")
def titans():
    return ClusterNetwork(read_cluster("titanv-8"))


@pytest.fixture(scope="module")
def dgx_1():
    return ClusterNetwork(read_cluster("dgx-1-v100"))


def test_it_is_a_network(titans):
    network: Network = titans
    assert network.message(0, 1, GB).alone_seconds == pytest.approx(8e-6 + 1 / 12)


def test_nothing_is_sent_to_oneself(titans):
    assert titans.message(3, 3, GB).alone_seconds == 0
    assert titans.reduce([3], GB).alone_seconds == 0


def test_a_device_counts_once_in_a_sum(titans):
    with pytest.raises(ValueError, match="counts a device twice"):
        titans.reduce([1, 2, 1], GB)


def test_the_reports_ring(titans):
    # research on reports 000 to 002: 3.53 GB/s over 8 GPUs, 1 ms for each sum; stages 4.8 GB/s.
    assert bus_bandwidth(titans, range(8)) == pytest.approx(3.53 * GB)
    assert bus_bandwidth(titans, range(7)) == pytest.approx(3.53 * GB)
    assert titans.reduce(range(8), GB).latency_seconds == pytest.approx(1e-3, rel=0.01)
    assert titans.route(0, 7).bandwidth_bytes_per_s == 4.8 * GB


def test_devices_close_to_each_other_sum_up_faster(titans):
    assert bus_bandwidth(titans, (0, 1)) == pytest.approx(12 * GB)
    assert bus_bandwidth(titans, range(4)) == pytest.approx(10 * GB)
    assert bus_bandwidth(titans, (0, 4)) == pytest.approx(3.53 * GB)


def test_a_ring_passes_slow_wires_once_whatever_order_is_given(titans):
    mixed = titans.reduce([0, 4, 1, 5, 2, 6, 3, 7], GB)
    assert mixed.seconds == pytest.approx(titans.reduce(range(8), GB).seconds)
    assert set(mixed.wires) == {
        f"SYS {side} of 0-7 {way}" for side in ("0-3", "4-7") for way in ("in", "out")
    }


def test_a_cube_of_nvlinks_has_rings_in_both_directions(dgx_1):
    # 6 NVLinks of 20 GB/s at each GPU, all of them busy.
    assert bus_bandwidth(dgx_1, range(8)) == pytest.approx(120 * GB)
    assert dgx_1.route(0, 3).bandwidth_bytes_per_s == 40 * GB
    assert dgx_1.route(0, 5).bandwidth_bytes_per_s == 5 * GB


def test_the_switch_of_an_a100_is_one_ring():
    switched = ClusterNetwork(read_cluster("dgx-a100"))
    assert bus_bandwidth(switched, range(8)) == pytest.approx(240 * GB)


def test_hosts_sum_up_inside_first_where_that_is_faster():
    four = ClusterNetwork(read_cluster("4xdgx-a100"))
    # 2 x 7/8 over NVLink, then 2 x 3/4 of an eighth over each of 8 cards.
    expected = 2 * 7 / 8 / 240 + 2 * 3 / 4 / 8 / 24
    assert four.reduce(range(32), GB).seconds == pytest.approx(expected)
    flat = 2 * 31 / 32 / 24
    assert expected < flat


def test_a_host_with_fewer_devices_bounds_the_rings_between_hosts():
    two = ClusterNetwork(read_cluster("2xdgx-a100"))
    uneven = two.reduce([*range(8), 8, 9], GB)
    # Two rings of two hosts, after 8 and 2 devices have summed up.
    assert uneven.seconds == pytest.approx(2 * 7 / 8 / 240 + 2 * 1 / 2 / 2 / 24)


def test_small_sums_over_many_hosts_go_by_trees():
    many = ClusterNetwork(read_cluster("512xdgx-h100"))
    devices = range(0, 4096, 8)
    small, large = many.reduce(devices, 1024), many.reduce(devices, 1e12)
    assert small.latency_seconds == pytest.approx(9 * 2e-5)
    assert large.latency_seconds == pytest.approx(511 * 2e-5)
    assert large.seconds == pytest.approx(2 * 511 / 512 * 1000 / 48)


def test_thousands_of_devices_are_answered_from_groups():
    many = ClusterNetwork(read_cluster("512xdgx-h100"))
    whole = many.reduce(range(4096), GB)
    assert whole.seconds == pytest.approx(2 * 7 / 8 / 370 + 2 * 511 / 512 / 8 / 48, rel=0.01)
    assert many.reduce(tuple(range(4096)), 2 * GB).seconds == pytest.approx(2 * whole.seconds)
    assert len(whole.wires) == 8192  # the cards, out and in; NVLinks are busy less than half of it
    assert many.message(5, 4005, GB).seconds == pytest.approx(1 / 48)
    assert [(level.kind, level.num_together) for level in many.levels()] == [
        ("NVLINK", 8),
        ("NET", 4096),
    ]


def test_levels_are_nested_from_near_to_far():
    levels = ClusterNetwork(read_cluster("titanv-2x8")).levels()
    assert [(level.kind, level.bandwidth_bytes_per_s / GB) for level in levels] == [
        ("PIX", 12),
        ("PHB", 10),
        ("SYS", 4.8),
        ("NET", 3),
    ]
    assert levels[1].groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    for near, far in itertools.pairwise(levels):
        for group in near.groups:
            assert any(set(group) <= set(larger) for larger in far.groups)
    assert levels[-1].groups == (tuple(range(16)),)


def test_a_fast_network_is_still_farther_than_the_host():
    slow_inside = make(
        4,
        [
            joint(LinkKind.SYS, (((0,), (1,)), ((2,), (3,))), 5 * GB),
            joint(LinkKind.NET, (((0, 1), (2, 3)),), 12 * GB),
        ],
        num_hosts=2,
    )
    levels = ClusterNetwork(slow_inside).levels()
    assert [level.groups for level in levels] == [((0, 1), (2, 3)), ((0, 1, 2, 3),)]


def test_copies_to_the_host_pass_the_slot(titans):
    copy = titans.host_copy(3, 12 * GB)
    assert copy.seconds == pytest.approx(1.0)
    assert copy.wires == ("PIX 3 of 2-3 out", "PHB 2-3 of 0-3 out")
    back = titans.host_copy(3, 12 * GB, outward=False)
    assert not set(back.wires) & set(copy.wires)


def test_a_host_that_does_not_say_how_fast_it_copies(dgx_1):
    unknown = make(2, [joint(LinkKind.PIX, (((0,), (1,)),), GB)])
    with pytest.raises(ValueError, match="host host of cluster drawn has no copy_bytes_per_s"):
        ClusterNetwork(unknown).host_copy(0, GB)


def test_a_wire_that_is_less_than_half_busy_is_left_out(titans):
    assert titans.message(0, 4, GB).wires == ("SYS 0-3 of 0-7 out", "SYS 4-7 of 0-7 in")
    assert "PIX 0 of 0-1 out" in titans.message(0, 2, GB).wires


# Rings of links that are drawn at random.

RATES = st.sampled_from([0, 10 * GB, 20 * GB, 40 * GB])


@st.composite
def meshes(draw):
    number = draw(st.integers(3, 6))
    joints = [joint(LinkKind.SYS, (tuple((at,) for at in range(number)),), GB)]
    for one, other in itertools.combinations(range(number), 2):
        if rate := draw(RATES):
            joints.append(joint(LinkKind.NVLINK, (((one,), (other,)),), rate))
    return make(number, joints)


def best_ring(network, number):
    """By trying all."""
    return max(
        min(
            network.route(one, other).bandwidth_bytes_per_s
            for one, other in zip(order, [*order[1:], order[0]], strict=True)
        )
        for rest in itertools.permutations(range(1, number))
        for order in [[0, *rest]]
    )


@settings(max_examples=40)
@given(meshes())
def test_the_first_ring_is_the_widest_there_is(mesh):
    network = ClusterNetwork(mesh)
    wiring = Wiring(mesh)
    devices = range(len(mesh.devices))
    rings = find_rings(wiring, devices)
    assert rings[0].bytes_per_s == pytest.approx(best_ring(network, len(devices)))
    used = {}
    for ring in rings:
        assert sorted(ring.devices) == list(devices)
        for wire, flows in ring_flows(wiring, [ring.devices]).items():
            used[wire] = used.get(wire, 0.0) + flows * ring.bytes_per_s
    for wire, rate in used.items():
        assert rate <= wire.reduce_bytes_per_s * 1.000001


@settings(max_examples=40)
@given(meshes(), st.data())
def test_sums_do_not_depend_on_the_order_of_devices(mesh, data):
    numbers = range(len(mesh.devices))
    devices = data.draw(st.lists(st.sampled_from(numbers), min_size=2, unique=True))
    size = data.draw(st.floats(0, 1e10))
    network = ClusterNetwork(mesh)
    one, other = network.reduce(devices, size), network.reduce(sorted(devices), size)
    assert one.alone_seconds == pytest.approx(other.alone_seconds)
    assert network.reduce(devices, 2 * size).alone_seconds >= one.alone_seconds
    assert one.alone_seconds > 0
