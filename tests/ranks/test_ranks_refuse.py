"""Ranks that cannot train together: one message that says why, the exit code, and no hanging."""

import time

import pytest

# Importing torch on a busy machine is most of it; gloo would wait for half an hour.
MOST_SECONDS = 100


@pytest.fixture
def refusals(make_case, start):
    def run(case, *, num_ranks, batch=None, other=None):
        ranks = start()
        given = {"name": "case", "model": case.model, "batch": batch or case.batch}
        given["plan"] = ranks.write(case)
        if other is not None:
            given["plans"] = {"1": ranks.write(other, name="other")}
        began = time.monotonic()
        code = ranks.run([given], num_ranks=num_ranks)
        assert time.monotonic() - began < MOST_SECONDS
        return code, ranks.lines

    return run


def test_ranks_with_different_plans_are_refused(refusals, make_case):
    one = make_case("one", "0:0.0:1", wishes={"shares": (1, 1)})
    other = make_case("other", "0:0.0:1", wishes={"shares": (2, 1)})
    code, lines = refusals(one, other=other, num_ranks=2)
    assert code == 5
    assert any("ranks 1 have another plan than rank 0" in line for line in lines)


def test_another_number_of_ranks_than_the_plan_s_is_refused(refusals, make_case):
    code, lines = refusals(make_case("two", "0:0.0:1"), num_ranks=3)
    assert code == 2
    assert any("the plan is for 2 ranks, here are 3" in line for line in lines)


def test_a_batch_smaller_than_the_replicas_is_refused(refusals, make_case):
    code, lines = refusals(make_case("wide", "0:0-1.0:2"), batch=1, num_ranks=3)
    assert code == 2
    message = "1 samples in 1 micro-batches leave 1 for the smallest, but stage 0 has 2 replicas"
    assert any(message in line for line in lines)
