"""`bayplan check --max-batch`: a row for every strategy, ours never below another."""

import json

import pytest

from bayplan.planning.memory.planner import STRATEGIES

SEARCH = ("--max-batch", "--time-limit", 0.2)


def rows_of(outcome) -> dict[str, dict]:
    return {row["strategy"]: row for row in json.loads(outcome.out)}


@pytest.mark.slow
def test_every_strategy_has_a_row_and_ours_is_the_largest(bayplan, deep_project):
    outcome = bayplan("check", "train:deep", "--memory", "2MiB", *SEARCH, "--json")
    assert outcome.code == 0, outcome.err
    rows = rows_of(outcome)
    assert tuple(rows) == STRATEGIES
    assert rows["auto"]["batch"] == max(row["batch"] for row in rows.values())
    assert rows["auto"]["batch"] > rows["keep"]["batch"] > 0
    assert all(row["peak_bytes"] <= 2**21 for row in rows.values())
    assert rows["keep"]["time_ratio"] == 1
    for batch, fits in ((rows["keep"]["batch"], True), (rows["keep"]["batch"] + 1, False)):
        options = ("--batch", batch, "--strategy", "keep", "-o", "p.json", "--json")
        plan = json.loads(bayplan("plan", "train:deep", *options).out)
        assert (plan["order"]["peak_bytes"] <= 2**21) == fits
    # Nobody said where to swap to.
    assert rows["swap"]["note"] == rows["ome"]["note"] == "needs --swap-dir"


def test_table_is_readable_and_zero_everywhere_exits_3(bayplan, deep_project):
    outcome = bayplan("check", "train:deep", "--memory", "10KiB", *SEARCH)
    assert outcome.code == 3
    header, *lines = outcome.out.splitlines()
    assert header.split() == ["strategy", "batch", "peak", "time", "/", "plain", "samples/s"]
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    assert [line.split()[1] for line in lines[:4]] == ["0"] * 4


def test_search_that_makes_no_sense_is_refused(bayplan, deep_project, check_refusal):
    fixed = bayplan("check", "train:deep_of_fixed_size", "--memory", "2MiB", *SEARCH)
    check_refusal(fixed, 2, "takes no batch size", "batch_size")
    check_refusal(bayplan("check", "train:deep", *SEARCH), 2, "--max-batch needs the limit")
