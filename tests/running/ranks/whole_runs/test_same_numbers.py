"""Real models, trained by real ranks as planned, have the numbers of one device.

Five steps of SGD with momentum, dropout included. Losses, parameters, momentum's effect on them,
buffers and the random state are compared after the last step; relative differences, in float64 and
for some cases in float32. Every placement and every model has several cases, but not each pair has
one: what takes the time is to trace a model on every rank. The processes are started once for each
number of ranks.
"""

import pytest

# What float64 leaves, and float32: its rounding, over five steps that each build on the last.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

SYNC = {"sync_batch_norm": True}
TWO = {
    "data-parallel-single-precision": ("0:0-1", "alexnet", 8, {"dtype": "float32"}),
    "one-to-one-recomputed": ("0:0.0:1", "gpt", 8, {"num_micro_batches": 2, "limit_share": 0.8}),
    "interleaved": (
        "0:0.0:1.0:0.0:1",
        "resnet18-frozen",
        8,
        {"num_micro_batches": 4, "schedule": "interleaved"},
    ),
    "zero-bubble": ("0:0.0:1", "bert", 7, {"num_micro_batches": 3, "schedule": "zero-bubble"}),
    "co-located": ("0:0-1.0:0-1", "vgg16", 8, {"num_micro_batches": 2}),
    # Of micro-batches, one device that accumulates gradients over them has the same statistics.
    "co-located-synchronised": (
        "0:0-1.0:0-1",
        "resnet18",
        8,
        {**SYNC, "num_micro_batches": 2, "schedule": "zero-bubble", "limit_bytes": 1 << 40},
    ),
    "stale": ("0:0.0:1", "alexnet", 6, {"staleness": 1}),
    "stale-vertical": ("0:0.0:1", "alexnet", 6, {"versions": (2, 1), "vertical_sync": True}),
}
FOUR = {
    "data-parallel-of-four": ("0:0-3", "gpt", 8, {}),
    "three-to-one-synchronised": ("0:0-2.0:3", "resnet18", 10, {**SYNC, "shares": (3, 1)}),
    "two-to-one-to-one": ("0:0-1.0:2.0:3", "alexnet", 8, {"num_micro_batches": 2}),
}
EIGHT = {"seven-to-one": ("0:0-6.0:7", "vgg16", 17, {"shares": (11, 7)})}

# A float32 case, a transformer that recomputes, and BatchNorm across ranks. The rest is slow: every
# rank of it traces a model, and `test_ranks_same_numbers.py` has each placement with a small one.
QUICK = {
    "data-parallel-single-precision",
    "one-to-one-recomputed",
    "co-located-synchronised",
}

OWN = ("dtype", "limit_share")  # of a case; all else is a wish


def names_of(table):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in table]


def cases_of(table, make_case):
    for name, (placement, model, batch, more) in table.items():
        own = {key: value for key, value in more.items() if key in OWN}
        wishes = {key: value for key, value in more.items() if key not in OWN}
        yield make_case(name, placement, model, batch, wishes, steps=5, **own)


def planned(table, names, make_case, start):
    """The named cases of a table, planned."""
    cases = [case for case in cases_of(table, make_case) if case.name in names]
    ranks = start()
    return cases, ranks, ranks.plan_all(cases)


def trained(plans, *, num_ranks):
    """The results of all ranks by the case's name."""
    cases, ranks, given = plans
    assert ranks.run(given, num_ranks=num_ranks) == 0, "\n".join(ranks.lines)
    return {case.name: ranks.results(case, num_ranks=num_ranks) for case in cases}


@pytest.fixture(scope="module")
def plans_for_two(selected_names, make_case, start):
    return planned(TWO, selected_names, make_case, start)


@pytest.fixture(scope="module")
def plans_for_four(selected_names, make_case, start):
    return planned(FOUR, selected_names, make_case, start)


@pytest.fixture(scope="module")
def two_ranks(plans_for_two):
    return trained(plans_for_two, num_ranks=2)


@pytest.fixture(scope="module")
def four_ranks(plans_for_four):
    return trained(plans_for_four, num_ranks=4)


def check(results, more):
    tolerance = TOLERANCE[more.get("dtype", "float64")]
    for result in results:
        assert result["loss"] <= tolerance
        assert result["state"] <= tolerance
        assert result["names"]
        assert result["random_state"]
        assert result["moved"]  # or the comparison would be of nothing
        assert result["repeats"] == ("limit_share" in more)


@pytest.mark.parametrize(
    "plans", ["plans_for_two", pytest.param("plans_for_four", marks=pytest.mark.slow)]
)
def test_every_case_has_a_plan(plans, request):
    cases, _, given = request.getfixturevalue(plans)
    assert [one["name"] for one in given] == [case.name for case in cases]


@pytest.mark.parametrize("name", names_of(TWO))
def test_two_ranks_have_the_numbers_of_one(two_ranks, name):
    check(two_ranks[name], TWO[name][-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "staleness"),
    [("stale", [[0, 1, 1, 1, 1], [0] * 5]), ("stale-vertical", [[0, 1, 1, 1, 1]] * 2)],
)
def test_batches_overlap_where_stale_weights_are_allowed(two_ranks, name, staleness):
    assert [result["staleness"] for result in two_ranks[name]] == staleness


@pytest.mark.parametrize("name", names_of(FOUR))
def test_four_ranks_have_the_numbers_of_one(four_ranks, name):
    check(four_ranks[name], FOUR[name][-1])


@pytest.mark.slow
def test_seven_feed_one_and_have_the_numbers_of_one(make_case, start):
    (results,) = trained(planned(EIGHT, EIGHT, make_case, start), num_ranks=8).values()
    check(results, {})
