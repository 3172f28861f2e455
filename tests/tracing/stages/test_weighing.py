"""Weights of operators: their gradients count, parameters once, and what a cut would send."""

import pytest
import torch
from torch import nn

from bayplan.step import TrainingStep
from bayplan.tracing.joint import analyse_joint
from bayplan.tracing.stages.assigning import (
    by_gradient,
    parameter_bytes,
    seconds_with_backward,
    sent_bytes,
)
from bayplan.tracing.stages.whole_trace import trace_whole

pytestmark = pytest.mark.usefixtures("own_planner_cache")


def analysed(model, batch, cost_of=lambda node: (1.0, 0)):
    step = TrainingStep(model=model, batch=batch, loss_fn=lambda output: output.square().mean())
    whole = trace_whole(step, num_samples=2)
    joint = analyse_joint(
        whole.joint, num_forward_outputs=whole.num_forward_outputs, cost_of=cost_of
    )
    return whole, joint


def names(joint):
    return [op.name for op in joint.program.ops[: joint.program.first_backward - 1]]


def test_all_seconds_are_shared_out():
    _, joint = analysed(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4)
    )
    seconds = seconds_with_backward(joint)
    program = joint.program
    assert sum(seconds) == sum(op.seconds for op in program.ops)
    by_name = dict(zip(names(joint), seconds, strict=True))
    assert by_name["tanh"] == 2  # itself and tanh_backward
    assert by_name["addmm_1"] > by_name["tanh"]  # two products and a sum for its gradients


def test_an_operator_in_place_gets_the_seconds_of_its_gradient():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs):
            value = self.layer(inputs)
            return (value + inputs).mul_(value)

    _, joint = analysed(InPlace(), torch.ones(2, 4))
    assert sum(seconds_with_backward(joint)) == sum(op.seconds for op in joint.program.ops)


def test_parameters_count_where_they_are_read_first():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 8, bias=False))
    model[3].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    whole, joint = analysed(model, torch.ones(2, 4))
    weights = dict(zip(names(joint), parameter_bytes(whole, joint), strict=True))
    assert weights["addmm"] == (8 * 4 + 8) * 4
    assert weights["addmm_1"] == 8 * 4 * 4
    assert sum(weights.values()) == weights["addmm"] + weights["addmm_1"]


def test_a_cut_sends_what_is_made_before_it_and_read_after_it():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle = nn.Linear(4, 16), nn.Linear(16, 2)
            self.last = nn.Linear(2, 16)

        def forward(self, inputs):
            first = self.first(inputs)
            return self.last(self.middle(first)) + first

    _, joint = analysed(Skip(), torch.ones(2, 4))
    sent = dict(zip(names(joint), sent_bytes(joint.program), strict=True))
    wide, narrow = 2 * 16 * 4, 2 * 2 * 4
    assert sent["addmm"] == 0
    assert sent["addmm_1"] == wide
    assert sent["addmm_2"] == wide + narrow
    assert sent["add"] == 2 * wide
    assert sent["pow_1"] == wide


def test_a_gradient_belongs_to_its_number_or_the_next_one():
    operator_of = by_gradient([(2, "a"), (2, "view of a"), (4, "b"), (7, "c")])
    found = [operator_of(number) for number in (1, 2, 3, 4, 6, 7, 9)]
    assert found == ["a", "a", "b", "b", "c", "c", "c"]
