"""The cache of profiles: found again by what they depend on, never in the way."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing.cache import cached_profile
from bayplan.data import files
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.devices.device import Cpu
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return bayplan.capture(nn.Linear(4, 4), torch.ones(2, 4), lambda output: output.sum())


class Measurement:
    """A measurement that is made up, and counts how often it is made."""

    def __init__(self, graph: StepGraph, repeats: int = 5) -> None:
        self.count = 0
        self._graph, self.repeats = graph, repeats

    def __call__(self) -> Profile:
        self.count += 1
        num_nodes = len(self._graph.nodes)
        return Profile(
            model=self._graph.model,
            fingerprint=self._graph.fingerprint,
            device="cpu",
            origin=Origin.MEASURED,
            repeats=self.repeats,
            seconds=(0.1 * self.count,) * num_nodes,
            spread_seconds=(0.0,) * num_nodes,
            workspace_bytes=(0,) * num_nodes,
        )


def look_up(cache: Path, graph: StepGraph, measure, **changed) -> Profile:
    options = {"device": CPU, "repeats": 5, "clock": Clock.WALL, "method": "malloc"} | changed
    return cached_profile(cache, graph, measure=measure, **options)


def the_file(cache: Path) -> Path:
    (path,) = (cache / "profiles").iterdir()
    return path


def test_second_question_measures_nothing(tmp_path, graph):
    measure = Measurement(graph)
    first = look_up(tmp_path, graph, measure)
    assert look_up(tmp_path, graph, measure) == first
    assert measure.count == 1
    assert files.read(the_file(tmp_path), Profile) == first


def test_fewer_repeats_than_asked_for_do_not_satisfy(tmp_path, graph):
    look_up(tmp_path, graph, Measurement(graph, repeats=2), repeats=2)
    better = Measurement(graph, repeats=5)
    assert look_up(tmp_path, graph, better, repeats=5).repeats == 5
    assert better.count == 1
    # More than asked for do, and the better one has replaced the other.
    fewer = Measurement(graph, repeats=1)
    assert look_up(tmp_path, graph, fewer, repeats=1).repeats == 5
    assert fewer.count == 0
    assert files.read(the_file(tmp_path), Profile).repeats == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff\xfe not json",
        lambda content: content.replace(b'"version": 1', b'"version": 99'),
        lambda content: content.replace(b'"seconds": [', b'"seconds": [0.5,'),
    ],
    ids=["empty", "cut", "binary", "version", "columns"],
)
def test_damaged_file_is_measured_anew_and_replaced(tmp_path, graph, damage):
    measure = Measurement(graph)
    look_up(tmp_path, graph, measure)
    path = the_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    found = look_up(tmp_path, graph, measure)
    assert measure.count == 2
    assert files.read(path, Profile) == found
    assert look_up(tmp_path, graph, measure) == found
    assert measure.count == 2


def test_file_of_another_step_under_this_name_is_not_believed(tmp_path, graph):
    measure = Measurement(graph)
    right = look_up(tmp_path, graph, measure)
    wrong = msgspec.structs.replace(right, fingerprint="0" * 16)
    files.write(the_file(tmp_path), wrong)
    assert look_up(tmp_path, graph, measure).fingerprint == graph.fingerprint
    assert measure.count == 2


def test_everything_that_changes_times_changes_the_name(tmp_path, graph, monkeypatch):
    measure = Measurement(graph)
    look_up(tmp_path, graph, measure)
    look_up(tmp_path, graph, measure, clock=Clock.CPU)
    assert measure.count == 2
    look_up(tmp_path, graph, measure, method="storages")
    assert measure.count == 3
    monkeypatch.setattr(
        "bayplan.costing.cache.describe_machine", lambda: {"torch": "another version"}
    )
    look_up(tmp_path, graph, measure)
    assert measure.count == 4
    monkeypatch.setattr(Cpu, "name", "NVIDIA H100")
    look_up(tmp_path, graph, measure)
    assert measure.count == 5
    assert len(list((tmp_path / "profiles").iterdir())) == 5


def test_renewed_profile_replaces_the_kept_one(tmp_path, graph):
    measure = Measurement(graph)
    old = look_up(tmp_path, graph, measure)
    new = look_up(tmp_path, graph, measure, renew=True)
    assert new != old
    assert files.read(the_file(tmp_path), Profile) == new
    assert look_up(tmp_path, graph, measure) == new
    assert measure.count == 2


def test_same_step_under_another_name_is_found_and_renamed(tmp_path, graph):
    measure = Measurement(graph)
    look_up(tmp_path, graph, measure)
    renamed = msgspec.structs.replace(graph, model="mine")
    assert look_up(tmp_path, renamed, measure).model == "mine"
    assert measure.count == 1


def test_cache_that_cannot_be_written_costs_time_only(tmp_path, graph):
    (tmp_path / "file").write_text("in the way")
    measure = Measurement(graph)
    for count in (1, 2):
        found = look_up(tmp_path / "file", graph, measure)
        assert found.fingerprint == graph.fingerprint
        assert measure.count == count
    assert (tmp_path / "file").read_text() == "in the way"


def test_failed_measurement_leaves_nothing(tmp_path, graph):
    def fail() -> Profile:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look_up(tmp_path, graph, fail)
    assert not (tmp_path / "profiles").exists()


def test_cache_hit_does_not_run_the_step_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path))

    class Counting(nn.Linear):
        num_real = 0

        def forward(self, rows):
            # Captures run on fake tensors, which have no data.
            if type(rows) is torch.Tensor:
                Counting.num_real += 1
            return super().forward(rows)

    def profile(**options) -> Profile:
        return bayplan.profile(
            Counting(4, 4), torch.ones(2, 4), lambda output: output.sum(), repeats=2, **options
        )

    first = profile()
    assert Counting.num_real == 2 * 2 + 1
    assert profile() == first
    assert Counting.num_real == 5
    renewed = profile(again=True)
    assert Counting.num_real == 10
    assert profile() == renewed
    assert Counting.num_real == 10


@pytest.mark.filterwarnings("ignore:memory is measured by tensor storages")
def test_profile_by_storages_does_not_serve_where_malloc_is_counted(tmp_path, monkeypatch):
    """What kernels allocate inside is missed by the one and seen by the other."""
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path))

    def refuse(cache):
        raise MeterUnavailable("malloc counter: no C compiler")

    def sorts(output: torch.Tensor) -> torch.Tensor:
        return output.sort().values.sum()

    def workspace_bytes() -> int:
        profile = bayplan.profile(nn.Linear(4, 4096), torch.ones(64, 4), sorts, repeats=1)
        return sum(profile.workspace_bytes)

    with monkeypatch.context() as without:
        without.setattr(MallocCounter, "attach", refuse)
        assert workspace_bytes() == 0
    assert workspace_bytes() > 0
