"""Trained by real ranks in any arrangement, a model has the numbers of one process.

Four steps of AdamW in float64, dropout included; losses, parameters, buffers and the random state
are compared. The processes are started once for each number of ranks. `test_same_numbers.py` does
the same with real models, and with seven ranks that feed one.
"""

import pytest

from bayplan.data.plan import Route

TOLERANCE = 1e-12

TWO = {
    "data-parallel": ("0:0-1", {}),
    "data-parallel-mixed": ("0:0-1", {"model": "mixed", "batch": 7}),
    "one-to-one": ("0:0.0:1", {}),
    "uneven-micro-batches": ("0:0.0:1", {"model": "mixed", "batch": 7, "num_micro_batches": 3}),
    "gpipe": ("0:0.0:1", {"batch": 10, "num_micro_batches": 3, "schedule": "gpipe"}),
    "deep": ("0:0.0:1", {"batch": 10, "num_micro_batches": 5, "depth": 2}),
    "co-located": ("0:0-1.0:0-1", {"model": "mixed", "num_micro_batches": 2}),
    "back-again": ("0:0.0:1.0:0", {"model": "mixed", "num_micro_batches": 2}),
    "zero-bubble": (
        "0:0.0:1",
        {"model": "mixed", "batch": 10, "num_micro_batches": 4, "schedule": "zero-bubble"},
    ),
    "stale": ("0:0.0:1", {"staleness": 1}),
    "stale-micro-batches": ("0:0.0:1", {"batch": 10, "staleness": 1, "num_micro_batches": 3}),
    "interleaved": (
        "0:0.0:1.0:0.0:1",
        {"batch": 10, "num_micro_batches": 4, "schedule": "interleaved"},
    ),
    "loose-zero-bubble": (
        "0:0.0:1.0:0",
        {
            "model": "mixed",
            "batch": 10,
            "num_micro_batches": 4,
            "schedule": "zero-bubble",
            "static_order": False,
        },
    ),
    "loose-stale": (
        "0:0.0:1",
        {"batch": 10, "num_micro_batches": 2, "staleness": 1, "static_order": False},
    ),
}
FOUR = {
    "data-parallel-of-four": ("0:0-3", {"batch": 10}),
    "three-to-one": ("0:0-2.0:3", {"model": "mixed", "batch": 7, "num_micro_batches": 2}),
    "one-to-three": ("0:0.0:1-3", {"model": "mixed", "batch": 7, "num_micro_batches": 2}),
    "two-to-one-to-one": ("0:0-1.0:2.0:3", {"model": "mixed", "batch": 10, "num_micro_batches": 4}),
    "two-to-two": ("0:0-1.0:2-3", {"model": "mixed", "batch": 10, "num_micro_batches": 2}),
    "three-overlapping-two": ("0:0-2.0:2-3", {"model": "mixed", "batch": 10}),
    "round-robin": (
        "0:0-2.0:3",
        {"model": "mixed", "batch": 13, "num_micro_batches": 6, "route": Route.ROUND_ROBIN},
    ),
    "shares": ("0:0-2.0:3", {"batch": 9, "shares": (3, 1)}),
    "zero-bubble-of-four": (
        "0:0.0:1.0:2-3",
        {"batch": 10, "num_micro_batches": 3, "schedule": "zero-bubble"},
    ),
    "stale-in-a-row": ("0:0.0:1.0:2.0:3", {"staleness": 3}),
    "stale-at-most-one": ("0:0.0:1.0:2.0:3", {"staleness": 1}),
    "stale-three-to-one": ("0:0-2.0:3", {"batch": 7, "staleness": 1}),
    "stale-vertical": ("0:0.0:1.0:2-3", {"versions": (3, 2, 1), "vertical_sync": True}),
}
# Every schedule once, and data parallel, uneven and stale ranks; the rest combines these.
QUICK = {
    "data-parallel-mixed",
    "one-to-one",
    "gpipe",
    "loose-zero-bubble",
    "interleaved",
    "stale",
    "three-to-one",
    "stale-vertical",
}


def names_of(table):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in table]


def cases_of(table, make_case):
    for name, (placement, more) in table.items():
        wishes = {key: value for key, value in more.items() if key not in ("model", "batch")}
        own = {key: value for key, value in more.items() if key in ("model", "batch")}
        yield make_case(name=name, placement=placement, wishes=wishes, **own)


def trained(table, names, make_case, start, *, num_ranks):
    """The results of all ranks by the case's name."""
    cases = [case for case in cases_of(table, make_case) if case.name in names]
    ranks = start()
    ranks.run_all(cases, num_ranks=num_ranks)
    return {case.name: ranks.results(case, num_ranks=num_ranks) for case in cases}


@pytest.fixture(scope="module")
def two_ranks(selected_names, make_case, start):
    return trained(TWO, selected_names, make_case, start, num_ranks=2)


@pytest.fixture(scope="module")
def four_ranks(selected_names, make_case, start):
    return trained(FOUR, selected_names, make_case, start, num_ranks=4)


def check(results):
    for result in results:
        assert result["loss"] <= TOLERANCE
        assert result["state"] <= TOLERANCE
        assert result["names"]
        assert result["random_state"]
        assert result["moved"]  # or the comparison would be of nothing


@pytest.mark.parametrize("name", names_of(TWO))
def test_two_ranks_have_the_numbers_of_one(two_ranks, name):
    check(two_ranks[name])


@pytest.mark.parametrize("name", ["one-to-one"])
def test_a_micro_batch_alone_in_two_stages_gives_the_very_bits(two_ranks, name):
    assert [(one["loss"], one["state"]) for one in two_ranks[name]] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("name", names_of(FOUR))
def test_four_ranks_have_the_numbers_of_one(four_ranks, name):
    check(four_ranks[name])


STALENESS = {
    "gpipe": [[0, 0, 0, 0]] * 2,
    "stale": [[0, 1, 1, 1], [0, 0, 0, 0]],
    "stale-in-a-row": [[0, 1, 2, 3], [0, 1, 2, 2], [0, 1, 1, 1], [0, 0, 0, 0]],
    "stale-vertical": [[0, 1, 2, 2]] * 4,
}


@pytest.mark.parametrize("name", names_of(STALENESS))
def test_the_staleness_of_every_update_is_told(request, name):
    results = request.getfixturevalue("two_ranks" if name in TWO else "four_ranks")
    assert [result["staleness"] for result in results[name]] == STALENESS[name]
