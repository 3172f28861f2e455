"""`StagedStep`: what goes from stage to stage, and what a stage keeps to itself."""

import weakref

import pytest
import torch
from torch import nn

from bayplan.costing.pricing import free_prices
from bayplan.running.compiled_stage import compile_stage
from bayplan.step import TrainingStep
from bayplan.tracing.stages.drawing import Streams
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole import InputKind
from bayplan.tracing.stages.whole_trace import trace_whole
from bayplan.tracing.traced_step import MemoryContext

pytestmark = pytest.mark.usefixtures("own_planner_cache")


class Skip(nn.Module):
    """Three layers; the last one reads what the first one made, a mask and a table."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.table = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, inputs):
        table, mask = self.table.exp(), self.mask.logical_not()
        first = self.layers[0](inputs) * table
        second = self.layers[1](first.tanh()).masked_fill(mask, 0.0)
        return self.layers[2](second.tanh() + first).masked_fill(mask, 0.0) * table


@pytest.fixture
def staged():
    step = TrainingStep(
        model=Skip(), batch=torch.randn(4, 4), loss_fn=lambda output: output.square().mean()
    )
    whole = trace_whole(step, num_samples=4)
    ops = [op.name for op in StagedStep(whole, (0,)).step.program.ops]
    return StagedStep(whole, (0, ops.index("addmm_1"), ops.index("addmm_2")))


def compiled(staged, stage):
    context = MemoryContext(prices=free_prices)
    return compile_stage(staged, stage, context, streams=Streams({}))


def test_a_skip_goes_straight_to_who_reads_it(staged):
    assert set(staged.carried.forward) == {(0, 1), (0, 2), (1, 2)}
    assert all(late > early for late, early in staged.carried.backward)


def test_what_no_sample_and_no_parameter_is_in_is_made_where_it_is_read(staged):
    carried = [name for names in staged.carried.forward.values() for name in names]
    assert "exp" in carried  # a parameter is in it, and its gradient must come back
    assert "logical_not" not in carried
    for stage in (1, 2):
        names = [node.name for node in compiled(staged, stage).graph.joint.graph.nodes]
        assert "logical_not" in names


def test_a_stage_reads_its_own_parameters_and_no_others(staged):
    for stage in range(3):
        graph = compiled(staged, stage).graph
        read = {one.name for one in graph.inputs if one.kind is InputKind.PARAMETER}
        wanted = {f"layers.{stage}.weight", f"layers.{stage}.bias"}
        assert read == wanted | ({"table"} if stage == 0 else set())
        assert set(graph.parameters) == read
        assert graph.has_loss == (stage == 2)


def test_forward_releases_what_it_was_given(staged):
    stage = compiled(staged, 2)
    arguments = [
        torch.randn(node.meta["val"].shape)
        for node in stage.graph.joint.graph.find_nodes(op="placeholder")
        if "tangents" not in node.name
    ]
    carried = [one.kind is InputKind.CARRIED for one in stage.graph.inputs]
    watched = weakref.ref(arguments[carried.index(True)])
    outputs = stage.forward(arguments)
    assert arguments == []
    assert len(outputs) >= stage.graph.num_forward_outputs
    del outputs
    assert watched() is None


def test_one_stage_is_the_whole_step(staged):
    whole = StagedStep(staged.whole, (0,))
    graph = compiled(whole, 0).graph
    assert not whole.carried.forward
    assert set(graph.parameters) == set(staged.whole.gradients())
    assert graph.sent == graph.gradients_in == graph.gradients_out == ()
