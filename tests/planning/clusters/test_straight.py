"""Lists that are written down are those that are simulated."""

import pytest

from bayplan.planning.clusters.split_costs import FoldedPipeline, is_straight, straight_lists
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.routing import resplit


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "one-by-one"])
@pytest.mark.parametrize(("number", "count"), [(2, 1), (2, 5), (3, 2), (4, 9), (6, 4)])
def test_written_lists_are_the_simulated_ones(name, number, count, make_split):
    split = make_split(list(range(number)), [1] * number, num_samples=count)
    pipeline = FoldedPipeline(
        split.stages,
        resplit(split.stages, num_samples=count, num_micro_batches=count),
        buckets=tuple((2 * at, 2 * at + 1) for at in range(number)),
    )
    assert is_straight(pipeline, name)
    assert straight_lists(pipeline, name) == schedule(pipeline, name)


def test_replicas_and_other_schedules_are_not_straight(make_split):
    split = make_split([0, 1], [2, 1], num_samples=4)
    pipeline = FoldedPipeline(
        split.stages, resplit(split.stages, num_samples=4, num_micro_batches=2)
    )
    assert not is_straight(pipeline, "1f1b")
    alone = make_split([0, 1], [1, 1], num_samples=4)
    routing = resplit(alone.stages, num_samples=4, num_micro_batches=2)
    assert not is_straight(FoldedPipeline(alone.stages, routing), "zero-bubble")
