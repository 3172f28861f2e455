"""Small pipelines, written as the ranks of each stage."""

from collections.abc import Callable, Sequence

import pytest

from bayplan.data.plan import Stage
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import resplit


def stages_on(ranks: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
    return tuple(
        Stage(first=at, last=at, devices=tuple(own), shares=(1,) * len(own))
        for at, own in enumerate(ranks)
    )


@pytest.fixture(scope="session")
def make_stages() -> Callable[..., tuple[Stage, ...]]:
    """Stages by their ranks, with even shares: `make_stages([[0, 1], [2]])`."""
    return stages_on


@pytest.fixture(scope="session")
def make_pipeline() -> Callable[..., Pipeline]:
    """A pipeline by the ranks of its stages, one sample per replica unless said otherwise."""

    def make(ranks, *, micro_batches, samples=None, route=resplit, **more) -> Pipeline:
        stages = stages_on(ranks)
        widest = max(map(len, ranks))
        routing = route(
            stages,
            num_samples=samples or widest * micro_batches,
            num_micro_batches=micro_batches,
        )
        return Pipeline(stages, routing, **more)

    return make
