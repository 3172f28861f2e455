from bayplan.data.chain import Chain, Layer


def layer(name, **fixed):
    return Layer(name=name, forward_seconds=3.0, backward_seconds=5.0, held_bytes=8, **fixed)


def test_fixed_seconds_do_not_grow_with_samples():
    layers = (layer("a", fixed_forward_seconds=1.0), layer("b"), layer("c"))
    chain = Chain(name="three", num_samples=2, layers=layers, source="guess")
    assert chain.seconds(0, 0, 1) == (2.0, 2.5)
    assert chain.seconds(0, 1, 4) == (1.0 + 2 * 5.0, 2 * 10.0)
    assert chain.held_bytes(1, 2, 1) == 8.0
