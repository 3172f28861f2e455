"""Rows of gradients to exchange: sizes are in units, so that times can be added up by a human."""

from itertools import accumulate

import pytest

from bayplan.data.links import LinkCost
from bayplan.planning.buckets.bucket_plan import BucketPlan, Gradient

UNIT = 64  # bytes, the grain of parts


@pytest.fixture(scope="session")
def make_row():
    """Gradients a, b, c, ... of so many units; each is ready so long after the one before."""

    def make(sizes, gaps=None, *, kinds=None) -> list[Gradient]:
        ready = accumulate(gaps or [1.0] * len(sizes))
        return [
            Gradient(name=chr(ord("a") + at), size_bytes=size * UNIT, ready_seconds=when, kind=kind)
            for at, (size, when, kind) in enumerate(
                zip(sizes, ready, kinds or [""] * len(sizes), strict=True)
            )
        ]

    return make


@pytest.fixture(scope="session")
def make_link():
    """A link that takes so many seconds for a message, and for each unit of it."""

    def make(latency, per_unit=1.0) -> LinkCost:
        return LinkCost.affine(latency_seconds=latency, bytes_per_second=UNIT / per_unit)

    return make


@pytest.fixture(scope="session")
def words_of():
    """Buckets as words: the names in each, once for each part."""

    def words(plan: BucketPlan) -> list[str]:
        return ["".join(part.name for part in bucket.parts) for bucket in plan.buckets]

    return words
