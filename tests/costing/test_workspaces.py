"""Scratch memory of single operators: which may matter, and what they really take."""

import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing import operators
from bayplan.costing.operators import WorkspaceWatch, nodes_that_may_set_the_peak
from bayplan.data.graph import StepGraph
from bayplan.data.live_memory import replay_memory
from bayplan.devices.meters import open_meter
from bayplan.step import TrainingStep
from bayplan.tracing.capture import follow_step

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


def test_chosen_operators_are_run_and_others_are_not(graph, tmp_path_factory):
    chosen = [0, 2]
    with open_meter(torch.device("cpu"), tmp_path_factory.getbasetemp()) as meter:
        watch = WorkspaceWatch(graph, chosen, meter=meter, granularity_bytes=1)
        follow_step(step(), optimizer=None, watcher=watch)
    assert watch.workspace_bytes.keys() == set(chosen)
    largest_bytes = max(storage.size_bytes for storage in graph.storages)
    assert all(
        0 <= size_bytes <= 4 * largest_bytes for size_bytes in watch.workspace_bytes.values()
    )


def test_memory_of_the_results_is_no_workspace(graph, tmp_path_factory):
    relu = next(i for i, node in enumerate(graph.nodes) if "relu" in node.op)
    with open_meter(torch.device("cpu"), tmp_path_factory.getbasetemp()) as meter:
        watch = WorkspaceWatch(graph, [relu], meter=meter, granularity_bytes=1)
        follow_step(step(), optimizer=None, watcher=watch)
    assert watch.workspace_bytes[relu] < MIB / 10  # its result alone is 1 MiB


def test_equal_calls_are_run_once(graph, monkeypatch, tmp_path_factory):
    runs = []

    def run_alone(operator, args, kwargs, **_):
        runs.append(operator)
        return 0.0, 0, 0

    monkeypatch.setattr(operators, "_run_alone", run_alone)
    with open_meter(torch.device("cpu"), tmp_path_factory.getbasetemp()) as meter:
        watch = WorkspaceWatch(graph, [0], meter=meter, granularity_bytes=1)
        for index in range(3):
            watch.look_at(index, torch.relu, (torch.ones(3),), {})
        watch.look_at(3, torch.relu, (torch.ones(4),), {})
    assert len(runs) == 2
    assert [*watch.workspace_bytes] == [0, 1, 2, 3]
