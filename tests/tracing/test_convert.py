"""Kinds of storages, and sums of gradients where plain training makes them: in place or not."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import bayplan
from bayplan.data.graph import Phase, StepGraph, Storage, StorageKind

SUMS = ("aten::add", "aten::add_")


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


class Model(nn.Module):
    """A weight and whatever a test wants done with it."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.do = forward

    def forward(self, x):
        return self.do(self.weight)


# Sums of gradients.


class AddsSaved(torch.autograd.Function):
    """Ends its formula with a sum of its own, of the gradient and a saved value."""

    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient + y


class AddsGradients(torch.autograd.Function):
    """Ends its formula with a sum of its own, of two gradients."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, left, right):
        return left + right


def of_product(forward):
    """A program over an activation instead of the parameter itself."""
    return lambda w: forward(w * 2)


# The name says what is special about the older of two gradients, or about the sum.
PROGRAMS = {
    "two formulas": of_product(lambda y: y.sigmoid() * y.tanh()),
    "three formulas": of_product(lambda y: y.sigmoid() * y.tanh() * y.exp()),
    "older is expanded": of_product(lambda y: y.sigmoid() + y.tanh() + y),
    "same gradient twice": of_product(lambda y: (y + y).sigmoid()),
    "same gradient by detour": of_product(lambda y: (y.clone() + y).tanh()),
    "both from one formula": of_product(lambda y: y * y * y),
    "sum of a sum": of_product(lambda y: y + y + y),
    "older is a view": of_product(lambda y: y.view(64).tanh().view(8, 8) + y.t().exp()),
    "older is a transpose": of_product(lambda y: y @ y + y),
    "slices": of_product(lambda y: torch.cat([y[:4].tanh(), y[4:].exp()]) + y),
    "split": of_product(lambda y: y.split(4)[0] * y.split(4)[1] * y.split(4)[0]),
    "residual": of_product(lambda y: (y.tanh() + y).sigmoid()),
    "in place forward": of_product(lambda y: (y * 3).add_(y).sigmoid()),
    "other dtype": of_product(lambda y: (y.double() * y.double()).float() + y),
    "parameter used thrice": lambda w: w.tanh() * w.exp() * w,
    "parameter added to itself": lambda w: (w + w).tanh() + w,
    "sum in a formula, with saved": of_product(lambda y: AddsSaved.apply(y).tanh()),
    "sum in a formula, of gradients": of_product(lambda y: torch.mul(*AddsGradients.apply(y))),
    "sums in and after a formula": of_product(lambda y: AddsSaved.apply(y).tanh() * y),
    "moments": of_product(lambda y: torch.mul(*torch.var_mean(y, dim=0)) * y),
    "loss itself": lambda w: torch.dot(w.view(64), w.view(64)),
}


def sums_of_real_backward(model: nn.Module) -> list[str]:
    loss = total(model(None))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    events = [event for event in profiler.events() if event.name in SUMS]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


@pytest.mark.parametrize("forward", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_gradients_are_summed_as_plain_training_does(forward):
    model = Model(forward)
    graph = bayplan.capture(model, None, total)
    captured = [
        "aten::" + node.op.split(".")[1] for node in graph.nodes if node.phase is Phase.BACKWARD
    ]
    assert [op for op in captured if op in SUMS] == sums_of_real_backward(model)


def in_place_sum(graph: StepGraph) -> int:
    (index,) = (i for i, node in enumerate(graph.nodes) if node.op == "aten.add_.Tensor")
    return index


def test_sum_in_place_lives_on_in_the_older_storage():
    graph = bayplan.capture(Model(lambda w: w.tanh() * w.exp()), None, total)
    node = graph.nodes[in_place_sum(graph)]
    older, newer = (graph.values[value].storage for value in node.reads)
    (result,) = (graph.values[value].storage for value in node.writes)
    assert result == older
    assert graph.storages[older].kind is StorageKind.GRADIENT
    assert graph.storages[older].released is None
    assert graph.storages[newer].released == in_place_sum(graph)


def test_storage_that_a_sum_no_longer_makes_is_empty():
    graph = bayplan.capture(Model(lambda w: w.tanh() * w.exp()), None, total)
    index = in_place_sum(graph)
    (gone,) = (s for s in graph.storages if s.born == index)
    assert (gone.size_bytes, gone.released) == (0, index)
    unused = graph.storages.index(gone)
    assert all(value.storage != unused for value in graph.values)


# Kinds.


def kinds(graph: StepGraph) -> Counter[StorageKind]:
    sizes: Counter[StorageKind] = Counter()
    for storage in graph.storages:
        sizes[storage.kind] += storage.size_bytes
    return sizes


def test_every_kind_in_one_step():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    graph = bayplan.capture(model, torch.ones(3, 4), total, optimizer=torch.optim.Adam)
    parameter_bytes = 4 * sum(p.numel() for p in model.parameters())
    found = kinds(graph)
    assert found[StorageKind.PARAMETER] == parameter_bytes
    assert found[StorageKind.GRADIENT] == parameter_bytes
    # Two moments, and a step count of 4 bytes for each of the 6 parameters.
    assert found[StorageKind.OPTIMIZER_STATE] == 2 * parameter_bytes + 6 * 4
    assert found[StorageKind.BUFFER] == 4 * 8 + 4 * 8 + 8
    assert found[StorageKind.INPUT] == 4 * 3 * 4
    assert set(found) == set(StorageKind)


def storage_made_by(graph: StepGraph, op: str) -> Storage:
    (node,) = (n for n in graph.nodes if n.op.split(".")[1] == op)
    return graph.storages[graph.values[node.writes[0]].storage]


def test_activation_is_alive_when_backward_starts():
    graph = bayplan.capture(Model(lambda w: (w + 1).tanh() * 2), None, total)
    assert storage_made_by(graph, "tanh").kind is StorageKind.ACTIVATION


def test_what_dies_in_forward_is_temporary():
    graph = bayplan.capture(Model(lambda w: (w + 1).tanh() * 2), None, total)
    assert storage_made_by(graph, "add").kind is StorageKind.TEMPORARY


def test_what_is_born_in_backward_is_temporary_unless_it_is_a_gradient():
    graph = bayplan.capture(Model(lambda w: (w * 2).tanh()), None, total)
    assert storage_made_by(graph, "tanh_backward").kind is StorageKind.TEMPORARY
    born_in_backward = {
        s.kind
        for s in graph.storages
        if s.born is not None and graph.nodes[s.born].phase is Phase.BACKWARD
    }
    assert born_in_backward == {StorageKind.TEMPORARY, StorageKind.GRADIENT}


def test_output_that_backward_does_not_need_is_held_by_its_variable():
    graph = bayplan.capture(Model(lambda w: w + 1), None, total)
    assert storage_made_by(graph, "add").kind is StorageKind.ACTIVATION


def test_names_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    graph = bayplan.capture(model, torch.ones(3, 4), total, optimizer=torch.optim.SGD)
    names = {(s.kind, s.name) for s in graph.storages if s.name}
    assert (StorageKind.PARAMETER, "0.weight") in names
    assert (StorageKind.BUFFER, "1.running_mean") in names
    assert (StorageKind.INPUT, "batch") in names


def test_shared_storage_is_named_by_its_first_owner():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    graph = bayplan.capture(model, torch.ones(3, 4), total)
    parameters = [s.name for s in graph.storages if s.kind is StorageKind.PARAMETER]
    assert parameters == ["0.weight"]
    assert sum(s.kind is StorageKind.GRADIENT for s in graph.storages) == 1


def test_gradients_are_scattered_into_their_zeros_in_place():
    # Fake tensors are a subclass, for which torch's formulas scatter out of place.
    class Gathered(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 16))

        def forward(self, index):
            return self.weight.exp().gather(1, index).sum()

    graph = bayplan.capture(Gathered(), torch.zeros(8, 1, dtype=torch.int64), optimizer="none")
    scatters = [node for node in graph.nodes if "scatter_add" in node.op]
    assert [node.op for node in scatters] == ["aten.scatter_add_.default"]
    read, written = scatters[0].reads[0], scatters[0].writes[0]
    assert graph.values[read].storage == graph.values[written].storage
