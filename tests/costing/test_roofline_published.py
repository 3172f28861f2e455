"""The roofline against published training rates of real models, drawn from their layer tables."""

import pytest
from sketching import Sketch

from bayplan.costing.catalogue import load_device
from bayplan.costing.roofline import derive_profile

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
