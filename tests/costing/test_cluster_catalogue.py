"""The shipped clusters: complete, sourced, as the reports and data sheets have them."""

import re

import pytest

from bayplan.costing.catalogue import (
    THIS_MACHINE,
    cluster_names,
    kept_probe,
    read_cluster,
    read_cluster_file,
)
from bayplan.data import files
from bayplan.data.cluster import given_figures
from bayplan.data.cluster_file import ClusterFile
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.topology import cluster_file_of, read_topology
from bayplan.simulating.wiring import Wiring

NUM_DEVICES = {
    "dgx-1-v100": 8,
    "dgx-a100": 8,
    "dgx-h100": 8,
    "rtx-4090-4": 4,
    "titanv-2x8": 16,
    "titanv-8": 8,
}
SOURCES = ("data sheet", "guess: ", "fit to published reports: ", "published: ")


def test_names_are_sorted_and_complete():
    assert cluster_names() == tuple(NUM_DEVICES)


@pytest.mark.parametrize(("name", "number"), NUM_DEVICES.items())
def test_every_file_loads_under_its_name(name, number):
    cluster = read_cluster(name)
    assert cluster.name == name
    assert cluster.title
    assert len(cluster.devices) == number
    assert re.fullmatch("[0-9a-f]{16}", cluster.fingerprint)


@pytest.mark.parametrize("name", NUM_DEVICES)
def test_every_figure_says_where_it_comes_from(name):
    cluster = read_cluster(name)
    for struct in (*cluster.hosts, *cluster.joints):
        for field, figure in given_figures(struct):
            assert figure.source.startswith(SOURCES), (field, figure)


@pytest.mark.parametrize("name", NUM_DEVICES)
def test_figures_are_of_a_believable_size(name):
    cluster = read_cluster(name)
    for host in cluster.hosts:
        assert 2**36 < host.memory_bytes.value < 2**42
        assert host.pinned_bytes.value <= host.memory_bytes.value
        assert 1e10 < host.copy_bytes_per_s.value < 1e11
    for joint in cluster.joints:
        assert 1e-6 < joint.latency_seconds.value < 1e-4
        assert 1e9 < joint.bandwidth_bytes_per_s.value < 1e12


REPORTED = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	CPU Affinity
GPU0	 X 	PIX	PHB	PHB	SYS	SYS	SYS	SYS	0-13,28-41
GPU1	PIX	 X 	PHB	PHB	SYS	SYS	SYS	SYS	0-13,28-41
GPU2	PHB	PHB	 X 	PIX	SYS	SYS	SYS	SYS	0-13,28-41
GPU3	PHB	PHB	PIX	 X 	SYS	SYS	SYS	SYS	0-13,28-41
GPU4	SYS	SYS	SYS	SYS	 X 	PIX	PHB	PHB	14-27,42-55
GPU5	SYS	SYS	SYS	SYS	PIX	 X 	PHB	PHB	14-27,42-55
GPU6	SYS	SYS	SYS	SYS	PHB	PHB	 X 	PIX	14-27,42-55
GPU7	SYS	SYS	SYS	SYS	PHB	PHB	PIX	 X 	14-27,42-55
"""


@pytest.mark.parametrize("name", ["titanv-8", "titanv-2x8"])
def test_the_reports_servers_are_as_their_topology_says(name):
    topology = read_topology(REPORTED)
    (host,) = read_cluster_file(name).hosts
    (told,) = cluster_file_of(topology, device="titan-v", name="x").hosts
    assert [(one.kind, one.joins) for one in host.joints] == [
        (one.kind, one.joins) for one in told.joints
    ]
    wiring = Wiring(read_cluster(name))
    for one in range(8):
        for other in range(8):
            if one != other:
                assert wiring.route(one, other).kind is topology.kinds[one][other]


def test_several_of_a_host():
    four = read_cluster("4xdgx-a100")
    assert (len(four.hosts), len(four.devices)) == (4, 32)
    assert four.name == "4xdgx-a100"
    assert read_cluster("2xtitanv-8").joints == read_cluster("titanv-2x8").joints


def test_capitals_do_not_matter():
    assert read_cluster("TitanV-8") == read_cluster("titanv-8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("titanv8", r"no cluster 'titanv8' in the catalogue: did you mean 'titanv-8'"),
        ("zzz", r"known: dgx-1-v100, .*, this-machine, .*path of a YAML file"),
        ("0xdgx-a100", "0xdgx-a100 has no hosts; write 1xdgx-a100 or more"),
        ("3xnowhere", "no cluster 'nowhere' in the catalogue"),
        ("99999xdgx-a100", "must be from 1 to 65536|at most 65536"),
    ],
)
def test_a_name_that_nothing_has(name, message):
    with pytest.raises((UsageError, FileFault), match=message):
        read_cluster(name)


def test_own_files(tmp_path, monkeypatch):
    file = read_cluster_file("dgx-a100")
    for name in ("mine.yaml", "mine.json"):
        files.write_by_hand(tmp_path / name, file)
        assert read_cluster(tmp_path / name) == read_cluster("dgx-a100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "titanv-8").write_text("schema: bayplan/plan\n")
    assert read_cluster("titanv-8").name == "titanv-8"  # a name wins
    with pytest.raises(FileFault):
        read_cluster("./titanv-8")
    with pytest.raises(FileFault, match=r"cannot read no\.yaml"):
        read_cluster("no.yaml")


def test_a_kind_that_is_not_known_is_named_with_its_file(tmp_path):
    text = files.encode_yaml(read_cluster_file("titanv-8")).decode()
    (tmp_path / "mine.yaml").write_text(text.replace("{titan-v: 8}", "{titan-w: 8}"))
    with pytest.raises(FileFault, match=r"mine\.yaml: kind 'titan-w' is not .*'titan-v'"):
        read_cluster(tmp_path / "mine.yaml")


def test_a_kind_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.yaml").write_text("password: hunter2\n")
    text = files.encode_yaml(read_cluster_file("titanv-8")).decode()
    (tmp_path / "mine.yaml").write_text(text + "kinds: {titan-v: secret.yaml}\n")
    with pytest.raises(FileFault, match=r"kind 'secret\.yaml' is not in the catalogue"):
        read_cluster("mine.yaml")


def test_faults_of_the_whole_carry_the_files_name(tmp_path):
    text = files.encode_yaml(read_cluster_file("titanv-8")).decode()
    assert "[0-3|4-7]" in text
    (tmp_path / "cut.yaml").write_text(text.replace("[0-3|4-7]", "[0-2|3]"))
    with pytest.raises(FileFault, match=r"cut\.yaml: device 4 is not reached from device 0"):
        read_cluster(tmp_path / "cut.yaml")


def test_this_machine_is_what_was_probed(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="was not probed yet; `bayplan cluster --probe`"):
        read_cluster(THIS_MACHINE)
    files.write(kept_probe(), read_cluster("rtx-4090-4"))
    assert read_cluster(THIS_MACHINE) == read_cluster("rtx-4090-4")
    assert isinstance(read_cluster_file(THIS_MACHINE), ClusterFile)
