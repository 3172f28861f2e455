"""The roofline against numbers worked out by hand."""

import math
import time
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sketching import Sketch, figure, plain_device, seconds_of

from bayplan.costing.catalogue import load_device
from bayplan.costing.roofline import (
    bytes_moved,
    convolution_rate,
    derive_profile,
    kernel_parts,
    node_parts,
    peak_flops_per_s,
)
from bayplan.data.device import ChannelRate, ConvolutionKind, OpClass
from bayplan.data.errors import UsageError
from bayplan.data.profile import Origin


# One node at a time, by hand.
def test_matmul_bound_by_arithmetic():
    sketch = Sketch()
    a, b, c = sketch.value(10, 10), sketch.value(10, 10), sketch.value(10, 10)
    sketch.node("mm.default", [a, b], [c], flops=1_000_000)
    # 1e6 flops at half of 1000 per second; the 1200 bytes would take 24 s.
    assert seconds_of(sketch, plain_device()) == (2000.0,)


def test_matmul_bound_by_memory():
    sketch = Sketch()
    a, b, c = sketch.value(10, 10), sketch.value(10, 10), sketch.value(10, 10)
    sketch.node("mm.default", [a, b], [c], flops=2000)
    # 3 x 400 bytes at half of 100 per second, and 1 s to launch; the flops would take 4 s.
    assert seconds_of(sketch, plain_device(launch=1.0)) == (25.0,)


def test_view_and_allocation_are_free():
    sketch = Sketch()
    a = sketch.value(1000)
    sketch.node("view.default", [a], [sketch.value(10, 100, of=a)])
    sketch.node("empty.memory_format", [], [sketch.value(1000)])
    assert seconds_of(sketch, plain_device(launch=1.0)) == (0.0, 0.0)


def test_elementwise_uses_the_vector_rate():
    sketch = Sketch()
    a = sketch.value(1)
    sketch.node("exp.default", [a], [sketch.value(1)], flops=1000)
    device = plain_device(rates={"float16": 1e9}, vector=500.0)
    assert seconds_of(sketch, device) == (4.0,)


def test_class_efficiency_is_the_one_of_the_operator():
    sketch = Sketch()
    a = sketch.value(25)
    sketch.node("sum.default", [a], [sketch.value(0)])
    device = plain_device()
    efficiency = {**device.efficiency, OpClass.REDUCTION: figure(0.25)}
    device = msgspec.structs.replace(device, efficiency=efficiency)
    assert seconds_of(sketch, device) == (100 / 25.0,)


# Convolutions that are told apart.
RATES = {"3x3": 4.0, "1x1": 1.0, "5x5": 8.0, "other": 2.0, "first": 0.5, "grouped": 0.25}


def telling_device(**changes):
    rates = {ConvolutionKind(name): ChannelRate(most=figure(most)) for name, most in RATES.items()}
    return msgspec.structs.replace(plain_device(), convolutions=rates, **changes)


def convolution(kernel, channels, *, out_channels=8, groups=1, backward=False, dtype="float32"):
    """A convolution of one image of 10 x 10, or its backward."""
    sketch = Sketch()
    image = sketch.value(1, channels, 10, 10, dtype=dtype)
    weight = sketch.value(out_channels, channels // groups, kernel, kernel, dtype=dtype)
    output = sketch.value(1, out_channels, 10, 10, dtype=dtype)
    if backward:
        gradient = sketch.value(1, channels, 10, 10, dtype=dtype)
        sketch.node("convolution_backward.default", [output, image, weight], [gradient], 10**9)
    else:
        sketch.node("convolution.default", [image, weight], [output], 10**9)
    return sketch


@pytest.mark.parametrize(
    ("kernel", "channels", "groups", "name"),
    [
        (3, 8, 1, "3x3"),
        (1, 8, 1, "1x1"),
        (5, 8, 1, "5x5"),
        (7, 8, 1, "other"),
        (7, 3, 1, "first"),
        (3, 8, 2, "grouped"),
        (3, 8, 8, "grouped"),
    ],
)
def test_a_convolution_reaches_what_its_kind_does(kernel, channels, groups, name):
    graph = convolution(kernel, channels, groups=groups).graph()
    assert convolution_rate(graph, graph.nodes[0], telling_device()) == RATES[name]


def test_channels_decide_where_a_rate_says_so():
    device = telling_device()
    rate = ChannelRate(most=figure(4.0), half_channels=figure(8.0))
    device = msgspec.structs.replace(
        device, convolutions={**device.convolutions, ConvolutionKind.THREE: rate}
    )
    few, many = (convolution(3, channels, out_channels=channels).graph() for channels in (8, 24))
    assert convolution_rate(few, few.nodes[0], device) == 2.0
    assert convolution_rate(many, many.nodes[0], device) == 3.0


def test_backward_and_scale_change_the_rate():
    device = telling_device(convolution_backward=figure(0.5), convolution_scale=figure(1.5))
    forward, backward = (convolution(3, 8, backward=one).graph() for one in (False, True))
    assert convolution_rate(forward, forward.nodes[0], device) == 6.0
    assert convolution_rate(backward, backward.nodes[0], device) == 3.0


def test_above_the_peak_a_convolution_is_still_bound_by_memory():
    sketch = convolution(3, 8)
    graph = sketch.graph()
    arithmetic, traffic = node_parts(graph, graph.nodes[0], telling_device())
    assert arithmetic == 10**9 / 1000.0 / 4.0  # four times the peak
    assert traffic == bytes_moved(graph, graph.nodes[0]) / 100.0 / 0.5
    assert seconds_of(sketch, telling_device()) == (max(arithmetic, traffic),)


def test_rates_are_of_float32_alone():
    sketch = convolution(3, 8, dtype="float16")
    assert seconds_of(sketch, telling_device()) == seconds_of(sketch, plain_device())


HALF_CASES = {
    # Arithmetic and traffic of each kernel. Image and output have 1600 bytes each, the weight 1152
    # or less. Half of 100 bytes per second is reached, and half of 1000 operations.
    (1, True, False): [(2 * 10**6, (3200 + 1152) / 50 / 0.65)],
    (1, False, False): [(2 * 10**6, (3200 + 1152) / 50 / 0.65), (0.0, 2 * 3200 / 50)],
    (2, True, False): [(57600 / 500 / 0.05, (3200 + 576) / 50 / 0.65)],
    (8, True, False): [(0.0, (3200 + 144) / 50 / 0.5)],
    (8, False, True): [(0.0, (3200 + 144) / 50 / 0.3)],
}


@pytest.mark.parametrize(("case", "kernels"), HALF_CASES.items())
def test_kernels_of_a_half_precision_convolution(case, kernels):
    groups, is_channels_last, backward = case
    graph = convolution(3, 8, groups=groups, backward=backward, dtype="float16").graph()
    found = kernel_parts(graph, graph.nodes[0], plain_device(), is_channels_last=is_channels_last)
    assert [part for kernel in found for part in kernel] == pytest.approx(
        [part for kernel in kernels for part in kernel]
    )


def test_backward_of_a_half_precision_convolution_is_a_kernel_for_each_gradient():
    sketch = Sketch()
    image = sketch.value(1, 8, 10, 10, dtype="float16")
    weight = sketch.value(16, 8, 3, 3, dtype="float16")
    output = sketch.value(1, 16, 10, 10, dtype="float16")
    gradients = [sketch.value(*shape, dtype="float16") for shape in ((1, 8, 10, 10), (16, 8, 3, 3))]
    for written in (gradients[:1], gradients[1:], gradients):
        sketch.node("convolution_backward.default", [output, image, weight], written, 10**9)
    graph = sketch.graph()
    of_image, of_weight, both = (
        kernel_parts(graph, node, plain_device(), is_channels_last=True) for node in graph.nodes
    )
    assert of_image == of_weight == [(2 * 10**6, pytest.approx((4800 + 2304) / 50 / 0.65))]
    assert both == [(10**6, of_image[0][1])] * 2


def test_a_copy_into_another_order_is_slower_than_one_that_keeps_it():
    sketch = Sketch()
    sketch.node("clone.default", [sketch.value(100)], [sketch.value(100)])
    sketch.node("mul.Tensor", [sketch.value(100)], [sketch.value(100)])
    reordered, kept = seconds_of(sketch, plain_device())
    assert reordered == pytest.approx(kept / 0.4)


def moved(sketch):
    graph = sketch.graph()
    return bytes_moved(graph, graph.nodes[-1])


def test_in_place_counts_read_and_write():
    sketch = Sketch()
    a = sketch.value(100)
    sketch.node("relu_.default", [a], [a])
    assert moved(sketch) == 800
    sketch.node("relu_.default", [a], [sketch.value(100, of=a)])
    assert moved(sketch) == 800


def test_expanded_view_counts_its_storage():
    sketch = Sketch()
    bias = sketch.value(10)
    wide = sketch.value(1000, 10, of=bias)
    sketch.node("add.Tensor", [wide, sketch.value(1000, 10)], [sketch.value(1000, 10)])
    assert moved(sketch) == 40 + 40_000 + 40_000


def test_same_bytes_read_twice_count_once():
    sketch = Sketch()
    a = sketch.value(10, 10)
    flipped = sketch.value(10, 10, of=a)
    sketch.node("mm.default", [a, a], [sketch.value(10, 10)])
    assert moved(sketch) == 800
    sketch.node("mm.default", [a, flipped], [sketch.value(10, 10)])
    assert moved(sketch) == 800


def test_two_halves_of_a_storage_count_both():
    sketch = Sketch()
    a = sketch.value(100)
    left, right = sketch.value(30, of=a), sketch.value(50, of=a)
    sketch.node("cat.default", [left, right], [sketch.value(80)])
    assert moved(sketch) == 320 + 320


def test_foreach_counts_every_value():
    sketch = Sketch()
    parameters = [sketch.value(n) for n in (10, 20, 30)]
    gradients = [sketch.value(n) for n in (10, 20, 30)]
    sketch.node("_foreach_add_.List", parameters + gradients, parameters)
    assert moved(sketch) == 3 * 240


def test_embedding_counts_the_rows_it_returns():
    sketch = Sketch()
    table, tokens = sketch.value(1_000_000, 8), sketch.value(4, dtype="int64")
    sketch.node("embedding.default", [table, tokens], [sketch.value(4, 8)])
    assert moved(sketch) == 128 + 32 + 128


def test_embedding_gradient_writes_the_whole_table():
    sketch = Sketch()
    rows, tokens = sketch.value(4, 8), sketch.value(4, dtype="int64")
    sketch.node("embedding_dense_backward.default", [rows, tokens], [sketch.value(100, 8)])
    assert moved(sketch) == 128 + 32 + 3200


def test_tf32_serves_convolutions_only():
    device = plain_device(float32=1.0, rates={"tf32": 8.0, "float64": 2.0})
    assert peak_flops_per_s(device, OpClass.CONVOLUTION, "float32") == 8.0
    assert peak_flops_per_s(device, OpClass.MATMUL, "float32") == 1.0
    assert peak_flops_per_s(device, OpClass.ATTENTION, "float32") == 1.0
    assert peak_flops_per_s(device, OpClass.CONVOLUTION, "float64") == 2.0


def test_missing_dtype_falls_back_to_plain_float32():
    device = plain_device(float32=1.0, rates={"tf32": 8.0})
    assert peak_flops_per_s(device, OpClass.MATMUL, "bfloat16") == 1.0
    assert peak_flops_per_s(device, OpClass.CONVOLUTION, "bfloat16") == 1.0


def test_dtype_is_of_the_first_floating_output_else_the_largest_input():
    sketch = Sketch()
    wide, half = sketch.value(100), sketch.value(100, dtype="float16")
    flags = sketch.value(1, dtype="bool")
    sketch.node("mm.default", [wide], [flags, half], flops=10**9)
    sketch.node("mm.default", [half, wide], [flags], flops=10**9)
    device = plain_device(rates={"float16": 2000.0}, efficiency=1.0)
    assert seconds_of(sketch, device) == (10**9 / 2000, 10**9 / 1000)


def convolution_seconds(device, *, kernel=3, out_side=8, channels=32, dtype="float32", back=False):
    sketch = Sketch()
    image = sketch.value(1, channels, 8, 8, dtype=dtype)
    weight = sketch.value(32, channels, kernel, kernel, dtype=dtype)
    output = sketch.value(1, 32, out_side, out_side, dtype=dtype)
    if back:
        sketch.node("convolution_backward.default", [output, image, weight], [image], flops=10**9)
    else:
        sketch.node("convolution.default", [image, weight], [output], flops=10**9)
    return seconds_of(sketch, device)[0]


@pytest.mark.parametrize("back", [False, True])
def test_winograd_shortens_plain_3x3_convolutions_in_float32(back):
    device = plain_device(efficiency=1.0)
    direct = 10**9 / 1000
    assert convolution_seconds(device, back=back) == pytest.approx(direct / 2.25)
    assert convolution_seconds(device, out_side=6, back=back) == pytest.approx(direct / 2.25)
    assert convolution_seconds(device, kernel=1, back=back) == direct
    assert convolution_seconds(device, out_side=4, back=back) == direct
    assert convolution_seconds(device, channels=3, back=back) == direct
    # Tensor cores take channels last, so what lies otherwise is turned.
    assert direct < convolution_seconds(device, dtype="float16", back=back) < 1.1 * direct
    with_tf32 = plain_device(rates={"tf32": 1000.0}, efficiency=1.0)
    assert convolution_seconds(with_tf32, back=back) == direct


def test_convolution_of_an_odd_form_is_priced_directly():
    sketch = Sketch()
    signal, weight = sketch.value(1, 32, 8), sketch.value(32, 32, 3)
    sketch.node("convolution.default", [signal, weight], [sketch.value(1, 32, 8)], flops=10**9)
    sketch.node("convolution.default", [signal], [], flops=10**9)
    device = plain_device(efficiency=1.0)
    assert seconds_of(sketch, device) == (10**6, 10**6)


def test_profile_says_that_nothing_ran():
    sketch = Sketch()
    a = sketch.value(100)
    sketch.node("exp.default", [a], [sketch.value(100)])
    sketch.node("exp.default", [a], [sketch.value(100)])
    graph = sketch.graph()
    profile = derive_profile(graph, plain_device())
    assert (profile.origin, profile.repeats, profile.device) == (Origin.DERIVED, 0, "plain")
    assert profile.seconds == (16.0, 16.0)
    assert profile.spread_seconds == pytest.approx((4.8, 4.8))
    assert profile.step_spread_seconds == pytest.approx(9.6)
    assert profile.workspace_bytes == (0, 0)
    profile.check_belongs_to(graph)


@pytest.mark.parametrize(
    ("figures", "field"),
    [
        ({"bandwidth": 0.0}, "bandwidth_bytes_per_s"),
        ({"vector": math.inf}, "vector_flops_per_s"),
        ({"rates": {"float16": 0.0}}, r"flops_per_s\.float16"),
        ({"launch": math.inf}, "launch_seconds"),
    ],
)
def test_figure_that_gives_no_time_is_named(figures, field):
    with pytest.raises(UsageError, match=field):
        derive_profile(Sketch().graph(), plain_device(**figures))


def test_thousands_of_nodes_in_well_under_a_second():
    sketch = Sketch()
    values = [sketch.value(64, 64) for _ in range(5000)]
    for before, after in pairwise(values):
        sketch.node("mm.default", [before, before], [after], flops=1000)
    graph, device = sketch.graph(), load_device("v100")
    start = time.process_time()
    derive_profile(graph, device)
    assert time.process_time() - start < 0.5


two_rates = st.tuples(*[st.floats(min_value=1e-3, max_value=1e15)] * 2).map(sorted)


@given(two_rates, two_rates, st.integers(0, 10**15), st.integers(1, 10**6))
def test_more_speed_is_never_slower(flop_rates, byte_rates, flops, width):
    sketch = Sketch()
    a = sketch.value(width)
    sketch.node("mm.default", [a], [sketch.value(width)], flops=flops)
    sketch.node("exp.default", [a], [sketch.value(width)], flops=flops)
    slow, fast = (
        seconds_of(sketch, plain_device(float32=flop_rate, vector=flop_rate, bandwidth=byte_rate))
        for flop_rate, byte_rate in zip(flop_rates, byte_rates, strict=True)
    )
    assert all(after <= before for before, after in zip(slow, fast, strict=True))
