import msgspec
import pytest

from bayplan.data.errors import ExitCode, ForeignPlan, UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Origin, Profile

replace = msgspec.structs.replace


def test_step_time_is_nodes_and_overhead(profile):
    assert profile.step_seconds == 1.625


def test_seconds_are_of_the_wall_clock_unless_said_otherwise(profile):
    assert profile.clock is Clock.WALL


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seconds": (1.0,)}, r"columns of different lengths: \[1, 3, 3\]"),
        ({"workspace_bytes": ()}, r"columns of different lengths: \[3, 3, 0\]"),
        ({"seconds": (1.0, -1.0, 1.0)}, r"seconds\[1\] is -1\.0, must be 0 or more"),
        ({"seconds": (1.0, 1.0, float("nan"))}, r"seconds\[2\] is nan, must be 0 or more"),
        ({"spread_seconds": (float("inf"), 0, 0)}, r"spread_seconds\[0\] is inf, must be 0"),
        ({"workspace_bytes": (0, -8, 0)}, r"workspace_bytes\[1\] is -8, must be 0 or more"),
        ({"overhead_seconds": -0.1}, r"overhead_seconds is -0\.1, must be 0 or more"),
        ({"step_spread_seconds": -0.1}, r"step_spread_seconds is -0\.1, must be 0 or more"),
        ({"repeats": -1}, "repeats is -1, must be 0 or more"),
        ({"threads": -2}, "threads is -2, must be 0 or more"),
    ],
)
def test_impossible_costs_are_refused(profile, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(profile, **fields)


def test_a_profile_belongs_to_its_graph(profile, graph):
    profile.check_belongs_to(graph)


def test_a_foreign_profile_is_refused_with_both_sides_and_what_to_do(profile, graph):
    other = StepGraph(model="other", nodes=(), values=(), storages=())
    with pytest.raises(ForeignPlan) as caught:
        profile.check_belongs_to(other)
    assert str(caught.value) == (
        f"the profile is of 'tiny' (3 nodes, fingerprint {graph.fingerprint}), the step is 'other'"
        f" (0 nodes, fingerprint {other.fingerprint}); make a new one with `bayplan profile`"
    )
    assert caught.value.exit_code is ExitCode.FOREIGN_PLAN


def test_a_profile_of_the_same_fingerprint_with_other_length_is_foreign(profile, graph):
    short = replace(profile, seconds=(1.0,), spread_seconds=(0.0,), workspace_bytes=(0,))
    with pytest.raises(ForeignPlan, match=r"\(1 nodes, .*\(3 nodes, "):
        short.check_belongs_to(graph)


def test_an_empty_profile_takes_no_time():
    empty = Profile(
        model="",
        fingerprint="",
        device="cpu",
        origin=Origin.DERIVED,
        seconds=(),
        spread_seconds=(),
        workspace_bytes=(),
    )
    assert empty.step_seconds == 0.0


@pytest.mark.parametrize("text", ["wall", "cpu", Clock.CPU])
def test_a_clock_is_read_by_its_name(text):
    assert Clock.parse(text) == text
    assert type(Clock.parse(text)) is Clock


def test_an_unknown_clock_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"^no clock 'cpuu'; did you mean 'cpu'\?$"):
        Clock.parse("cpuu")
    with pytest.raises(UsageError, match=r"^no clock 'sundial'; known: cpu, wall$"):
        Clock.parse("sundial")
