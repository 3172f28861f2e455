"""Every matrix becomes joints that give it back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.costing.catalogue import load_device
from bayplan.data import files
from bayplan.data.cluster import LinkKind
from bayplan.data.cluster_file import ClusterFile
from bayplan.data.topology import Topology, cluster_file_of, read_topology, with_measured_copies
from bayplan.simulating.wiring import Wiring

FOLDER = Path(__file__).parent / "topologies"
PCIE = [LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.NODE, LinkKind.SYS]


def file_of(name, device, **options):
    topology = read_topology((FOLDER / f"{name}.txt").read_text())
    return cluster_file_of(topology, device=device, name=name, **options)


def joints_of(file):
    return {
        (str(joint.kind), joint.bandwidth_bytes_per_s.value): joint.joins
        for joint in file.hosts[0].joints
    }


@pytest.mark.parametrize("name", ["titanv-8", "titanv-8-in-a-document"])
def test_the_reports_server_is_a_tree(name):
    file = file_of(name, "titan-v")
    assert joints_of(file) == {
        ("PIX", 12e9): ("0|1", "2|3", "4|5", "6|7"),
        ("PHB", 10e9): ("0-1|2-3", "4-5|6-7"),
        ("SYS", 5e9): ("0-3|4-7",),
    }
    assert file.network is None


def test_two_hosts_are_joined_by_their_cards():
    file = file_of("titanv-8", "titan-v", num_hosts=2, card_gbits_per_s=25)
    cluster = file.cluster(load_device)
    assert len(cluster.devices) == 16
    assert cluster.joints[-1].joins == ((tuple(range(8)), tuple(range(8, 16))),)
    assert cluster.joints[-1].bandwidth_bytes_per_s.value == 3e9


def test_each_gpu_has_the_card_near_it():
    file = file_of("h100-8-with-cards", "h100", num_hosts=4)
    assert file.network.wires_per_host == 8
    assert file_of("dgx-1-v100", "v100", num_hosts=2).network.wires_per_host == 4


def test_more_nvlinks_than_a_gpu_has_come_from_a_switch():
    assert joints_of(file_of("h100-8-with-cards", "h100")) == {
        ("NVLINK", 18 * 20.6e9): ("0|1|2|3|4|5|6|7",)
    }


def test_a_cube_of_nvlinks_has_pairs():
    assert joints_of(file_of("dgx-1-v100", "v100")) == {
        ("NVLINK", 40e9): ("0|3", "0|4", "1|2", "1|5", "2|3", "4|7", "5|6", "6|7"),
        ("NVLINK", 20e9): ("0|1", "0|2", "1|3", "2|6", "3|7", "4|5", "4|6", "5|7"),
        ("SYS", 5e9): ("0-3|4-7",),
    }


def test_bridges_join_two():
    joints = joints_of(file_of("a100-8-with-bridges", "a100"))
    assert joints[("NVLINK", 240e9)] == ("0|1", "2|3", "4|5", "6|7")
    assert joints[("NODE", 20e9)] == ("0|1|2|3", "4|5|6|7")


def test_one_gpu_needs_no_joints():
    file = file_of("one-gpu", "rtx-4090")
    assert file.hosts[0].joints == ()
    assert len(file.cluster(load_device).devices) == 1


def test_a_device_that_is_not_known_gets_the_slowest_guess():
    topology = read_topology("GPU0 GPU1 CPU Affinity\nGPU0 X NV4 0\nGPU1 NV4 X 0")
    joint = cluster_file_of(topology, device="mine", name="x").hosts[0].joints[0]
    assert joint.bandwidth_bytes_per_s.value == 80e9
    assert "generation is not known" in joint.bandwidth_bytes_per_s.source


def test_every_figure_is_a_guess_and_says_so():
    for joint in file_of("dgx-1-v100", "v100").hosts[0].joints:
        assert joint.latency_seconds.source.startswith("guess: ")
        assert joint.bandwidth_bytes_per_s.source.startswith("guess: ")


def test_what_is_written_reads_back():
    file = file_of("dgx-1-v100", "v100", num_hosts=3)
    for content, is_yaml in ((files.encode_yaml(file), True),):
        assert files.decode(content, ClusterFile, name="x", is_yaml=is_yaml) == file


@st.composite
def trees(draw):
    """Matrices of a tree: the kind of two is that of the lowest level where they meet."""
    number = draw(st.integers(2, 8))
    levels, groups = [], list(range(number))
    for kind in PCIE:
        merge = draw(st.lists(st.integers(0, 2), min_size=number, max_size=number))
        if kind is LinkKind.SYS:
            merge = [0] * number
        groups = [groups.index(group) // (1 + merge[group]) for group in groups]
        groups = [sorted(set(groups)).index(group) for group in groups]
        levels.append((kind, list(groups)))
    levels[-1] = (LinkKind.SYS, [0] * number)
    return [
        [
            next(kind for kind, group in levels if group[one] == group[other])
            for other in range(number)
        ]
        for one in range(number)
    ]


@st.composite
def any_matrices(draw):
    number = draw(st.integers(2, 6))
    matrix = [[LinkKind.SYS] * number for _ in range(number)]
    for one in range(number):
        for other in range(one):
            matrix[one][other] = matrix[other][one] = draw(
                st.sampled_from([*PCIE, LinkKind.NVLINK])
            )
    return matrix


def check_gives_back(matrix):
    numbers = range(len(matrix))
    topology = Topology(
        kinds=tuple(
            tuple(None if one == other else matrix[one][other] for other in numbers)
            for one in numbers
        ),
        nvlinks=tuple(
            tuple(int(one != other and matrix[one][other] == "NVLINK") for other in numbers)
            for one in numbers
        ),
        affinities=("0-7",) * len(matrix),
    )
    file = cluster_file_of(topology, device="v100", name="random")
    wiring = Wiring(file.cluster(load_device))
    for one in numbers:
        for other in numbers:
            if one != other:
                route = wiring.route(one, other)
                assert route.kind == matrix[one][other]
                assert route.num_hops == 1
    return file


@given(trees())
def test_every_tree_is_given_back_by_its_joints(matrix):
    check_gives_back(matrix)


@given(any_matrices())
def test_every_other_matrix_is_given_back_pair_by_pair(matrix):
    check_gives_back(matrix)


def test_measured_copies_take_the_place_of_guesses():
    file = file_of("titanv-8", "titan-v")
    copies = {
        (one, other): (1e-5 + one * 1e-6, 11e9 if other - one == 1 else 4e9 + other)
        for one in range(8)
        for other in range(one + 1, 8)
    }
    measured = with_measured_copies(file, copies, source="measured here")
    pix, phb, sys = measured.hosts[0].joints
    assert pix.bandwidth_bytes_per_s.value == 11e9
    assert pix.latency_seconds.value == pytest.approx(1.6e-5)  # of 6 and 7
    assert phb.bandwidth_bytes_per_s.value == 4e9 + 2  # of 0 and 2; 1 and 2 are faster
    assert sys.bandwidth_bytes_per_s.value == 4e9 + 4
    assert sys.bandwidth_bytes_per_s.source == "measured here"
    assert measured.hosts[0].copy_bytes_per_s == file.hosts[0].copy_bytes_per_s
    nothing = with_measured_copies(file, {}, source="x")
    assert nothing == file
