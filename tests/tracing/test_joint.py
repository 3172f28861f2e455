"""The joint graph as a program: who makes which memory, what only names it, and the loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from bayplan import torch_compat, torch_joint
from bayplan.costing.operators import made_up
from bayplan.data.program import Op
from bayplan.devices.device import ObjectBytes
from bayplan.rewriting.free import positions_to_overwrite
from bayplan.rewriting.repeats import make_repeatable
from bayplan.tracing.joint import JointStep, LossMemory, MemoryContext, analyse_joint


class Stopped(Exception):
    pass


def joint_of(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False
) -> tuple[fx.GraphModule, int]:
    """The joint graph that torch traces of a function, and how many outputs are forward's."""
    found = []

    def partition(joint, joint_inputs, *, num_fwd_outputs, **_):
        found.append((joint, num_fwd_outputs))
        raise Stopped

    def backend(module, example_inputs):
        return torch_joint.compile_joint(
            module, example_inputs, partition=partition, compile_graph=None
        )

    torch.compiler.reset()
    with pytest.raises(Exception, match="Stopped") as fault:
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    assert isinstance(torch_compat.compile_fault(fault.value), Stopped)
    return found[0]


def analysed(function: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> JointStep:
    joint, num_forward_outputs = joint_of(function, *inputs)
    return analyse_joint(
        joint,
        num_forward_outputs=num_forward_outputs,
        cost_of=lambda node: (1.0, 7),
        context=MemoryContext(**settings),
    )


def test_view_of_known_size_lies_in_memory_of_known_size():
    # An expert's rows lay in a tensor of another size at every call. torch left that open, and
    # operators that read it could not be priced: a mixture of experts was refused.
    joint, num_outputs = joint_of(
        lambda x: x * 2, torch.ones(8, requires_grad=True)[:1], dynamic=True
    )
    (rows, _) = joint.graph.find_nodes(op="placeholder")
    assert not isinstance(rows.meta["val"].untyped_storage().nbytes(), int)
    assert made_up(rows.meta["val"]).untyped_storage().nbytes() == 32
    step = analyse_joint(joint, num_forward_outputs=num_outputs, cost_of=lambda _: (1.0, 7))
    assert all(isinstance(size, int) for size in step.program.buffers)


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def op_named(step: JointStep, name: str) -> Op:
    (op,) = [op for op in step.program.ops if op.name == name]
    return op


def test_update_comes_last_and_takes_memory_beside_the_gradients():
    step = analysed(lambda x: x.sin(), weight(3), update_bytes=100)
    update = step.program.ops[-1]
    assert (update.name, update.workspace_bytes, update.is_callers) == ("update", 100, True)
    assert {*update.reads} <= step.program.outputs
    assert step.op_nodes[-1] is None
    assert analysed(lambda x: x.sin(), weight(3)).program.ops[-1].name != "update"


def test_views_are_names_of_their_buffer():
    step = analysed(lambda x: x.sigmoid().view(6).exp()[1:3].tanh(), weight(2, 3))
    forward = step.program.ops[: step.program.first_backward]
    assert [op.name for op in forward] == ["sigmoid", "exp", "tanh", "loss"]
    sigmoid, exp, tanh, _ = forward
    assert exp.reads == sigmoid.writes
    assert tanh.reads == exp.writes
    views = {node.name: step.buffers_of[node] for node in step.buffers_of}
    assert views["view"] == sigmoid.writes
    assert views["slice_1"] == exp.writes


def test_bytes_are_of_whole_storages_and_rounded():
    step = analysed(lambda x: x.sin()[:1].cos(), weight(5), granularity_bytes=64)
    assert step.program.buffers[op_named(step, "sin").writes[0]] == 64
    exact = analysed(lambda x: x.sin()[:1].cos(), weight(5))
    assert exact.program.buffers[op_named(exact, "sin").writes[0]] == 20


def test_costs_and_memory_beside_the_graph_are_taken_over():
    step = analysed(lambda x: x.sin(), weight(3), resident_bytes=100)
    assert op_named(step, "sin").seconds == 1.0
    assert op_named(step, "sin").workspace_bytes == 7
    assert step.program.resident_bytes == 100
    assert step.program.always_bytes == 112


def test_parameters_are_inputs_and_gradients_are_outputs():
    x, w = torch.randn(4, 3), weight(3, 2)
    step = analysed(lambda x, w: x @ w, x, w)
    sizes = sorted(step.program.buffers[buffer] for buffer in step.program.inputs)
    assert sizes == [24, 48]
    (gradient,) = [
        op for op in step.program.ops[step.program.first_backward :] if op.name.startswith("mm")
    ]
    assert set(gradient.writes) <= step.program.outputs


def test_loss_lies_between_and_makes_what_backward_begins_with():
    step = analysed(lambda x: x.sin().cos(), weight(3))
    first = step.program.first_backward
    loss = step.program.ops[first - 1]
    assert loss.name == "loss"
    assert step.op_nodes[first - 1] is None
    assert not loss.can_repeat
    assert loss.seconds == 0
    assert loss.reads == op_named(step, "cos").writes
    assert [step.program.buffers[buffer] for buffer in loss.writes] == [12]
    assert set(loss.writes) <= set(buffer for op in step.program.ops[first:] for buffer in op.reads)
    assert not set(loss.writes) & step.program.inputs


@pytest.mark.parametrize(("peak_bytes", "scratch_bytes"), [(100, 88), (5, 0)])
def test_loss_counts_what_it_takes_over_its_tangent(peak_bytes, scratch_bytes):
    step = analysed(torch.sin, weight(3), loss=LossMemory(peak_bytes=peak_bytes))
    assert op_named(step, "loss").workspace_bytes == scratch_bytes


def test_what_the_loss_leaves_stays_to_the_end():
    loss = LossMemory(peak_bytes=100, kept_bytes=30, beside_bytes=7)
    step = analysed(torch.sin, weight(3), loss=loss, resident_bytes=50)
    op = op_named(step, "loss")
    kept = [buffer for buffer in op.writes if buffer in step.program.outputs]
    assert [step.program.buffers[buffer] for buffer in kept] == [30]
    assert op.workspace_bytes == 100 - 12 - 30
    assert step.program.resident_bytes == 57


def test_outputs_of_one_operator_are_buffers_of_their_own():
    norm = nn.LayerNorm(4)
    step = analysed(lambda x: norm(x), weight(3, 4))
    op = next(op for op in step.program.ops if "layer_norm" in op.name)
    assert len(op.writes) == 3
    assert [step.program.buffers[buffer] for buffer in op.writes] == [48, 12, 12]
    base = next(node for node in step.bases if step.buffers_of[node] == (op.writes[1],))
    assert base.target.__name__ == "getitem"


def test_tied_inputs_are_one_buffer():
    module = nn.Module()
    module.one = nn.Linear(4, 4, bias=False)
    module.two = nn.Linear(4, 4, bias=False)
    module.two.weight = module.one.weight
    step = analysed(lambda x: module.two(module.one(x)), torch.randn(2, 4))
    assert sorted(step.program.buffers[buffer] for buffer in step.program.inputs) == [32, 64]
    gradients = [step.program.buffers[b] for b in step.program.outputs]
    assert gradients.count(64) == 1  # summed, then handed out once


def test_output_that_is_a_view_keeps_its_buffer():
    step = analysed(lambda x: x.sin()[1:], weight(3))
    assert set(op_named(step, "sin").writes) <= step.program.outputs


def test_random_state_is_never_repeated():
    joint, num_forward_outputs = joint_of(lambda x: nn.functional.dropout(x.sin()), weight(300))
    make_repeatable(joint.graph)
    step = analyse_joint(
        joint, num_forward_outputs=num_forward_outputs, cost_of=lambda node: (1.0, 0)
    )
    fixed = [op.name for op in step.program.ops if not op.can_repeat]
    assert len(fixed) == 2
    assert fixed[0].startswith("generator_state")
    assert fixed[1] == "loss"


def test_module_paths_are_known_in_forward_and_backward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return self.block(x)

    step = analysed(Net(), weight(2, 4))
    places = {op.name: op.place for op in step.program.ops}
    assert places["addmm"] == "block.0"
    assert places["relu"] == "block.1"
    assert places["threshold_backward"] == "block.1"
    assert places["loss"] == ""


def test_only_results_of_the_same_geometry_take_over():
    def taken(function, *inputs):
        step = analysed(function, *inputs)
        return {op.name: op.takes_over for op in step.program.ops}, step

    found, step = taken(lambda x: (x.sin() + 1).relu(), weight(3))
    assert found["add"] == op_named(step, "sin").writes
    assert found["relu"] == op_named(step, "add").writes
    found, _ = taken(lambda x: x.relu(), weight(3))
    assert found["relu"] == ()  # the caller's own tensor
    found, _ = taken(lambda x: x.sin()[1:].exp(), weight(3))
    assert found["exp"] == ()  # a part of it
    found, _ = taken(lambda x: x.sin() + x.sin().t(), weight(3, 3))
    assert len(found["add"]) == 1  # the other one is transposed
    found, _ = taken(lambda x, y: x.sin() + y.sin(), weight(1, 3), weight(2, 3))
    assert len(found["add"]) == 1  # broadcast: only the larger one


def test_memory_that_is_read_in_two_ways_is_not_taken_over():
    def function(x):
        y = x.sin()
        return y + y.t()

    assert op_named(analysed(function, weight(3, 3)), "add").takes_over == ()


def test_backward_never_takes_over_what_forward_made():
    step = analysed(lambda x, y: (x.tanh() * y.tanh()).tanh(), weight(3), weight(3))
    first = step.program.first_backward
    forward = step.program.ops[: first - 1]  # without the loss
    made_in_forward = {buffer for op in forward for buffer in op.writes}
    backward = step.program.ops[first:]
    assert any(made_in_forward & {*op.reads} and "mul" in op.name for op in backward)
    assert not any(made_in_forward & {*op.takes_over} for op in backward)
    assert any(op.takes_over for op in backward)


def test_readers_of_a_buffer_that_forward_changes_are_never_repeated():
    class Decaying(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x):
            y = self.norm(x) * self.scale.exp()
            with torch.no_grad():
                self.scale.mul_(0.9)
            return y.tanh()

    joint, num_forward_outputs = joint_of(Decaying(), weight(4, 3))
    make_repeatable(joint.graph)
    step = analyse_joint(
        joint, num_forward_outputs=num_forward_outputs, cost_of=lambda node: (1.0, 0)
    )
    can_repeat = {op.name.rstrip("_0123456789"): op.can_repeat for op in step.program.ops}
    assert not can_repeat["exp"]
    assert can_repeat["tanh"]
    # It reads its statistics as well, but is repeated without them.
    assert can_repeat["_native_batch_norm_legit_functional"]


def test_positions_to_overwrite_depend_on_the_arguments():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    add = torch.ops.aten.add.Tensor
    assert positions_to_overwrite(graph.call_function(add, (x, y))) == (0, 1)
    assert positions_to_overwrite(graph.call_function(add, (x, y), {"alpha": 2})) == (0,)
    assert positions_to_overwrite(graph.call_function(torch.ops.aten.sin.default, (x,))) == ()


def test_dead_code_is_no_op():
    def wasteful(x):
        x.exp().exp()
        return x.sin()

    assert not [op for op in analysed(wasteful, weight(3)).program.ops if "exp" in op.name]


def test_objects_count_for_all_but_inputs():
    sizes = [
        analysed(
            lambda x: x.sin().cos(),
            weight(5),
            granularity_bytes=64,
            objects=ObjectBytes(tensor=size),
        ).program
        for size in (0, 400)
    ]
    grown = [
        after - before for before, after in zip(*(each.buffers for each in sizes), strict=True)
    ]
    assert grown == [0 if buffer in sizes[0].inputs else 400 for buffer in range(len(grown))]
    assert sizes[0].fingerprint == sizes[1].fingerprint


def test_reduced_loss_keeps_the_storage_it_was_computed_in():
    step = analysed(lambda x: torch.nn.functional.mse_loss(x.sin(), x.cos()), weight(100))
    assert step.program.buffers[op_named(step, "mse_loss").writes[0]] == 400
