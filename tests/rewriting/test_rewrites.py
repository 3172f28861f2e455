"""The free rewrites: what they take away is never read, and the step keeps every bit.

A formula that only asks for its input's shape must give the same bits for an input full of NaN.
"""

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bayplan import torch_compat, torch_joint
from bayplan.rewriting import free as rewrites
from bayplan.running.executor import compile_graph
from bayplan.running.partition import Step, cut
from bayplan.tracing.joint import analyse_joint

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# By formula of `SHAPE_ONLY`, a layer whose gradient it is, and how many dimensions that takes.
LAYERS = {
    aten.max_pool2d_with_indices_backward.default: (nn.MaxPool2d(3, 2, 1), 4),
    aten.max_pool3d_with_indices_backward.default: (nn.MaxPool3d(3, 2, 1), 5),
    aten.adaptive_max_pool2d_backward.default: (nn.AdaptiveMaxPool2d(3), 4),
    aten.adaptive_max_pool3d_backward.default: (nn.AdaptiveMaxPool3d(3), 5),
    aten.avg_pool2d_backward.default: (nn.AvgPool2d(3, 2, 1, ceil_mode=True), 4),
    aten.avg_pool3d_backward.default: (nn.AvgPool3d(3, 2, 1, ceil_mode=True), 5),
    aten._adaptive_avg_pool2d_backward.default: (nn.AdaptiveAvgPool2d(3), 4),
    aten._adaptive_avg_pool3d_backward.default: (nn.AdaptiveAvgPool3d(3), 5),
    aten.reflection_pad1d_backward.default: (nn.ReflectionPad1d((1, 2)), 3),
    aten.reflection_pad2d_backward.default: (nn.ReflectionPad2d((1, 2, 0, 3)), 4),
    aten.reflection_pad3d_backward.default: (nn.ReflectionPad3d((1, 2, 0, 3, 1, 1)), 5),
    aten.replication_pad1d_backward.default: (nn.ReplicationPad1d((1, 2)), 3),
    aten.replication_pad2d_backward.default: (nn.ReplicationPad2d((1, 2, 0, 3)), 4),
    aten.replication_pad3d_backward.default: (nn.ReplicationPad3d((1, 2, 0, 3, 1, 1)), 5),
}

CASES = [
    pytest.param(formula, dtype, is_channels_last, id=f"{formula}-{dtype}-{is_channels_last}")
    for formula, (_, num_dimensions) in LAYERS.items()
    for dtype in (torch.float32, torch.bfloat16)
    for is_channels_last in (False, True)
    if num_dimensions in FORMATS or not is_channels_last
    # torch has no such kernel
    if dtype is torch.float32 or formula is not aten.avg_pool3d_backward.default
]


def assert_same_step(model: nn.Module, inputs: torch.Tensor, rewrite) -> fx.Graph:
    """Output, gradients and buffers of a rewritten step equal those of a plain one.

    Returns the rewritten joint graph.
    """
    graphs: list[fx.Graph] = []

    def partition(joint, joint_inputs, *, num_fwd_outputs, **_):
        rewrite(joint.graph)
        step = analyse_joint(
            joint, num_forward_outputs=num_fwd_outputs, cost_of=lambda node: (1.0, 0)
        )
        graphs.append(joint.graph)
        steps = [Step(index) for index in range(len(step.program.ops))]
        return cut(step, steps, num_forward=step.program.first_backward, owner=joint)

    def backend(module, example_inputs):
        return torch_joint.compile_joint(
            module,
            example_inputs,
            partition=partition,
            compile_graph=lambda module, _: compile_graph(module),
        )

    torch.compiler.reset()
    twin = copy.deepcopy(model)
    results = []
    for one, run in ((model, model), (twin, torch.compile(twin, backend=backend))):
        leaf = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        torch.manual_seed(7)
        output = run(leaf)
        torch.manual_seed(8)
        output.backward(torch.randn_like(output))
        gradients = [parameter.grad for parameter in one.parameters()]
        results.append([output, leaf.grad, *gradients, *one.buffers()])
    for plain, rewritten in zip(*results, strict=True):
        assert plain.stride() == rewritten.stride()
        torch.testing.assert_close(rewritten, plain, rtol=0, atol=0, equal_nan=True)
    (graph,) = graphs
    return graph


def targets(graph: fx.Graph) -> set:
    return {node.target for node in graph.nodes}


def test_every_formula_has_a_proof():
    assert set(LAYERS) == set(rewrites.SHAPE_ONLY)


@pytest.mark.parametrize(("formula", "dtype", "is_channels_last"), CASES)
def test_formula_never_reads_its_input(formula, dtype, is_channels_last):
    layer, num_dimensions = LAYERS[formula]
    torch.manual_seed(0)
    inputs = torch.randn((2, 3, 8, 9, 7)[:num_dimensions]).to(dtype)
    if is_channels_last:
        inputs = inputs.to(memory_format=FORMATS[num_dimensions])
    seen = []

    class Watch(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
            if func is formula:
                gradient, image, *options = args
                seen.append((gradient, torch.full_like(image, torch.nan), options))
                seen.append(func(*args))
                return seen[-1]
            return func(*args, **(kwargs or {}))

    with Watch():
        leaf = inputs.requires_grad_()
        layer(leaf).square().sum().backward()
    (gradient, unread, options), expected = seen
    for result in (
        formula(gradient, unread, *options),
        rewrites.gradient_by_shape(formula, gradient, unread.shape, unread.stride(), *options),
    ):
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()


@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("formula", rewrites.SHAPE_ONLY[:4], ids=str)
def test_small_indices_are_widened_by_sample(formula, is_channels_last):
    layer, num_dimensions = LAYERS[formula]
    layer = copy.deepcopy(layer)
    layer.return_indices = True
    torch.manual_seed(0)
    image = torch.randn((3, 2, 8, 9, 7)[:num_dimensions])
    if is_channels_last:
        image = image.to(memory_format=FORMATS[num_dimensions])
    output, indices = layer(image)
    gradient = torch.randn_like(output)
    size = num_dimensions - 2
    options = (
        [[3] * size, [2] * size, [1] * size, [1] * size, False] if hasattr(layer, "stride") else []
    )
    expected = formula(gradient, image, *options, indices)
    small = indices.to(torch.uint16)
    result = rewrites.gradient_by_sample(
        formula, gradient, image.shape, image.stride(), *options, small, stride=expected.stride()
    )
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()


@pytest.mark.parametrize("formula", LAYERS, ids=str)
def test_input_is_forgotten(formula):
    layer, num_dimensions = LAYERS[formula]
    inputs = torch.randn((2, 3, 8, 9, 7)[:num_dimensions])
    graph = assert_same_step(layer, inputs, rewrites.free_rewrites)
    assert formula not in targets(graph)
    (freed,) = graph.find_nodes(op="call_function", target=rewrites.gradient_by_shape)
    read = {source.name for source in freed.all_input_nodes}
    assert not any(name.startswith("primals") for name in read)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolution_is_split_with_the_same_bits(memory_format):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2, padding=1)
    )
    inputs = torch.randn(2, 3, 12, 12).to(memory_format=memory_format)
    graph = assert_same_step(model, inputs, rewrites.free_rewrites)
    inputs_alone = graph.find_nodes(op="call_function", target=rewrites.convolution_input_gradient)
    assert len(inputs_alone) == 2
    for node in inputs_alone:
        gradient, weight = node.args[:2]
        assert set(node.all_input_nodes) == {gradient, weight}


def test_running_statistics_are_forgotten():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    graph = assert_same_step(model, torch.randn(4, 3, 8, 8), rewrites.free_rewrites)
    (node,) = graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    assert node.args[3:5] == (None, None)


class _FillsIn(nn.Module):
    """Writes one step after another into its result, as a recurrence does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(state * 0.5 + x[:, step])
            result[:, step] = state
        result[:, :2] = x[:, 2:4]  # a slice
        result.diagonal(dim1=1, dim2=2)[:] = 1.0
        return result


def test_parts_are_written_without_a_copy_first():
    x = torch.randn(3, 6, 6)
    before = assert_same_step(_FillsIn(), x, lambda graph: None)
    after = assert_same_step(_FillsIn(), x, rewrites.free_rewrites)
    written_before, written_after = (
        [node.args[1].target for node in graph.nodes if rewrites.writes_a_part(node)]
        for graph in (before, after)
    )
    assert aten.copy.default in written_before
    assert aten.copy.default not in written_after


def test_rewriting_twice_changes_nothing_more():
    def twice(graph: fx.Graph) -> None:
        rewrites.free_rewrites(graph)
        before = str(graph)
        rewrites.free_rewrites(graph)
        assert str(graph) == before

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    graph = assert_same_step(model, torch.randn(2, 3, 8, 8), twice)
    assert rewrites.gradient_by_shape in targets(graph)


def test_an_empty_batch_is_rewritten_too():
    gradient = torch.empty(0, 3, 4, 4)
    shape, stride = (0, 3, 8, 8), (192, 64, 8, 1)
    indices = torch.empty(0, 3, 4, 4, dtype=torch.int64)
    result = rewrites.gradient_by_shape(
        aten.max_pool2d_with_indices_backward.default,
        gradient, shape, stride, [2, 2], [2, 2], [0, 0], [1, 1], False, indices,
    )  # fmt: skip
    assert result.shape == shape


def test_an_unknown_batch_size_is_left_alone():
    def step(image: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return aten._adaptive_avg_pool2d_backward(gradient, image)

    image, gradient = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 4, 4)
    for mode, is_known in (("fake", True), ("symbolic", False)):
        graph = make_fx(step, tracing_mode=mode)(image, gradient).graph
        rewrites.free_rewrites(graph)
        assert (rewrites.gradient_by_shape in targets(graph)) is is_known
