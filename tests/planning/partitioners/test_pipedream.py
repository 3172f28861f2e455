"""PipeDream's optimizer against brute force on small models."""

from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.planning.partitioners.machines import MachineLevel
from bayplan.planning.partitioners.pipedream import (
    PipeDreamOptions,
    StageRange,
    States,
    optimize,
)


def chain_of(seconds, held, parameters, sent):
    number = len(seconds)
    return States(
        seconds=np.cumsum(seconds),
        held_bytes=np.cumsum(held),
        parameter_bytes=np.cumsum(parameters),
        sent_bytes=np.array(sent, dtype=float),
        is_before=np.tri(number, k=-1, dtype=bool),
    )


def brute_force(states, level, options):
    """The slowest stage of every way to cut and replicate, the least of all."""
    number, count, bandwidth = len(states), level.count, level.bandwidth_bytes_per_s
    until = [np.concatenate(([0.0], own)) for own in (states.seconds, states.parameter_bytes)]
    stashed_until = np.concatenate(([0.0], states.held_bytes + states.parameter_bytes))

    def stage_seconds(first, end, n, machines):
        """`machines` are those of the stages up to this one."""
        compute, weights = (own[end] - own[first] for own in until)
        times = ceil((count - machines) / n)
        stashed = times * (stashed_until[end] - stashed_until[first])
        if options.memory_bytes is not None and stashed > options.memory_bytes:
            return inf
        seconds = (compute + 4 * (n - 1) * weights / (bandwidth * n)) / n
        if options.compression is not None:
            for cut, is_sent in ((first - 1, first > 0), (end - 1, first > 0 and end < number)):
                if is_sent:
                    sent = 2 * states.sent_bytes[cut] / (bandwidth * n) / options.compression
                    seconds = max(seconds, sent)
        return seconds

    def ways(first, machines):
        """The stages from a layer on, where so many machines are used before."""
        for end in range(first + 1, number + 1):
            for n in range(1, (1 if options.is_straight else count - machines) + 1):
                if machines + n > count:
                    continue
                own = stage_seconds(first, end, n, machines + n)
                if end == number:
                    if machines + n == count or options.may_use_fewer:
                        yield own
                else:
                    yield from (max(own, rest) for rest in ways(end, machines + n))

    return min(ways(0, 0), default=inf)


figures = st.integers(0, 20).map(float)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_dynamic_programme_finds_what_brute_force_finds(data):
    number = data.draw(st.integers(1, 5))
    columns = [data.draw(st.lists(figures, min_size=number, max_size=number)) for _ in range(4)]
    states = chain_of(*columns)
    level = MachineLevel(count=data.draw(st.integers(1, 4)), bandwidth_bytes_per_s=4.0)
    options = PipeDreamOptions(
        compression=data.draw(st.sampled_from([None, 1.0, 2.0])),
        is_straight=data.draw(st.booleans()),
        memory_bytes=data.draw(st.sampled_from([None, 30.0, 90.0])),
    )
    expected = brute_force(states, level, options)
    if expected == inf:
        with pytest.raises((DoesNotFit, UsageError)):
            optimize(states, [level], options)
        return
    found = optimize(states, [level], options)
    assert found.stage_seconds == pytest.approx(expected)
    (stages,) = found.levels
    assert sum(stage.replicas for stage in stages) == level.count
    assert [stages[0].first, stages[-1].end] == [0, number]


@settings(max_examples=30, deadline=None)
@given(st.lists(figures, min_size=2, max_size=6), st.integers(2, 5))
def test_machines_that_may_stay_idle_make_nothing_slower(seconds, count):
    states = chain_of(seconds, seconds, seconds, [100.0] * len(seconds))
    level = MachineLevel(count=count, bandwidth_bytes_per_s=1.0)
    all_used = optimize(states, [level], PipeDreamOptions(compression=1.0))
    options = PipeDreamOptions(compression=1.0, may_use_fewer=True)
    found = optimize(states, [level], options)
    assert found.stage_seconds <= all_used.stage_seconds
    assert sum(stage.replicas for stage in found.levels[0]) <= count


def test_a_preference_counts_only_where_nothing_is_lost():
    states = chain_of([1.0, 0.0, 1.0], [0.0] * 3, [0.0] * 3, [0.0] * 3)
    level = MachineLevel(count=2, bandwidth_bytes_per_s=1.0)
    late = ((StageRange(0, 2, 1), StageRange(2, 3, 1)),)
    wrong = ((StageRange(0, 3, 1),),)
    assert optimize(states, [level]).num_ties == 1
    assert optimize(states, [level], preferred=late).levels == late
    assert optimize(states, [level], preferred=wrong).levels != wrong


def test_a_limit_that_nothing_meets_and_too_long_a_pipeline_are_refused():
    states = chain_of([1.0, 1.0], [50.0] * 2, [50.0] * 2, [0.0] * 2)
    level = MachineLevel(count=3, bandwidth_bytes_per_s=1.0)
    straight = PipeDreamOptions(is_straight=True)
    with pytest.raises(UsageError, match="3 machines, but the model can be cut into 2"):
        optimize(states, [level], straight)
    two = MachineLevel(count=2, bandwidth_bytes_per_s=1.0)
    limited = PipeDreamOptions(is_straight=True, memory_bytes=10.0)
    with pytest.raises(DoesNotFit, match="stashes more than 10 B"):
        optimize(states, [two], limited)
