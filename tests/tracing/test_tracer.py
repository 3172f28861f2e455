"""Storages, not tensors: one block of memory is one storage, from its birth to its release."""

import pytest
import torch
from torch import nn
from torch.profiler import record_function

import bayplan
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


class Model(nn.Module):
    """A weight of 4 x 4 and whatever a test wants done with it."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.do = forward

    def forward(self, x):
        return self.do(self.weight, x)


def captured(forward, *, optimizer=None) -> StepGraph:
    return bayplan.capture(Model(forward), torch.ones(4, 4), total, optimizer=optimizer)


def node(graph: StepGraph, op: str, phase: Phase = Phase.FORWARD) -> Node:
    (found,) = (n for n in graph.nodes if n.op.split(".")[1] == op and n.phase is phase)
    return found


def storage_of(graph: StepGraph, value: int) -> Storage:
    return graph.storages[graph.values[value].storage]


def write_of(graph: StepGraph, op: str) -> int:
    (value,) = node(graph, op).writes
    return value


# Aliasing.


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.view(16),
        lambda w: w.t(),
        lambda w: w[1:3],
        lambda w: w[:, 2],
        lambda w: w[:1].expand(4, 4),
        lambda w: w.unbind()[3],
        lambda w: w.as_strided((2, 2), (8, 1), 3),
        lambda w: w.detach(),
    ],
)
def test_a_view_of_a_parameter_is_the_parameters_storage(view):
    graph = captured(lambda w, x: view(w).cos().sum() + w.mean())
    (reader,) = node(graph, "cos").reads
    assert storage_of(graph, reader).kind is StorageKind.PARAMETER
    assert storage_of(graph, reader).size_bytes == 64


@pytest.mark.parametrize("copy", [torch.clone, lambda w: w.t().contiguous(), lambda w: w * 1])
def test_a_copy_is_a_storage_of_its_own(copy):
    graph = captured(lambda w, x: copy(w).cos())
    (reader,) = node(graph, "cos").reads
    assert storage_of(graph, reader).kind is not StorageKind.PARAMETER


def test_views_of_views_of_an_activation():
    graph = captured(lambda w, x: (w @ x).view(2, 8)[1].view(4, 2).cos())
    (reader,) = node(graph, "cos").reads
    assert graph.values[reader].storage == graph.values[write_of(graph, "mm")].storage


def test_in_place_writes_a_new_value_in_the_same_storage():
    graph = captured(lambda w, x: (w * x).sub_(1).cos())
    before, after = write_of(graph, "mul"), write_of(graph, "sub_")
    assert before != after
    assert graph.values[before].storage == graph.values[after].storage
    assert graph.values[after].producer == graph.nodes.index(node(graph, "sub_"))
    assert node(graph, "cos").reads == (after,)


def test_in_place_on_a_view_writes_the_bases_storage():
    def forward(w, x):
        y = w * x
        y[1:3].mul_(2)
        return y + 1

    graph = captured(forward)
    assert storage_of(graph, write_of(graph, "mul_")) is storage_of(graph, write_of(graph, "mul"))


def test_operators_that_return_nothing_write_what_they_change():
    graph = captured(
        lambda w, x: w * x, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True)
    )
    update = node(graph, "_foreach_add_", Phase.UPDATE)
    assert [storage_of(graph, value).name for value in update.writes] == ["weight"]


def test_constants_made_in_forward_live_from_there_on():
    def forward(w, x):
        y = w * x
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0])

    graph = captured(forward)
    made = storage_of(graph, write_of(graph, "lift_fresh"))
    assert made.born == graph.nodes.index(node(graph, "lift_fresh"))
    assert made.size_bytes == 16
    assert sum(s.born is None for s in graph.storages) == 2  # the weight and the batch


def test_each_output_of_an_operator_has_its_storage():
    graph = captured(lambda w, x: sum(torch.max(w * x, dim=0).values * 2))
    maximum, indices = node(graph, "max").writes
    assert graph.values[maximum].storage != graph.values[indices].storage
    assert graph.values[indices].dtype == "int64"


def test_same_tensor_twice_is_read_twice():
    reads = node(captured(lambda w, x: w * w), "mul").reads
    assert len(reads) == 2
    assert reads[0] == reads[1]


# Releases.


def lifetime(graph: StepGraph, op: str) -> tuple[int, int | None]:
    storage = storage_of(graph, write_of(graph, op))
    assert storage.born is not None
    return storage.born, storage.released


def index(graph: StepGraph, op: str, phase: Phase = Phase.FORWARD) -> int:
    return graph.nodes.index(node(graph, op, phase))


def test_a_value_that_nothing_keeps_dies_at_its_reader():
    graph = captured(lambda w, x: (w + x).neg() * 2)
    assert lifetime(graph, "add") == (index(graph, "add"), index(graph, "neg"))


def test_a_variable_holds_a_value_beyond_its_last_reader():
    def forward(w, x):
        held = w + x
        y = held.neg()
        y = y * 2
        del held
        return y.tan()

    graph = captured(forward)
    assert lifetime(graph, "add") == (index(graph, "add"), index(graph, "mul"))


def test_a_saved_value_lives_until_its_gradient_formula_has_run():
    graph = captured(lambda w, x: (w + x).tanh() * 2)
    assert lifetime(graph, "tanh") == (
        index(graph, "tanh"),
        index(graph, "tanh_backward", Phase.BACKWARD),
    )


def test_the_output_lives_until_the_step_ends():
    graph = captured(lambda w, x: w.mul(x), optimizer=torch.optim.SGD)
    born, released = lifetime(graph, "mul")
    assert born == index(graph, "mul")
    assert released == len(graph.nodes) - 1


def test_parameters_and_gradients_outlive_the_step():
    graph = captured(lambda w, x: w * x, optimizer=torch.optim.Adam)
    kept = {StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE}
    assert {s.kind for s in graph.storages if s.released is None} >= kept
    assert all(s.released is None for s in graph.storages if s.kind in kept)


def test_a_buffer_replaced_before_the_first_operator_is_released_with_it():
    class Replacing(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("state", torch.zeros(100))

        def forward(self, x):
            self.state = None
            y = super().forward(x)
            self.state = torch.zeros(100)
            return y + self.state[0]

    graph = bayplan.capture(Replacing(), torch.ones(2, 4), total)
    (old,) = (s for s in graph.storages if s.name == "state")
    assert (old.born, old.released) == (None, 0)


# What is written down.


def test_arguments_leave_out_what_changes_neither_cost_nor_memory():
    def graph_of(rate: float, stride: int) -> StepGraph:
        model = nn.Sequential(nn.Conv1d(4, 4, 1, stride=stride), nn.Dropout(rate))
        return bayplan.capture(
            model, torch.ones(4, 4), total, optimizer=lambda ps: torch.optim.Adam(ps, lr=rate)
        )

    assert graph_of(0.1, 1).fingerprint == graph_of(0.2, 1).fingerprint
    assert graph_of(0.1, 1).fingerprint != graph_of(0.1, 2).fingerprint


def test_profiler_marks_are_not_operators():
    def forward(w, x):
        with record_function("mark"):
            return w * x

    assert captured(forward).fingerprint == captured(lambda w, x: w * x).fingerprint


def test_phases_come_in_order():
    graph = captured(lambda w, x: w * x, optimizer=torch.optim.Adam)
    order = [list(Phase).index(n.phase) for n in graph.nodes]
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}
