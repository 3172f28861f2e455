from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream_profiles.layer_graph import LayerGraph, parse_layer_graph, read_layer_graph

from bayplan.data.errors import FileFault

PROFILES = Path(__file__).parents[2] / "benchmarks" / "pipedream_profiles" / "profiles"
NAMES = sorted(path.name.removesuffix(".graph.txt") for path in PROFILES.iterdir())


def line(name: str, kind: str = "Conv2d(1, 1)", forward: str = "1.000", size: str = "8.000") -> str:
    return (
        f"{name} -- {kind} -- forward_compute_time={forward}, backward_compute_time=2.000,"
        f" activation_size={size}, parameter_size=16.000"
    )


THREE = "\n".join(
    [
        line("node1", "Input"),
        line("node2"),
        line("node3", "LSTM(4, 4)", size="[8.0; 2.0; 2.0]"),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
    ]
)


@pytest.mark.parametrize("name", NAMES)
def test_published_profiles_are_read(name: str) -> None:
    graph = read_layer_graph(PROFILES / f"{name}.graph.txt")
    text = (PROFILES / f"{name}.graph.txt").read_text()
    assert len(graph.edges) == text.count("\n\t")
    assert len(graph.layers) == text.count("parameter_size=")
    assert [graph.layers[index].name for index in graph.order()] == [
        f"node{at}" for at in range(1, len(graph.layers) + 1)
    ]


def test_times_are_seconds_and_outputs_may_be_several() -> None:
    graph = parse_layer_graph(THREE)
    assert graph.edges == ((0, 1), (1, 2))
    assert graph.layers[2].forward_seconds == 0.001
    assert graph.layers[2].backward_seconds == 0.002
    assert graph.layers[2].output_bytes == (8, 2, 2)
    assert graph.layers[2].parameter_bytes == 16
    assert graph.readers == ((1,), (2,), ())
    assert graph.inputs == ((), (0,), (1,))


def test_the_stage_that_an_optimizer_wrote_and_ends_of_lines_are_passed_over() -> None:
    text = THREE.replace("parameter_size=16.000", "parameter_size=16.000 -- stage_id=0")
    assert parse_layer_graph(text.replace("\n", "\r\n") + "\r\n") == parse_layer_graph(THREE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no layers"),
        ("node1 -- Conv2d(1, 1)", "line 1: 2 parts"),
        (THREE.replace("backward_compute_time", "backward", 1), "line 1: 2nd figure is 'backward="),
        (THREE.replace("1.000", "fast", 1), "line 1: forward_compute_time is 'fast'"),
        (THREE.replace("1.000", "nan", 1), "line 1: forward_compute_time is 'nan'"),
        (THREE.replace("1.000", "-1", 1), "line 1: forward_compute_time is '-1'"),
        (THREE.replace("2.0]", "2.0", 1), "line 3: activation_size is .* expected a ']'"),
        (THREE + "\n\tnode1 -- node9", "line 6: no layer is called 'node9'"),
        (THREE + "\n\tnode1", "line 6: 'node1', expected 'node1 -- node2'"),
        (THREE + "\n\tnode3 -- node2", "cycle"),
        (THREE + "\n" + line("node4"), "line 6: a layer after the first edge"),
        (line("node1") + "\n" + THREE, "line 2: a second node1; the first is in line 1"),
        (THREE.partition("\n\t")[0], "line 1: node1 is joined to no other layer"),
        (THREE.rpartition("\n")[0], "line 3: node3 is joined to no other layer"),
        (
            "\n".join(
                [*THREE.split("\n")[:3], line("node4"), "\tnode1 -- node2", "\tnode3 -- node4"]
            ),
            "line 3: node3 computes and reads nothing",
        ),
    ],
)
def test_a_fault_is_named_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(FileFault, match=expected):
        parse_layer_graph(text)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFault, match="cannot read"):
        read_layer_graph(tmp_path / "graph.txt")
    (tmp_path / "graph.txt").write_bytes(b"node1\xff")
    with pytest.raises(FileFault, match=r"graph\.txt: not text: byte 5"):
        read_layer_graph(tmp_path / "graph.txt")


@settings(max_examples=60)
@given(st.data())
def test_a_file_cut_off_anywhere_is_refused_or_has_lost_no_layer(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    text = (PROFILES / f"{name}.graph.txt").read_text()
    cut = data.draw(st.integers(0, len(text) - 1))
    whole = parse_layer_graph(text)
    try:
        found = parse_layer_graph(text[:cut])
    except FileFault:
        return
    # What could not be seen: the last skip connections, or the end of the last name.
    assert found.layers == whole.layers
    assert len(whole.edges) - len(found.edges) < len(whole.edges) // 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 0.9])
def test_a_file_that_lacks_a_tenth_or_more_is_refused(name: str, part: float) -> None:
    text = (PROFILES / f"{name}.graph.txt").read_text()
    with pytest.raises(FileFault, match=r"graph\.txt"):
        parse_layer_graph(text[: int(part * len(text))])


@settings(max_examples=100)
@given(st.text(alphabet="node12 -=,.[];\n\tabc", max_size=200))
def test_any_text_is_read_or_refused_with_a_reason(text: str) -> None:
    found: LayerGraph | FileFault
    try:
        found = parse_layer_graph(text)
    except FileFault as fault:
        found = fault
    assert isinstance(found, LayerGraph) or str(found).startswith("graph.txt")


def test_a_graph_without_some_layers_keeps_the_other_edges() -> None:
    graph = parse_layer_graph(THREE).without([0])
    assert [layer.name for layer in graph.layers] == ["node2", "node3"]
    assert graph.edges == ((0, 1),)
