"""Packing in real models: the same bits, and as much memory saved as was said."""

import copy
from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bayplan import torch_joint
from bayplan.devices.meters import open_meter
from bayplan.rewriting import free as operators
from bayplan.rewriting import packed
from bayplan.rewriting.free import free_rewrites, gradient_by_sample, gradient_by_shape
from bayplan.rewriting.packing import Pack, PackKind, apply_packs, find_packs
from bayplan.running.executor import compile_graph
from bayplan.running.partition import Step, cut
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.tracing.joint import analyse_joint

aten = torch.ops.aten
ALL = frozenset(PackKind)
SLACK_BYTES = 64 * 1024  # what malloc and Python add to a small step


class PackingBackend:
    """Runs each step as it comes, with all packs of some kinds.

    Attributes:
        packs: those applied to the last graph.
        program: that graph's operators and buffers; none is said to have a workspace.
        replay: what it does to memory.
    """

    def __init__(self, kinds: frozenset[PackKind]) -> None:
        self.kinds = kinds
        self.packs: list[Pack] = []

    def __call__(self, module: fx.GraphModule, inputs):
        return torch_joint.compile_joint(
            module,
            inputs,
            partition=self._partition,
            compile_graph=lambda module, _: compile_graph(module),
        )

    def _partition(self, joint: fx.GraphModule, _inputs, *, num_fwd_outputs: int, **_):
        joint.graph.eliminate_dead_code()
        free_rewrites(joint.graph)
        found = find_packs(joint.graph, min_bytes=0)
        self.packs = [pack for pack in found if pack.kind in self.kinds]
        apply_packs(joint.graph, [pack.name for pack in self.packs])
        joint.graph.lint()
        step = analyse_joint(
            joint, num_forward_outputs=num_fwd_outputs, cost_of=lambda node: (1.0, 0)
        )
        self.program = step.program
        schedule = plain_schedule(step.program)
        self.replay = replay_schedule(step.program, schedule)
        steps = [
            Step(op, taken) for op, taken in zip(schedule, self.replay.taken_over, strict=True)
        ]
        return cut(step, steps, num_forward=step.program.first_backward, owner=joint)


class ResidualStem(nn.Module):
    """The first layers of a ResNet and one block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image = self.stem(image)
        return self.head(torch.relu(self.block(image) + image))


def vgg_like() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 64),
        nn.ReLU(inplace=True),
        nn.Dropout(0.4),
        nn.Linear(64, 5),
    )


def pooled() -> nn.Module:
    """What has the same bits in bfloat16 traced and eager: no convolution, and half dropped.

    A traced dropout rounds other factors than 2 otherwise than the eager one.
    """
    return nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.ReLU(), nn.AvgPool2d(2))


MODELS = {
    "vgg": (vgg_like, Counter(sign=3, mask=1, indices=2, **{"late-sign": 1})),
    "stem": (ResidualStem, Counter(sign=2, indices=1, **{"late-sign": 1})),
    "pooled": (pooled, Counter(sign=2, mask=1, indices=1)),
}


def image(**options) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, 32, 32).to(**options)


def step_of(run, module: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """The loss, all gradients and all buffers of one step."""
    leaf = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(2)
    loss = run(leaf).square().mean()
    loss.backward()
    assert leaf.grad is not None
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [loss.detach(), leaf.grad, *gradients, *module.buffers()]


def compiled(module: nn.Module, kinds: frozenset[PackKind]):
    torch.compiler.reset()
    backend = PackingBackend(kinds)
    return torch.compile(module, backend=backend, dynamic=False), backend


def assert_same_bits(module: nn.Module, inputs: torch.Tensor, kinds) -> PackingBackend:
    """A packed step gives the same bits as eager; returns its backend."""
    twin = copy.deepcopy(module)
    run, backend = compiled(twin, kinds)
    expected, found = step_of(module, module, inputs), step_of(run, twin, inputs)
    for one, other in zip(expected, found, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.nan_to_num(nan=1e9), other.nan_to_num(nan=1e9))
        assert torch.equal(one.signbit(), other.signbit())
    return backend


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_is_found(name):
    build, expected = MODELS[name]
    backend = assert_same_bits(build(), image(), ALL)
    assert Counter(pack.kind.value for pack in backend.packs) == expected
    assert len({pack.name for pack in backend.packs}) == len(backend.packs)


@pytest.mark.parametrize("kind", PackKind)
def test_each_kind_alone_keeps_all_bits(kind):
    backend = assert_same_bits(vgg_like(), image(), frozenset({kind}))
    assert {pack.kind for pack in backend.packs} == {kind}


@pytest.mark.parametrize("name", MODELS)
def test_channels_last(name):
    build, _ = MODELS[name]
    module = build()
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    inputs = image(memory_format=torch.channels_last)
    assert assert_same_bits(module, inputs, ALL).packs


def test_bfloat16():
    assert assert_same_bits(pooled(), image(dtype=torch.bfloat16), ALL).packs


@pytest.mark.parametrize("name", ["vgg", "pooled"])
def test_nan_and_infinity(name):
    build, _ = MODELS[name]
    inputs = image()
    inputs[0, 0, 3, 5] = torch.nan
    inputs[1, 1, :4] = torch.inf
    inputs[2, 2, 7:] = -torch.inf
    assert assert_same_bits(build(), inputs, ALL).packs


def kept_bytes(backend: PackingBackend) -> int:
    """What forward makes and backward reads, besides the forward's outputs."""
    program = backend.program
    first = program.first_backward
    made = {buffer for op in program.ops[:first] for buffer in op.writes}
    read = {buffer for op in program.ops[first:] for buffer in op.reads}
    return sum(program.buffers[buffer] for buffer in (made & read) - program.outputs)


@pytest.mark.parametrize("name", MODELS)
def test_as_much_less_is_kept_as_was_said(name, tmp_path):
    build, _ = MODELS[name]
    kept, measured = [], []
    with open_meter(torch.device("cpu"), tmp_path) as meter:
        for kinds in (frozenset(), ALL):
            module = build()
            run, backend = compiled(module, kinds)
            step_of(run, module, image())  # compiles
            inputs = image().requires_grad_()
            before = meter.live_bytes
            output = run(inputs)
            measured.append(meter.live_bytes - before)
            del output  # it holds the model
            kept.append(kept_bytes(backend))
    saved = sum(pack.saved_bytes for pack in backend.packs)
    assert saved > kept[0] / 10
    assert kept[0] - kept[1] == saved
    assert measured[0] - measured[1] == pytest.approx(saved, abs=SLACK_BYTES)


def test_a_late_pack_frees_the_value_before_the_gradient_reaches_it(monkeypatch):
    from_bits = packed.threshold_backward_from_bits
    monkeypatch.setitem(operators._FORMS, from_bits, {0: from_bits})
    module = vgg_like()
    totals = []
    for kinds in (frozenset({PackKind.SIGN}), frozenset({PackKind.SIGN, PackKind.LATE_SIGN})):
        backend = assert_same_bits(copy.deepcopy(module), image(), kinds)
        names = [op.name for op in backend.program.ops]
        totals.append(backend.replay.total_bytes[names.index("convolution_input_gradient_1")])
    assert totals[0] - totals[1] == 4 * 16 * 32 * 32 * 4 * 31 // 32  # of 32 bits one stays


def joint_graph(step, *inputs: torch.Tensor):
    """A graph that looks as torch's joint ones: inputs, gradients of outputs, functions."""
    graph = make_fx(step, tracing_mode="fake")(*inputs).graph
    *values, gradient = graph.find_nodes(op="placeholder")
    gradient.target = "tangents_1"
    for index, value in enumerate(values):
        value.target = f"primals_{index}"
    return graph


def assert_same_results(graph: fx.Graph, step, inputs) -> None:
    graph.lint()
    found = fx.GraphModule(nn.Module(), graph)(*inputs)
    for one, other in zip(found, step(*inputs), strict=True):
        assert torch.equal(one, other)


def test_views_of_a_mask_are_seen_through():
    def step(values, gradient):
        mask = aten.gt.Scalar(values, 0)
        gradient = aten.neg.default(gradient)
        rows = aten.view.default(mask, [8, 32])
        columns = aten.t.default(rows)
        return [
            aten.mul.Tensor(values, mask),
            aten.mul.Tensor(gradient, columns),
            aten.where.self(columns, gradient, aten.mul.Tensor(aten.t.default(rows), 2.0)),
        ]

    inputs = (torch.randn(16, 16), torch.randn(32, 8))
    graph = joint_graph(step, *inputs)
    (pack,) = find_packs(graph, min_bytes=0)
    assert (pack.kind, pack.value_bytes, pack.packed_bytes) == (PackKind.MASK, 256, 32)
    apply_packs(graph, [pack.name])
    graph.eliminate_dead_code()
    assert_same_results(graph, step, inputs)
    (mask,) = graph.find_nodes(op="call_function", target=aten.gt.Scalar)
    assert mask.next.target is packed.pack_bits
    for unpack in graph.find_nodes(op="call_function", target=packed.unpack_bits):
        assert unpack.meta["val"].dtype is torch.bool


def test_parts_of_a_mask_are_seen_through():
    def step(values, gradient):
        first, second = aten.split.Tensor(aten.gt.Scalar(values, 0), 8)
        gradient = aten.neg.default(gradient)
        return [aten.mul.Tensor(gradient, first), aten.mul.Tensor(gradient, second)]

    inputs = (torch.randn(16, 16), torch.randn(8, 16))
    graph = joint_graph(step, *inputs)
    (pack,) = find_packs(graph, min_bytes=0)
    assert pack.value_bytes == 256
    apply_packs(graph, [pack.name])
    assert_same_results(graph, step, inputs)


def test_what_backward_reads_first_is_left_alone():
    def step(values, gradient):
        mask = aten.gt.Scalar(values, 0)
        return [aten.mul.Tensor(values, mask), aten.mul.Tensor(aten.t.default(gradient), mask)]

    graph = joint_graph(step, torch.randn(16, 16), torch.randn(16, 16))
    assert find_packs(graph, min_bytes=0) == []


def relu_step(extra_reader):
    """A ReLU whose output something else reads, too; that decides what can be done."""

    def step(values, gradient):
        output = aten.relu.default(values)
        return extra_reader(aten.exp.default(output), output, gradient)

    return step


def before_the_threshold(result, output, gradient):
    weight = aten.mm.default(output, gradient)
    return [result, weight, aten.threshold_backward.default(weight, output, 0)]


def behind_the_threshold(result, output, gradient):
    passed = aten.threshold_backward.default(gradient, output, 0)
    return [result, aten.mm.default(output, passed)]


def by_the_caller(result, output, gradient):
    return [result, output, aten.threshold_backward.default(gradient, output, 0)]


def at_two_thresholds(result, output, gradient):
    passed = aten.threshold_backward.default(gradient, output, 0)
    return [result, passed, aten.threshold_backward.default(gradient, output, 1)]


def through_a_view(result, output, gradient):
    return [result, aten.threshold_backward.default(gradient, aten.t.default(output), 0)]


def as_the_gradient_too(result, output, gradient):
    late = aten.add.Tensor(gradient, 1)
    return [result, late, aten.threshold_backward.default(output, output, 0)]


@pytest.mark.parametrize(
    ("reader", "kinds"),
    [
        (before_the_threshold, [PackKind.LATE_SIGN]),
        (behind_the_threshold, []),
        (by_the_caller, []),
        (at_two_thresholds, []),
        (through_a_view, []),
        (as_the_gradient_too, []),
    ],
)
def test_a_relu_is_packed_only_where_its_readers_allow(reader, kinds):
    step = relu_step(reader)
    inputs = (torch.randn(16, 16), torch.randn(16, 16))
    graph = joint_graph(step, *inputs)
    packs = find_packs(graph, min_bytes=0)
    assert [pack.kind for pack in packs] == kinds
    apply_packs(graph, [pack.name for pack in packs])
    for node in graph.find_nodes(op="call_function", target=packed.pack_positive):
        assert node.prev.target is aten.mm.default  # right behind the last other reader
    assert_same_results(graph, step, inputs)


@pytest.mark.parametrize(("batch", "reader"), [([2], gradient_by_sample), ([], gradient_by_shape)])
def test_indices_are_widened_by_sample_where_there_are_samples(batch, reader):
    options = ([2, 2], [2, 2], [0, 0], [1, 1], False)

    def step(values, gradient):
        _, indices = aten.max_pool2d_with_indices.default(values, *options)
        gradient = aten.neg.default(gradient)
        formula = aten.max_pool2d_with_indices_backward.default
        return [formula(gradient, values, *options, indices)]

    inputs = (torch.randn(*batch, 3, 20, 20), torch.randn(*batch, 3, 10, 10))
    graph = joint_graph(step, *inputs)
    free_rewrites(graph)
    (pack,) = find_packs(graph, min_bytes=0)
    assert pack.value_bytes == 4 * pack.packed_bytes  # 400 positions take 16 bits
    apply_packs(graph, [pack.name])
    (node,) = graph.output_node().all_input_nodes
    assert node.target is reader
    assert_same_results(graph, step, inputs)


def test_small_values_are_left_alone():
    inputs = (torch.randn(16, 16), torch.randn(16, 16))
    graph = joint_graph(relu_step(before_the_threshold), *inputs)
    assert len(find_packs(graph, min_bytes=16 * 16 * 4)) == 1
    assert find_packs(graph, min_bytes=16 * 16 * 4 + 1) == []


def test_a_graph_without_backward_has_nothing_to_pack():
    graph = make_fx(aten.relu.default, tracing_mode="fake")(torch.randn(8, 8)).graph
    assert find_packs(graph, min_bytes=0) == []


def test_an_unknown_name_is_a_fault():
    graph = joint_graph(relu_step(by_the_caller), torch.randn(4, 4), torch.randn(4, 4))
    with pytest.raises(AssertionError, match="sign:relu"):
        apply_packs(graph, ["sign:relu"])
