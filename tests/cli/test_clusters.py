"""`bayplan cluster`: the catalogue, topologies, and this machine measured."""

import io
import json
import os
from pathlib import Path

import pytest
import yaml

from bayplan.costing.catalogue import cluster_names, read_cluster
from bayplan.data.cluster import Cluster
from bayplan.data.files import decode

TOPOLOGIES = Path(__file__).parents[1] / "data" / "topologies"


@pytest.fixture
def type_in(monkeypatch):
    """Give a command its input."""

    def type_in(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    return type_in


def test_the_catalogue_is_listed(bayplan):
    outcome = bayplan("cluster")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()] == list(cluster_names())
    rows = json.loads(bayplan("cluster", "--json").out)
    assert [row["name"] for row in rows] == list(cluster_names())
    assert {row["num_devices"] for row in rows} == {4, 8, 16}


def test_one_is_shown(bayplan):
    outcome = bayplan("cluster", "dgx-1-v100")
    assert outcome.code == 0
    assert "0-7: NVIDIA Tesla V100 SXM2 16 GB" in outcome.out
    assert "NVLINK" in outcome.out
    whole = bayplan("cluster", "dgx-1-v100", "--json").out
    assert decode(whole.encode(), Cluster, name="out") == read_cluster("dgx-1-v100")


def test_a_topology_becomes_a_file_that_is_a_cluster(bayplan, type_in, tmp_path):
    type_in((TOPOLOGIES / "titanv-8.txt").read_bytes())
    path = tmp_path / "my.yaml"
    outcome = bayplan("cluster", "--from-topo", "-", "--gpu", "titan-v", "-o", path)
    assert outcome.code == 0, outcome.err
    assert "8 titan-v in a host, from nvidia-smi topo -m" in outcome.out
    assert yaml.safe_load(path.read_text())["hosts"][0]["devices"] == {"titan-v": 8}
    again = bayplan("cluster", path)
    assert again.out == outcome.out
    assert len(read_cluster(path).devices) == 8


def test_several_hosts_of_a_topology_in_a_file(bayplan, tmp_path):
    arguments = ("--from-topo", TOPOLOGIES / "h100-8-with-cards.txt", "--gpu", "h100")
    path = tmp_path / "pod.json"
    outcome = bayplan("cluster", *arguments, "--hosts", 4, "--card-gbits", 400, "-o", path)
    assert outcome.code == 0, outcome.err
    pod = read_cluster(path)
    assert pod.name == "h100-8-with-cards"
    assert len(pod.devices) == 32
    assert pod.joints[-1].bandwidth_bytes_per_s.value == 48e9


def test_a_gpu_of_ones_own_comes_with_its_description(bayplan, tmp_path):
    device = json.loads(bayplan("cluster", "titanv-8", "--json").out)["kinds"]["titan-v"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(device | {"name": "my-titan"}))
    path = tmp_path / "my.yaml"
    arguments = ("--from-topo", TOPOLOGIES / "titanv-8.txt", "--gpu", tmp_path / "mine.yaml")
    assert bayplan("cluster", *arguments, "-o", path).code == 0
    assert read_cluster(path).kind_of(0).name == "my-titan"


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (["titan"], ["no cluster 'titan'", "titanv-8"]),
        (["no.yaml"], ["cannot read no.yaml"]),
        (["titanv-8", "--probe"], ["give one of them"]),
        (["titanv-8", "--on", "cpu"], ["add --probe"]),
        (["titanv-8", "--gpu", "v100"], ["--gpu, --hosts and --card-gbits are for --from-topo"]),
        (["-o", "x.yaml"], ["which cluster goes to x.yaml", "bayplan cluster titanv-8"]),
        (["--from-topo", "topo.txt"], ["does not say what its GPUs are", "--gpu titan-v"]),
        (["--from-topo", "no.txt", "--gpu", "v100"], ["cannot read no.txt"]),
        (["--from-topo", "topo.txt", "--gpu", "v10"], ["no device 'v10'", "v100"]),
        (["--from-topo", "topo.txt", "--gpu", "v100"], ["topo.txt, line 2", "GPU0 to GPU1"]),
        (["--from-topo", "-", "--gpu", "v100"], ["the input is empty", "nvidia-smi topo -m"]),
        (["--from-topo", "topo.txt", "--gpu", "v100", "--hosts", "0"], ["--hosts is 0"]),
        (
            ["--from-topo", "topo.txt", "--gpu", "v100", "--card-gbits", "0"],
            ["--card-gbits is 0.0, must be more than 0"],
        ),
        (["zero.yaml"], ["zero.yaml", "network.bandwidth_bytes_per_s is 0, must be more"]),
        (["apart.yaml"], ["apart.yaml", "device 2 is not reached from device 0"]),
    ],
)
def test_bad_input_is_refused(bayplan, project, check_refusal, type_in, arguments, phrases):
    type_in(b"")
    Path("topo.txt").write_text("  GPU0 GPU1\nGPU0 X WIFI\nGPU1 WIFI X\n")
    apart = (
        "schema: bayplan/cluster\nversion: 1\nname: two\nhosts:\n- name: a\n  count: 2\n"
        "  memory_bytes: {value: 1e9, source: guess}\n  devices: {v100: 2}\n  joints:\n"
        "  - kind: PIX\n    joins: ['0|1']\n    latency_seconds: &l {value: 0, source: guess}\n"
        "    bandwidth_bytes_per_s: {value: 1e9, source: guess}\n"
    )
    Path("apart.yaml").write_text(apart)
    network = "network:\n  latency_seconds: *l\n  bandwidth_bytes_per_s: *l\n"
    Path("zero.yaml").write_text(apart + network)
    check_refusal(bayplan("cluster", *arguments), 2, *phrases)


def test_a_name_of_the_catalogue_is_a_cluster_to_fit(bayplan, project):
    outcome = bayplan("check", "train:build", "--cluster", "titanv-8", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["device"] == "titan-v"


def test_this_machine_is_measured_and_kept(bayplan, tmp_path, monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core has no links")
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path))
    outcome = bayplan("cluster", "--probe", "-o", tmp_path / "here.yaml")
    assert outcome.code == 0, outcome.err
    assert "of this machine, probed" in outcome.out
    assert read_cluster(tmp_path / "here.yaml") == read_cluster("this-machine")
    assert bayplan("cluster", "this-machine").out == outcome.out
