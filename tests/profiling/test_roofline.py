"""The roofline against numbers worked out by hand, and against published training rates."""

import math
import time
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.device import ChannelRate, ConvolutionKind, DeviceKind, Figure, OpClass
from bayplan.data.errors import UsageError
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value
from bayplan.data.profile import Origin
from bayplan.profiling.catalogue import load_device
from bayplan.profiling.roofline import (
    bytes_moved,
    convolution_rate,
    derive_profile,
    node_parts,
    peak_flops_per_s,
)

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}


class Sketch:
    """A step graph drawn by hand: every value its own storage unless it says whose."""

    def __init__(self):
        self.nodes, self.values, self.storages = [], [], []

    def value(self, *shape, dtype="float32", of=None):
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if of is None:
            storage = len(self.storages)
            self.storages.append(Storage(size_bytes=size_bytes, kind=StorageKind.TEMPORARY))
        else:
            storage = self.values[of].storage
        self.values.append(Value(storage=storage, shape=shape, dtype=dtype, size_bytes=size_bytes))
        return len(self.values) - 1

    def node(self, op, reads, writes, flops=0):
        edges = {"reads": tuple(reads), "writes": tuple(writes)}
        self.nodes.append(Node(op=f"aten.{op}", phase=Phase.FORWARD, flops=flops, **edges))

    def graph(self):
        columns = {"values": tuple(self.values), "storages": tuple(self.storages)}
        return StepGraph(model="sketch", nodes=tuple(self.nodes), **columns)


def figure(value):
    return Figure(value, "test")


def plain_device(
    *, bandwidth=100.0, float32=1000.0, rates=None, vector=500.0, efficiency=0.5, launch=0.0
):
    rates = {"float32": float32, **(rates or {})}
    return DeviceKind(
        name="plain",
        memory_bytes=figure(1e9),
        context_bytes=figure(0),
        bandwidth_bytes_per_s=figure(bandwidth),
        flops_per_s={dtype: figure(rate) for dtype, rate in rates.items()},
        vector_flops_per_s=figure(vector),
        efficiency={kind: figure(efficiency) for kind in OpClass},
        launch_seconds=figure(launch),
    )


def seconds_of(sketch, device):
    return derive_profile(sketch.graph(), device).seconds


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
    assert convolution_seconds(device, dtype="float16", back=back) == direct
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


# Published rates.
RELU = ("relu_.default", "threshold_backward.default")
NORM = ("native_batch_norm.default", "native_batch_norm_backward.default")


def add_convolution(sketch, batch, in_channels, out_channels, kernel, out_side, *, stride=1):
    """One convolution with its backward; returns the output value."""
    in_side = out_side * stride
    image = sketch.value(batch, in_channels, in_side, in_side)
    weight = sketch.value(out_channels, in_channels, kernel, kernel)
    output = sketch.value(batch, out_channels, out_side, out_side)
    flops = 2 * batch * out_channels * out_side**2 * in_channels * kernel**2
    sketch.node("convolution.default", [image, weight], [output], flops)
    gradients = [sketch.value(*sketch.values[value].shape) for value in (image, weight)]
    reads = [output, image, weight]
    sketch.node("convolution_backward.default", reads, gradients, 2 * flops)
    return output


def add_layer(sketch, x, kind):
    """One layer that keeps its input's shape, with its backward."""
    forward, backward = kind
    gradient, output, out_gradient = (sketch.value(*sketch.values[x].shape) for _ in range(3))
    sketch.node(forward, [x], [x if forward.endswith("_.default") else output])
    sketch.node(backward, [x, out_gradient], [gradient])


def add_pool(sketch, x):
    batch, channels, side, _ = shape = sketch.values[x].shape
    small = sketch.value(batch, channels, side // 2, side // 2)
    places = sketch.value(batch, channels, side // 2, side // 2, dtype="int64")
    sketch.node("max_pool2d_with_indices.default", [x], [small, places])
    reads = [small, x, places]
    sketch.node("max_pool2d_with_indices_backward.default", reads, [sketch.value(*shape)])


def resnet50(batch):
    """ResNet-50 at 224 pixels, forward and backward, drawn from its layer table."""
    sketch = Sketch()
    stem = add_convolution(sketch, batch, 3, 64, 7, 112, stride=2)
    add_layer(sketch, stem, NORM)
    add_layer(sketch, stem, RELU)
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        side = 56 >> stage
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            narrow = add_convolution(sketch, batch, channels, width, 1, side * stride)
            middle = add_convolution(sketch, batch, width, width, 3, side, stride=stride)
            out = add_convolution(sketch, batch, width, 4 * width, 1, side)
            normed = [narrow, middle, out]
            if block == 0:
                shortcut = (batch, channels, 4 * width, 1, side)
                normed.append(add_convolution(sketch, *shortcut, stride=stride))
            for x in normed:
                add_layer(sketch, x, NORM)
            for x in (narrow, middle, out):
                add_layer(sketch, x, RELU)
            for op in ("add_.Tensor", "add.Tensor"):  # the shortcut, and its two gradients
                shape = sketch.values[out].shape
                sketch.node(op, [out, sketch.value(*shape)], [sketch.value(*shape)])
            channels = 4 * width
    return sketch.graph()


def vgg16(batch):
    """VGG16 at 224 pixels without its linear layers, 1 % of its arithmetic."""
    sketch = Sketch()
    channels = 3
    for stage, widths in enumerate(([64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3)):
        outputs = []
        for width in widths:
            outputs.append(add_convolution(sketch, batch, channels, width, 3, 224 >> stage))
            add_layer(sketch, outputs[-1], RELU)
            channels = width
        add_pool(sketch, outputs[-1])
    return sketch.graph()


def test_the_drawn_models_have_the_known_arithmetic():
    # 4.1 and 15.3 billion multiply-adds forward per image, three times that with backward.
    assert sum(node.flops for node in resnet50(1).nodes) == pytest.approx(6 * 4.09e9, rel=0.02)
    assert sum(node.flops for node in vgg16(1).nodes) == pytest.approx(6 * 15.35e9, rel=0.02)


@pytest.mark.parametrize(
    ("model", "batch", "device", "published", "tolerance"),
    [
        # Efficiencies were fitted to these very rates, so this guards the fit; it proves no more.
        (resnet50, 128, "v100", 367, 0.10),  # NVIDIA DeepLearningExamples, float32, 16 GB
        (resnet50, 128, "a100-80gb", 938, 0.15),  # the same, tf32, channels last
        (resnet50, 64, "titan-v", 285, 0.15),  # report 001, two nodes, exchange included
        (resnet50, 64, "p100", 219 * 0.88, 0.20),  # TensorFlow's DGX-1 page, scaled from SXM2
        (vgg16, 128, "v100", 190, 0.25),  # PipeDream's published profile, summed
        (vgg16, 32, "titan-v", 215, 0.20),  # report 002: 1014 img/s on 7 devices, 67 % busy
        (vgg16, 64, "p100", 154 * 0.88, 0.20),  # the same page, from memory
    ],
)
def test_published_rates_in_images_per_second(model, batch, device, published, tolerance):
    derived = batch / derive_profile(model(batch), load_device(device)).step_seconds
    assert derived == pytest.approx(published, rel=tolerance)


def test_newer_devices_train_faster():
    graph = resnet50(64)
    order = ["t4", "p100", "titan-v", "v100", "a100", "a100-80gb", "h100", "h200"]
    times = [derive_profile(graph, load_device(name)).step_seconds for name in order]
    assert times == sorted(times, reverse=True)
