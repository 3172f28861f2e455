"""Where updates stand in a joint graph, and that no schedule reads a weight after its update."""

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from bayplan import torch_joint
from bayplan.data.errors import CaptureError
from bayplan.data.program import Op, Program
from bayplan.rewriting.updates import (
    check_old_weights,
    insert_updates,
    without_backward_repeats,
)
from bayplan.tracing.joint import JointStep, analyse_joint
from bayplan.tracing.traced_step import parameters_of_updates

aten = torch.ops.aten


def update(index: int, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(0)


class Taken(Exception):
    """Raised once the joint graph is there."""


def joint_of(model: nn.Module, inputs: torch.Tensor) -> tuple[fx.GraphModule, int, list]:
    """A model's joint graph, the number of its forward outputs, and what it was traced with."""
    taken = []

    def backend(module, examples):
        def take(joint, _inputs, *, num_fwd_outputs, **_):
            taken.extend((joint, num_fwd_outputs, examples))
            raise Taken

        return torch_joint.compile_joint(module, examples, partition=take, compile_graph=None)

    with pytest.raises(Exception, match="Taken"):
        torch.compile(model, backend=backend, fullgraph=True)(inputs)
    torch.compiler.reset()
    return tuple(taken)


def updated(model: nn.Module, inputs: torch.Tensor) -> JointStep:
    joint, num_forward_outputs, examples = joint_of(model, inputs)
    parameters = [id(parameter) for parameter in model.parameters()]
    positions = {
        position: parameters.index(id(one))
        for position, one in enumerate(examples)
        if id(one) in parameters
    }
    insert_updates(
        joint.graph,
        num_forward_outputs=num_forward_outputs,
        update=update,
        index_of_input=positions,
    )
    joint.graph.lint()
    step = analyse_joint(
        joint, num_forward_outputs=num_forward_outputs, cost_of=lambda node: (1.0, 0)
    )
    return replace(step, program=without_backward_repeats(step.program))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs)) + inputs
        return inputs


class Twice(nn.Module):
    """One weight for both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(inputs @ self.weight) @ self.weight)


class Sum(nn.Module):
    """Both parameters have the gradient of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.one + self.two


def most_repeats(program: Program) -> list[int]:
    """Before each backward op, everything that may be repeated."""
    first = program.first_backward
    repeats = [index for index in range(first) if program.ops[index].can_repeat]
    schedule = list(range(first))
    for index in range(first, len(program.ops)):
        schedule += [*repeats_needed(program, index, repeats), index]
    return schedule


def repeats_needed(program: Program, index: int, repeats: list[int]) -> list[int]:
    """What some reader could ask for: all that leads to what an op reads."""
    needed, waiting = set(), [index]
    while waiting:
        for buffer in program.ops[waiting.pop()].reads:
            maker = program.producers[buffer]
            if maker in repeats and maker not in needed:
                needed.add(maker)
                waiting.append(maker)
    return sorted(needed)


def test_layers_are_updated_one_after_the_other():
    step = updated(Chain(), torch.ones(2, 4, requires_grad=True))
    updates = step.graph.find_nodes(op="call_function", target=update, sort=True)
    layers = [node.args[0] // 2 for node in updates]
    assert layers == [3, 3, 2, 2, 1, 1, 0, 0]
    # Nothing of an earlier layer is begun before: between two weights lies one layer's backward.
    names = [step.program.ops[index].name for index in parameters_of_updates(step, update)]
    gradients = [op.name for op in step.program.ops if op.name.startswith("tanh_backward")]
    ops = [op.name for op in step.program.ops if op.name in (*names, *gradients)]
    assert ops[0] == gradients[0]
    assert [name in gradients for name in ops] == [True, False, False] * 4


@pytest.mark.parametrize("model", [Chain(), Twice(), Sum()])
def test_no_schedule_reads_a_weight_after_its_update(model):
    step = updated(model, torch.ones(2, 4))
    program, changes = step.program, parameters_of_updates(step, update)
    assert len(changes) == len(list(model.parameters()))
    schedule = most_repeats(program)
    check_old_weights(program, range(len(program.ops)), changes)
    check_old_weights(program, schedule, changes)
    for index in changes:
        op = program.ops[index]
        assert not op.can_repeat
        assert program.buffers[op.writes[0]] == 0
        assert {*op.reads} & {*changes.values()} == {changes[index]}


def test_gradients_are_released_behind_their_updates():
    step = updated(Chain(), torch.ones(2, 4))
    program = step.program
    weight_bytes = 4 * 4 * 4
    assert not any(program.buffers[buffer] == weight_bytes for buffer in program.outputs)


def test_weight_used_twice_is_updated_once_behind_both():
    step = updated(Twice(), torch.ones(2, 4))
    ((index, buffer),) = parameters_of_updates(step, update).items()
    assert step.program.readers[buffer][-1] == index


def test_gradient_that_others_hold_is_copied():
    step = updated(Sum(), torch.ones(4))
    gradients = [node.args[1] for node in step.graph.find_nodes(op="call_function", target=update)]
    assert len(gradients) == 2
    assert all(gradient.target is aten.clone.default for gradient in gradients)
    assert len({*gradients}) == 2


def test_gradients_of_unknown_inputs_are_refused():
    joint, num_forward_outputs, _ = joint_of(Sum(), torch.ones(4))
    with pytest.raises(CaptureError, match="turn update_in_backward off"):
        insert_updates(
            joint.graph,
            num_forward_outputs=num_forward_outputs - 1,
            update=update,
            index_of_input={0: 0},
        )


def test_reads_after_an_update_are_told():
    ops = (
        Op(name="forward", reads=(0,), writes=(1,), seconds=1.0),
        Op(name="gradient", reads=(1,), writes=(2,), seconds=1.0),
        Op(name="update", reads=(2, 0), writes=(3,), seconds=1.0),
        Op(name="other", reads=(1,), writes=(4,), seconds=1.0),
    )
    program = Program(buffers=(4, 8, 4, 0, 8), ops=ops, first_backward=1, inputs=frozenset({0}))
    check_old_weights(program, (0, 1, 2, 3), {2: 0})
    check_old_weights(program, (0, 0, 1, 2, 3), {2: 0})
    with pytest.raises(ValueError, match=r"step 3 \(forward\) reads buffer 0, which update has"):
        check_old_weights(program, (0, 1, 2, 0, 3), {2: 0})
