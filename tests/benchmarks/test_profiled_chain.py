"""A profile as a chain: nothing lost, skip connections sent once, the order that is asked for."""

from pathlib import Path

import pytest
from pipedream_profiles.graph_states import graph_states
from pipedream_profiles.layer_graph import parse_layer_graph, read_layer_graph
from pipedream_profiles.profiled_chain import (
    cut_layers,
    infer_num_samples,
    profiled_chain,
)

from bayplan.data.errors import UsageError

PROFILES = Path(__file__).parents[2] / "benchmarks" / "pipedream_profiles" / "profiles"
SAMPLES = {"alexnet": 256, "vgg16": 128, "resnet50": 128, "resnet101": 64, "gnmt": 32}


def line(name, kind, size):
    return (
        f"{name} -- {kind} -- forward_compute_time=1.0, backward_compute_time=2.0,"
        f" activation_size={size}, parameter_size=10.0"
    )


RESIDUAL = "\n".join(
    [
        line("node1", "Input", 999.0),
        line("node2", "Conv2d(1, 1)", 64.0),
        line("node3", "Conv2d(1, 1)", 32.0),
        line("node4", "ReLU(inplace)", 32.0),
        line("node5", "Add", 16.0),
        line("node6", "MaxPool2d(2)", 8.0),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode3 -- node4",
        "\tnode2 -- node5",
        "\tnode4 -- node5",
        "\tnode5 -- node6",
    ]
)


def test_a_skip_connection_is_sent_by_every_cut_it_goes_across():
    chain = profiled_chain(parse_layer_graph(RESIDUAL), name="residual", num_samples=4)
    assert [layer.sent_bytes for layer in chain.layers] == [64, 96, 96, 16, 0]


def test_what_is_made_in_place_is_not_held_and_pooling_holds_places():
    chain = profiled_chain(parse_layer_graph(RESIDUAL), name="residual", num_samples=4)
    assert [layer.held_bytes for layer in chain.layers] == [64, 32, 0, 16, 8 + 2 * 8]
    assert [layer.passing_bytes for layer in chain.layers] == [64, 96, 64, 112, 24]


def test_the_first_forward_may_be_left_out():
    chain = profiled_chain(
        parse_layer_graph(RESIDUAL), name="residual", num_samples=4, has_first_forward=False
    )
    assert [layer.forward_seconds for layer in chain.layers] == [0.0, *[0.001] * 4]
    assert chain.layers[0].backward_seconds == 0.002


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_of_published_profiles_are_inferred(name):
    assert infer_num_samples(read_layer_graph(PROFILES / f"{name}.graph.txt")) == SAMPLES[name]


def test_samples_that_no_layer_tells_have_to_be_said():
    with pytest.raises(UsageError, match="num_samples"):
        profiled_chain(parse_layer_graph(RESIDUAL), name="residual")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_chain_has_all_time_and_weights_of_its_profile(name):
    graph = read_layer_graph(PROFILES / f"{name}.graph.txt")
    chain, states = profiled_chain(graph, name=name), graph_states(graph)
    last = len(chain.layers) - 1
    assert sum(chain.seconds(0, last, chain.num_samples)) == pytest.approx(states.seconds[-1])
    assert chain.parameter_bytes(0, last) == states.parameter_bytes[-1]
    assert chain.layers[-1].sent_bytes == 0


def test_a_chain_goes_through_the_cuts_it_is_asked_for():
    graph = read_layer_graph(PROFILES / "resnet50.graph.txt")
    states = graph_states(graph)
    assert states.layers is not None
    for at in range(0, len(states), 7):  # some in every kind of place in a block
        through = (states.layers[at], states.layers[-1])
        chain = profiled_chain(graph, name="resnet50", through=through)
        cut = cut_layers(through)[0]
        assert chain.parameter_bytes(0, cut) == states.parameter_bytes[at]
        # PipeDream may count a skip connection that ends before the cut, never one too few.
        if cut < len(chain.layers) - 1:
            assert chain.layers[cut].sent_bytes <= states.sent_bytes[at]
