"""A cluster on a screen: who is there, what joins them, and where each figure comes from."""

import msgspec

from bayplan.costing.catalogue import cluster_names, read_cluster
from bayplan.data.cluster import Link, LinkKind, given_figures
from bayplan.data.device import Figure
from bayplan.reporting.clusters import cluster_text, clusters_text
from bayplan.simulating.wiring import Wiring


def test_each_cluster_is_a_line():
    text = clusters_text([read_cluster(name) for name in cluster_names()])
    lines = text.splitlines()
    assert len(lines) == len(cluster_names())
    assert (
        lines[-1]
        == "titanv-8    8 TITAN V in one server, as in published tables of OneFlow and PipeDream"
    )


def test_one_cluster_shows_every_figure_with_its_source():
    cluster = read_cluster("titanv-8")
    text = cluster_text(cluster)
    one_line = " ".join(text.split())
    assert "devices 0-7: NVIDIA TITAN V 12 GB, 11.8 GiB, 14.9 TFLOPS float32" in one_line
    assert "host server: devices 0-7 memory 256.0 GiB guess: 256 GiB" in one_line
    assert "input samples 13600/s fit to published reports" in one_line
    assert "reduce bandwidth 3.53 GB/s fit to published reports" in one_line
    assert "reduce latency 143 us guess" in one_line
    for joint in cluster.joints:
        for _, figure in given_figures(joint):
            assert " ".join(figure.source.split()) in one_line
    assert text.endswith(f"fingerprint {cluster.fingerprint}")
    assert max(map(len, text.splitlines())) <= 100


def test_the_matrix_is_that_of_the_topology():
    text = cluster_text(read_cluster("titanv-8"))
    rows = text[text.index("links ") :].splitlines()
    assert rows[0].split() == ["links", *map(str, range(8))]
    assert rows[1].split() == ["0", "X", "PIX", "PHB", "PHB", "SYS", "SYS", "SYS", "SYS"]
    assert rows[8].split() == ["7", "SYS", "SYS", "SYS", "SYS", "PHB", "PHB", "PIX", "X"]


def test_a_large_cluster_stays_on_a_screen():
    text = cluster_text(read_cluster("512xdgx-h100"))
    assert len(text.splitlines()) < 24
    assert "and 511 more like it" in text
    assert "and 508 more" in text
    assert "links  " not in text


def test_links_and_what_they_share_are_shown():
    two = read_cluster("rtx-4090-4")
    link = Link(
        ends=(0, 3),
        kind=LinkKind.PIX,
        latency_seconds=Figure(2e-6, "measured"),
        bandwidth_bytes_per_s=Figure(2e10, "measured"),
        shared="riser",
    )
    joined = msgspec.structs.replace(two, links=(link,))
    text = cluster_text(joined)
    assert "PIX       0|3, shared with all links of 'riser'" in text
    assert Wiring(joined).route(3, 0).kind is LinkKind.PIX
