"""BatchNorm repeated from its saved statistics: the same bits, and cheaper."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bayplan.costing.pricing import measured_prices
from bayplan.data.plan import StepOrder
from bayplan.data.profile import Clock
from bayplan.data.program import Op, Program
from bayplan.models.registry import load
from bayplan.planning.memory.orders import by_strategy
from bayplan.rewriting import repeats as normalising
from bayplan.step import TrainingStep
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext, TracedStep

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("own_planner_cache")

SHAPES = {
    "rows": (6, 33),
    "sequences": (3, 5, 21),
    "images": (4, 300, 13, 17),
    "pixels": (5, 7, 1, 1),
    "one channel": (16, 1, 3, 3),
    "volumes": (2, 6, 3, 5, 7),
}


def norm_of(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> fx.Node:
    """The node of a BatchNorm in training, in a graph that reads all that backward would."""

    def function(x, weight, bias):
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)

    graph = make_fx(function, tracing_mode="fake")(x, weight, bias).graph
    target = aten._native_batch_norm_legit.no_stats
    return graph.find_nodes(op="call_function", target=target)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_offered_gives_the_same_bits(shape, is_last, is_affine, dtype):
    x = torch.randn(SHAPES[shape], dtype=dtype)
    if is_last and x.dim() in normalising._CHANNELS_LAST:
        x = x.contiguous(memory_format=normalising._CHANNELS_LAST[x.dim()])
    weight, bias = torch.randn(2, x.shape[1], dtype=dtype) if is_affine else (None, None)
    repeat = normalising.partial_repeat(norm_of(x, weight, bias))
    assert (repeat is None) == (dtype is torch.bfloat16)  # which torch rounds in another way
    if repeat is None:
        return
    first, mean, inverse_deviation = aten._native_batch_norm_legit.no_stats(
        x, weight, bias, True, 0.1, 1e-5
    )
    again = repeat.function(x, weight, bias, mean, inverse_deviation)
    assert torch.equal(again.contiguous().view(torch.uint8), first.contiguous().view(torch.uint8))
    assert again.stride() == first.stride()


def test_trying_leaves_the_generator_alone():
    normalising._gives_same_bits.cache_clear()
    before = torch.get_rng_state()
    assert normalising.partial_repeat(norm_of(torch.ones(4, 3), None, None)) is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_other_kernels_are_repeated_whole():
    with_gaps = torch.randn(4, 8, 6)[:, ::2]
    assert normalising.partial_repeat(norm_of(with_gaps, None, None)) is None
    graph = make_fx(lambda x: x.relu(), tracing_mode="fake")(torch.ones(3)).graph
    (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    assert normalising.partial_repeat(relu) is None


def test_an_output_with_two_names_is_repeated_whole():
    node = norm_of(torch.randn(4, 3), None, None)
    (output,) = normalising._parts(node, 0)
    with node.graph.inserting_after(node):
        second = node.graph.node_copy(output)
    assert second in node.users
    assert normalising.partial_repeat(node) is None


NORMS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "rows": (nn.BatchNorm1d, (8, 6)),
    "sequences": (nn.BatchNorm1d, (4, 6, 9)),
    "images": (nn.BatchNorm2d, (4, 6, 5, 5)),
    "volumes": (nn.BatchNorm3d, (2, 6, 3, 5, 5)),
    "without weights": (partial(nn.BatchNorm2d, affine=False), (4, 6, 5, 5)),
    "without running statistics": (
        partial(nn.BatchNorm2d, track_running_stats=False),
        (4, 6, 5, 5),
    ),
    "slow running statistics": (partial(nn.BatchNorm2d, momentum=0.01), (4, 6, 5, 5)),
}


class Normalised(nn.Module):
    """Two norms whose outputs backward reads."""

    def __init__(self, norm: Callable[..., nn.Module], num_channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.norms = nn.ModuleList([norm(num_channels), norm(num_channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.norms[0](x * self.scale))
        return nn.functional.gelu(self.norms[1](x)).square().mean()


def partial_ops(program: Program) -> list[Op]:
    return [op for op in program.ops if op.repeat_writes is not None]


def decide_noting(found: list[Program], strategy: Any, traced: TracedStep) -> StepOrder:
    found.append(traced.with_packs().program)
    return by_strategy("all", strategy)(traced)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", NORMS)
def test_training_is_the_same(digests, bind_to, repeat_everything, name, memory_format):
    norm, shape = NORMS[name]
    if memory_format is torch.channels_last and len(shape) != 4:
        pytest.skip("images only")

    def build():
        x = torch.randn(shape).contiguous(memory_format=memory_format)
        return Normalised(norm, shape[1]), x, lambda output: output

    programs: list[Program] = []
    bound = []
    decide = partial(decide_noting, programs, repeat_everything)
    plain = digests(build, num_steps=3)
    planned = digests(build, num_steps=3, prepare=lambda step: bound.append(bind_to(step, decide)))
    assert planned == plain
    (order,) = bound[0].orders
    (program,) = programs
    norms = partial_ops(program)
    assert len(norms) == 2
    for op in norms:
        assert order.schedule.count(program.ops.index(op)) > 1
        assert len({*op.repeat_reads} & {*op.writes}) == 2  # mean and inverse deviation


def test_a_repeat_is_cheaper_than_the_op(planner_cache):
    model, batch, loss_fn = load("resnet18")(4, image_size=96)
    context = MemoryContext(prices=partial(measured_prices, cache=planner_cache, clock=Clock.CPU))
    traced = trace_step(TrainingStep(model=model, batch=batch, loss_fn=loss_fn), context)
    norms = partial_ops(traced.with_packs().program)
    assert len(norms) == 20
    assert sum(op.again().seconds for op in norms) < sum(op.seconds for op in norms)
