"""What operators count as in OneFlow's graphs."""

import pytest
import torch
from torch import nn

from bayplan.step import TrainingStep
from bayplan.tracing.joint import analyse_joint
from bayplan.tracing.stages.assigning import operator_counts
from bayplan.tracing.stages.whole_trace import trace_whole

pytestmark = pytest.mark.usefixtures("own_planner_cache")

RETURNED = 4


def counted(model, batch, loss_fn):
    """Names of forward operators, each with what it counts."""
    whole = trace_whole(TrainingStep(model=model, batch=batch, loss_fn=loss_fn), num_samples=2)
    step = analyse_joint(
        whole.joint,
        num_forward_outputs=whole.num_forward_outputs,
        cost_of=lambda node: (0.0, 0),
    )
    ops = step.program.ops[: step.program.first_backward - 1]
    return dict(zip((op.name for op in ops), operator_counts(whole, step), strict=True))


def summed(output):
    return output.sum()


def test_parameters_biases_masks_and_the_batch_are_operators():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4, bias=False))
    assert counted(model, torch.ones(2, 4), summed) == {
        "addmm": 5,  # product, weight, sum, bias, batch
        "native_dropout": 2,  # and its mask
        "mm": 2,  # and its weight; its transpose is none
        "sum_1": 1 + RETURNED,
    }


def test_a_weight_that_two_read_counts_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    counts = counted(model, torch.ones(2, 4), summed)
    assert (counts["mm"], counts["mm_1"]) == (3, 1)


def test_convolutions_with_and_without_a_bias_and_a_reshape_of_activations():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1, bias=False), nn.Flatten(), nn.Linear(8, 3)
    )
    counts = counted(model, torch.ones(2, 1, 2, 2), summed)
    assert (counts["convolution"], counts["convolution_1"], counts["addmm"]) == (5, 2, 5)


def test_a_mean_is_a_sum_and_a_product():
    batch = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    for reduction, number in (("mean", 3), ("sum", 2)):  # labels are of the batch
        counts = counted(nn.Linear(4, 3), batch, nn.CrossEntropyLoss(reduction=reduction))
        assert counts["nll_loss_forward"] == number + RETURNED
    assert (
        counted(nn.Linear(4, 3), torch.ones(2, 4), lambda output: output.mean())["mean"]
        == 2 + RETURNED
    )


def test_statistics_count_and_the_number_of_batches_does_not():
    counts = counted(nn.BatchNorm1d(4), torch.ones(2, 4), summed)
    assert counts["_native_batch_norm_legit_functional"] == 6  # scale, shift, mean, variance, batch
    assert counts["add"] == 0


def test_ways_through_backward_are_not_followed():
    # Once, what reads a weight was looked for through backward as well, along all ways there, and
    # every block that adds to its input doubled them.
    class Block(nn.Linear):
        def forward(self, inputs):
            return inputs + super().forward(inputs).tanh()

    counts = counted(nn.Sequential(*(Block(4, 4) for _ in range(30))), torch.ones(2, 4), summed)
    assert counts["addmm_29"] == 4
