"""Coarser chains: as much work, weights and memory, and cuts where they were."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.data.chain import Chain, Layer
from bayplan.planning.clusters.candidates import cut_places, merged

figures = st.integers(0, 9)
layers = st.builds(
    Layer,
    name=st.just("layer"),
    forward_seconds=figures.map(float),
    backward_seconds=figures.map(float),
    parameter_bytes=figures,
    held_bytes=figures,
    passing_bytes=figures,
    sent_bytes=figures,
)


@settings(max_examples=80)
@given(st.lists(layers, min_size=1, max_size=20), st.integers(2, 8))
def test_nothing_is_lost_and_every_cut_is_one_of_before(given_layers, most):
    chain = Chain(name="any", num_samples=4, layers=tuple(given_layers), source="guess")
    lasts = cut_places(chain, most=most)
    short = merged(chain, lasts)
    assert len(short.layers) == len(lasts) <= max(most, 1)
    assert lasts[-1] == len(chain.layers) - 1
    assert list(lasts) == sorted(set(lasts))
    end = len(short.layers) - 1
    assert short.seconds(0, end, 4) == pytest.approx(chain.seconds(0, lasts[-1], 4))
    for at, last in enumerate(lasts):
        assert short.sent_bytes(at, 4) == chain.sent_bytes(last, 4)
        assert short.parameter_bytes(0, at) == chain.parameter_bytes(0, last)
        assert short.held_bytes(0, at, 4) == chain.held_bytes(0, last, 4)


def test_a_chain_that_is_short_enough_stays():
    layer = Layer(name="fc", forward_seconds=1.0, backward_seconds=1.0)
    chain = Chain(name="two", num_samples=1, layers=(layer, layer), source="guess")
    assert cut_places(chain, most=2) == (0, 1)
    assert merged(chain, (0, 1)) == chain
