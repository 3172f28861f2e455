"""Cutting a joint graph: forward hands on what is kept, repeats read the latest copies."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from bayplan import torch_compat as torch_compat
from bayplan import torch_joint
from bayplan.rewriting.free import free_rewrites
from bayplan.rewriting.repeats import make_repeatable
from bayplan.running.executor import compile_graph
from bayplan.running.partition import Step, cut
from bayplan.running.swaps.swapping import SwapKind, Swapper, SwapStep
from bayplan.running.swaps.tier import open_tier
from bayplan.tracing.joint import OVERWRITES, SWAPPER, JointStep, analyse_joint

Plan = Callable[[JointStep], tuple[Sequence[Step], int]]
Graphs = tuple[JointStep, fx.Graph, fx.Graph]


def plain(step: JointStep) -> tuple[list[Step], int]:
    program = step.program
    return [Step(index) for index in range(len(program.ops))], program.first_backward


def repeating(*names: str) -> Plan:
    """All of the named forward ops once more, at the start of backward."""

    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        again = [Step(i) for i, op in enumerate(step.program.ops) if op.name in names and i < first]
        assert len(again) == len(names)
        return [*steps[:first], *again, *steps[first:]], first

    return plan


def run_with(
    function: Callable[..., Any], plan: Plan, *inputs: torch.Tensor, swapper: Swapper | None = None
) -> tuple[list[Graphs], list[torch.Tensor]]:
    """Run a function as planned; returns the graphs, and its output with the inputs' gradients."""
    graphs: list[Graphs] = []

    def partition(joint, joint_inputs, *, num_fwd_outputs, **_):
        free_rewrites(joint.graph)  # or BatchNorm's formula asks repeats for their statistics
        make_repeatable(joint.graph)
        step = analyse_joint(
            joint, num_forward_outputs=num_fwd_outputs, cost_of=lambda node: (1.0, 0)
        )
        steps, num_forward = plan(step)
        forward, backward = cut(step, steps, num_forward=num_forward, owner=joint, swapper=swapper)
        graphs.append((step, forward.graph, backward.graph))
        return forward, backward

    def backend(module, example_inputs):
        return torch_joint.compile_joint(
            module,
            example_inputs,
            partition=partition,
            compile_graph=lambda module, _: compile_graph(module),
        )

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return graphs, results_of(compiled, *inputs)


def results_of(function: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    torch.manual_seed(0)
    output = function(*leaves)
    (output * torch.arange(1.0, output.numel() + 1).view(output.shape)).sum().backward()
    return [output.detach(), *(one.grad for one in leaves if one.grad is not None)]


def assert_same(
    function: Callable[..., Any], plan: Plan, *inputs: torch.Tensor, **how: Any
) -> Graphs:
    graphs, planned = run_with(function, plan, *inputs, **how)
    for one, other in zip(results_of(function, *inputs), planned, strict=True):
        assert torch.equal(one, other)
    return graphs[0]


def names(graph: fx.Graph) -> list[str]:
    """The operators a graph calls, without views."""
    called = (str(node.target) for node in graph.nodes if node.op == "call_function")
    plain_names = (name.removeprefix("aten.").removesuffix(".default") for name in called)
    return [name for name in plain_names if name not in ("view", "detach", "_unsafe_view")]


def saved(graph: fx.Graph) -> set[str]:
    """What a backward graph takes from forward."""
    inputs = graph.find_nodes(op="placeholder")
    return {node.name for node in inputs if not torch_compat.is_tangent(node)}


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def wave(x: torch.Tensor) -> torch.Tensor:
    """The gradient of each reads its input."""
    gelu = nn.functional.gelu
    return gelu(gelu(gelu(x)))


def test_plain_order_hands_on_what_backward_reads():
    _, forward, backward = assert_same(wave, plain, weight(3))
    assert names(forward) == ["gelu", "gelu", "gelu"]
    assert names(backward) == ["gelu_backward"] * 3
    assert saved(backward) == {"primals_1", "gelu", "gelu_1"}


def test_repeated_operators_are_not_handed_on():
    _, forward, backward = assert_same(wave, repeating("gelu", "gelu_1"), weight(3))
    assert names(forward) == ["gelu", "gelu", "gelu"]
    assert names(backward) == ["gelu", "gelu", *["gelu_backward"] * 3]
    assert saved(backward) == {"primals_1"}


def test_repeat_of_a_part_reads_what_was_handed_on():
    _, _, backward = assert_same(wave, repeating("gelu_1"), weight(3))
    assert saved(backward) == {"primals_1", "gelu"}


def test_repeat_reads_the_latest_copy():
    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        again = [Step(0), Step(1), Step(0), Step(1)]
        return [*steps[:first], *again, *steps[first:]], first

    _, _, backward = assert_same(wave, plan, weight(3))
    # The older copies serve nobody, and what serves nobody is not run.
    assert names(backward) == ["gelu", "gelu", *["gelu_backward"] * 3]
    first, second = backward.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
    assert second.args[0] is first


def test_reader_between_two_copies_reads_the_older_one():
    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        last, *others = steps[first:]
        return [*steps[:first], Step(0), Step(1), last, Step(0), *others], first

    _, _, backward = assert_same(wave, plan, weight(3))
    calls = backward.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
    older, middle, newer = calls
    assert middle.args[0] is older
    second_formula = backward.find_nodes(
        op="call_function", target=torch.ops.aten.gelu_backward.default
    )[1]
    assert second_formula.args[1] is newer


def test_views_are_made_anew_for_each_copy():
    def function(x: torch.Tensor) -> torch.Tensor:
        gelu = nn.functional.gelu
        return gelu(gelu(x).view(6))

    _, _, backward = assert_same(function, repeating("gelu"), weight(2, 3))
    assert saved(backward) == {"primals_1"}
    (gelu,) = backward.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
    assert [user.target for user in gelu.users] == [torch.ops.aten.view.default]


def test_view_is_made_anew_where_its_next_reader_is_far_away():
    # Each takes some hundred bytes, and a repeated unrolled model had dozens of them alive.
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        turned = w.t()
        y = x @ turned
        for _ in range(12):
            y = y.sin()
        return y @ turned + turned

    _, forward, _ = assert_same(function, plain, weight(3, 3), weight(3, 3))
    turns = forward.find_nodes(op="call_function", target=torch.ops.aten.t.default)
    readers = [[str(user.target) for user in turn.users if user.op != "output"] for turn in turns]
    assert readers == [["aten.mm.default"], ["aten.mm.default", "aten.add.Tensor"]]


def test_outputs_are_first_copies():
    """A repeat makes the buffer again for its readers, not for the caller who holds it."""
    _, forward, backward = assert_same(
        lambda x: nn.functional.gelu(x).exp(), repeating("gelu", "exp"), weight(3)
    )
    assert names(forward) == ["gelu", "exp"]
    outputs: Any = forward.output_node().args[0]
    assert outputs[0].name == "exp"
    assert names(backward)[:2] == ["gelu", "exp"]


def test_random_operator_repeats_its_numbers():
    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x.sin(), 0.5).exp()

    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        again = [Step(i) for i in range(first) if step.program.ops[i].can_repeat]
        return [*steps[:first], *again, *steps[first:]], first

    _, _, backward = assert_same(function, plan, weight(200))
    assert any("generator_state" in name for name in saved(backward))
    assert not any("generator_state" in name for name in names(backward))


def test_running_statistics_are_updated_once():
    norm = nn.BatchNorm1d(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        return norm(nn.functional.gelu(x)).exp()

    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        again = [Step(i) for i in range(first) if step.program.ops[i].can_repeat]
        return [*steps[:first], *again, *steps[first:]], first

    graphs, _ = run_with(function, plan, weight(8, 3))
    assert any("normalise" in name for name in names(graphs[0][2]))
    assert norm.num_batches_tracked == 1


def test_result_overwrites_an_argument_that_is_ours():
    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        (sin,) = step.program.ops[0].writes
        return [steps[0], Step(1, taken_over=sin), *steps[2:]], first

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1).cos()

    _, forward, _ = assert_same(function, plan, weight(3))
    marks = {node.name: node.meta[OVERWRITES] for node in forward.nodes if OVERWRITES in node.meta}
    assert marks == {"add": 0}


def test_what_forward_handed_on_is_never_overwritten():
    """A second backward may still read it; here it is reached through a view."""

    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        (exp,) = step.program.ops[1].writes
        last = next(i for i, op in enumerate(step.program.ops) if i >= first and exp in op.reads)
        steps[last] = Step(last, taken_over=exp)
        return steps, first

    _, _, backward = assert_same(lambda x: x.sigmoid().exp().tanh(), plan, weight(3))
    assert "exp" in saved(backward)
    assert not any(node.meta.get(OVERWRITES) is not None for node in backward.nodes)


@pytest.mark.parametrize("num_returns", [1, 2])
def test_swapped_buffer_is_a_token_between_the_graphs(tmp_path, num_returns):
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return nn.functional.gelu(y) * y.tanh()

    def plan(step: JointStep) -> tuple[list[Step], int]:
        steps, first = plain(step)
        (exp,) = step.program.ops[0].writes
        readers = [i for i, op in enumerate(step.program.ops) if i >= first and exp in op.reads]
        assert len(readers) >= 2
        forward = [steps[0], Step(SwapStep(SwapKind.OUT, exp)), *steps[1:first]]
        forward.append(Step(SwapStep(SwapKind.AWAY, exp)))
        backward: list[Step] = []
        for index in range(first, len(steps)):
            if index in readers[:num_returns]:
                is_last = index == readers[num_returns - 1]
                backward.append(Step(SwapStep(SwapKind.BACK, exp)))
                backward.append(Step(SwapStep(SwapKind.HERE, exp, is_last=is_last)))
            backward.append(steps[index])
        return [*forward, *backward], len(forward)

    with open_tier(torch.device("cpu"), capacity_bytes=2**16, directory=tmp_path) as store:
        swapper = Swapper(store)
        _, forward, backward = assert_same(function, plan, weight(100), swapper=swapper)
        assert store.num_out == 1
        assert store.num_in == num_returns
        assert store.used_bytes == 0
    assert any(name.startswith("token") for name in saved(backward))
    assert "exp" not in saved(backward)
    calls = [node for node in (*forward.nodes, *backward.nodes) if SWAPPER in node.meta]
    assert len(calls) == 2 + 2 * num_returns


def test_constants_reach_both_graphs():
    constant = torch.tensor([2.0, 3.0, 4.0])
    assert_same(lambda x: (x * torch.tensor([2.0, 3.0, 4.0])).sin(), plain, weight(3))
    assert_same(lambda x: (x * constant).sin(), plain, weight(3))
