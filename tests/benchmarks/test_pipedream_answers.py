"""PipeDream's optimizer gives the answers that PipeDream's own program published."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pipedream_profiles.graph_states import graph_states
from pipedream_profiles.layer_graph import read_layer_graph

from bayplan.planning.partitioners.machines import Machines
from bayplan.planning.partitioners.pipedream import PipeDreamOptions, StageRange, optimize

FOLDER = Path(__file__).parents[2] / "benchmarks" / "pipedream_profiles"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
SAME = 1e-12


@cache
def states_of(profile):
    return graph_states(read_layer_graph(FOLDER / "profiles" / f"{profile}.graph.txt"))


def options_of(row):
    return PipeDreamOptions(
        **{
            name: row[name]
            for name in ("compression", "memory_bytes", "is_straight", "may_use_fewer")
        }
    )


def levels_of(row):
    return Machines.of(row["machines"], row["bandwidths"]).levels


def name_of(row):
    words = (row["profile"], *row["machines"], *row["bandwidths"], row["compression"])
    return "-".join(map(str, (*words, row["memory_bytes"], row["is_straight"])))


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=name_of)
def test_splits_and_times_are_those_of_pipedreams_own_program(row):
    states = states_of(row["profile"])
    published = tuple(tuple(StageRange(*stage) for stage in level) for level in row["levels"])
    found = optimize(states, levels_of(row), options_of(row), preferred=published)
    assert found.levels == published
    assert found.stage_seconds == pytest.approx(row["stage_seconds"], rel=SAME)
    assert found.data_parallel_seconds == pytest.approx(row["data_parallel_seconds"], rel=SAME)
    assert states.seconds[-1] / found.stage_seconds == pytest.approx(row["over_single"], rel=SAME)
    until = np.concatenate(([0.0], states.seconds))
    for level, published_seconds in zip(found.levels, row["compute_seconds"], strict=True):
        own = [until[stage.end] - until[stage.first] for stage in level]
        assert own == pytest.approx(published_seconds, rel=SAME)


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=name_of)
def test_without_a_tie_nothing_needs_to_be_preferred(row):
    found = optimize(states_of(row["profile"]), levels_of(row), options_of(row))
    assert found.stage_seconds == pytest.approx(row["stage_seconds"], rel=SAME)
    if not found.num_ties:
        assert [list(map(list, level)) for level in found.levels] == row["levels"]


@pytest.mark.parametrize("row", GOLDEN["fails"], ids=name_of)
def test_what_breaks_pipedreams_program_is_answered(row):
    found = optimize(states_of(row["profile"]), levels_of(row), options_of(row))
    all_machines = optimize(
        states_of(row["profile"]),
        levels_of(row),
        PipeDreamOptions(compression=row["compression"], memory_bytes=row["memory_bytes"]),
    )
    assert found.stage_seconds <= all_machines.stage_seconds


@pytest.mark.parametrize("profile", ["resnet101", "gnmt"])
def test_profiles_without_published_answers_are_planned(profile):
    states = states_of(profile)
    found = optimize(states, Machines.of((4, 2), (10e9, 5e9)).levels)
    assert found.stage_seconds <= found.data_parallel_seconds
    (outer, inner) = found.levels
    assert inner[0].first == outer[0].first == 0
    assert inner[-1].end == outer[-1].end == len(states)
    assert all(one.end == other.first for one, other in pairwise(inner))
