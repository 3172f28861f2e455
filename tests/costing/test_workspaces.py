"""Scratch memory of single operators: which may matter, and what they really take."""

import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing import operators
from bayplan.costing.operators import (
    measured_workspaces,
    nodes_that_may_set_the_peak,
    signature_of_call,
)
from bayplan.data.graph import StepGraph
from bayplan.data.live_memory import replay_memory
from bayplan.step import TrainingStep

MIB = 2**20


def step() -> TrainingStep:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
    return TrainingStep(model=model, batch=torch.randn(512, 256), loss_fn=lambda y: y.sum())


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    whole = step()
    return bayplan.capture(whole.model, whole.batch, whole.loss_fn)


def totals(graph: StepGraph) -> list[int]:
    return [*replay_memory(graph, [0] * len(graph.nodes)).total_bytes]


def test_nothing_sets_the_peak_where_there_is_no_workspace(graph):
    found = nodes_that_may_set_the_peak(graph, [0] * len(graph.nodes), granularity_bytes=1)
    assert found == frozenset()


def test_large_workspace_at_the_peak_may_set_it_and_a_small_one_elsewhere_may_not(graph):
    alive = totals(graph)
    high, low = alive.index(max(alive)), alive.index(min(alive))
    sizes = [0] * len(alive)
    sizes[high], sizes[low] = MIB, 16
    assert nodes_that_may_set_the_peak(graph, sizes, granularity_bytes=1) == {high}


def test_workspace_that_is_only_guessed_counts_within_its_uncertainty(graph):
    alive = totals(graph)
    low = alive.index(min(alive))
    sizes = [0] * len(alive)
    sizes[low] = max(alive) - alive[low] - 1000  # just below the peak, if taken at its word
    assert low in nodes_that_may_set_the_peak(graph, sizes, granularity_bytes=1)


def workspaces(graph, nodes, cache, *, of=step):
    return measured_workspaces(of(), graph, nodes, optimizer=None, granularity_bytes=1, cache=cache)


def test_chosen_operators_are_run_and_others_are_not(graph, tmp_path_factory):
    chosen = [0, 2]
    measured = workspaces(graph, chosen, tmp_path_factory.getbasetemp())
    assert measured.keys() == set(chosen)
    largest_bytes = max(storage.size_bytes for storage in graph.storages)
    assert all(0 <= size_bytes <= 4 * largest_bytes for size_bytes in measured.values())


def test_memory_of_the_results_is_no_workspace(graph, tmp_path_factory):
    relu = next(i for i, node in enumerate(graph.nodes) if "relu" in node.op)
    measured = workspaces(graph, [relu], tmp_path_factory.getbasetemp())
    assert measured[relu] < MIB / 10  # its result alone is 1 MiB


def test_sum_that_the_graph_has_in_place_takes_no_scratch_memory(tmp_path):
    # A dispatch mode makes the engine add out of place. The result of that was taken for scratch
    # memory: the plain peak of a Mamba, which slices one tensor many times, was 7 % too high.
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            return torch.stack([y[:, i].tanh() for i in range(8)]).sum(0)

    def sliced() -> TrainingStep:
        return TrainingStep(model=Sliced(), batch=torch.randn(64, 8, 64), loss_fn=lambda y: y.sum())

    whole = sliced()
    graph = bayplan.capture(whole.model, whole.batch, whole.loss_fn)
    sums = [i for i, node in enumerate(graph.nodes) if node.op == "aten.add_.Tensor"]
    assert len(sums) == 7
    assert max(workspaces(graph, sums, tmp_path, of=sliced).values()) < 2048  # a sum is 128 KiB


def test_equal_calls_are_run_once(monkeypatch, tmp_path_factory):
    runs = []

    def twins() -> TrainingStep:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
        return TrainingStep(model=model, batch=torch.randn(32, 64), loss_fn=lambda y: y.sum())

    whole = twins()
    graph = bayplan.capture(whole.model, whole.batch, whole.loss_fn)

    def run_alone(*call, **_):
        runs.append(signature_of_call(*call))
        return operators._Alone(0.0, 0.0, 0, 0)

    monkeypatch.setattr(operators, "_run_alone", run_alone)
    nodes = range(len(graph.nodes))
    measured = workspaces(graph, nodes, tmp_path_factory.getbasetemp(), of=twins)
    assert [*measured] == [*nodes]
    assert len(runs) == len(set(runs)) < len(nodes)


def test_what_was_measured_is_kept_for_the_same_layout_alone(monkeypatch, tmp_path):
    num_runs = 0
    run_alone = operators._run_alone

    def counted(*call, **options):
        nonlocal num_runs
        num_runs += 1
        return run_alone(*call, **options)

    monkeypatch.setattr(operators, "_run_alone", counted)

    def images(memory_format: torch.memory_format = torch.contiguous_format) -> TrainingStep:
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
        for weight in model.parameters():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=memory_format)
        batch = torch.randn(2, 8, 16, 16).to(memory_format=memory_format)
        return TrainingStep(model=model, batch=batch, loss_fn=lambda y: y.sum())

    whole = images()
    graph = bayplan.capture(whole.model, whole.batch, whole.loss_fn)
    first = workspaces(graph, [0, 1], tmp_path, of=images)
    num_first = num_runs
    assert num_first == 2
    assert workspaces(graph, [0, 1], tmp_path, of=images) == first
    assert num_runs == num_first
    workspaces(graph, [0, 1], tmp_path, of=lambda: images(torch.channels_last))
    workspaces(graph, [0], tmp_path, of=images)
    assert num_runs == num_first + 3
    for path in (tmp_path / "workspaces").glob("*.json"):
        path.write_text("{")
    assert workspaces(graph, [0, 1], tmp_path, of=images).keys() == first.keys()
    assert num_runs == num_first + 5
