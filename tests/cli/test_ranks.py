"""`bayplan plan` and `bayplan run` on many ranks."""

import json
import math

import pytest

PLACED = ("--placement", "0:0.0:1", "--shares-by", "ops")


def test_plan_for_ranks_is_written_and_told(bayplan, deep_project, tmp_path):
    answer = bayplan("plan", "train:deep", "--batch", 64, *PLACED, "-o", "two.json")
    assert answer.code == 0
    assert "2 stages on 2 ranks, 1 micro-batches (split), 1f1b" in answer.out
    plan = json.loads((deep_project / "two.json").read_text())
    assert [stage["devices"] for stage in plan["stages"]] == [[0], [1]]
    assert plan["actions"][0] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0U0"]


def test_dry_run_tells_what_ranks_would_do(bayplan, deep_project):
    options = ("--batch", 64, "--placement", "0:0-1.0:2", "--cut-at", "layers.3", "--dry-run")
    answer = bayplan("run", "train:deep", *options)
    assert answer.code == 0
    assert "stage 1: operators 6 to" in answer.out
    assert "on ranks 0, 1" in answer.out


def test_run_on_two_ranks_trains_and_shows_each(bayplan, deep_project):
    options = ("--batch", 64, *PLACED, "--micro-batches", 2, "--steps", 2, "--optimizer", "sgd")
    answer = bayplan("run", "train:deep", *options, "-o", "two.record.json", "--logs", "kept")
    assert answer.code == 0, answer.err
    losses = [float(word) for word in answer.out.splitlines()[0].split(" ", 1)[1].split(", ")]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert "device  stage  peak MiB  predicted  busy %" in answer.out
    record = json.loads((deep_project / "two.record.json").read_text())
    assert [device["device"] for device in record["devices"]] == [
        "rank 0, stage 0",
        "rank 1, stage 1",
    ]
    names = [event["name"] for event in record["devices"][1]["events"]]
    assert names[:3] == ["1RECV_F0", "1F0", "1B0"]
    assert (deep_project / "kept" / "rank1.log").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--placement", "0:0-"), ("placement '0:0-'", "like 0:0-6.0:7")),
        (("--placement", "0:0.0:1", "--shares", "1:2:3"), ("3 shares (1:2:3) for 2 stages",)),
        (("--placement", "0:0.0:1", "--shares", "0:1"), ("--shares is '0:1'", "like 11:7")),
        (("--placement", "0:0.0:1", "--shares-by", "tme"), ("no --shares-by 'tme'", "time")),
        (("--placement", "0:0.0:1", "--schedule", "1f2b"), ("no schedule '1f2b'", "1f1b")),
        (("--placement", "0:0.0:1", "--route", "robin"), ("no --route 'robin'",)),
        (("--placement", "0:0-3.0:4", "--batch", "3"), ("3 samples", "4 replicas", "a batch of 4")),
        (("--placement", "0:0.0:1", "--versions", "3:1"), ("stage 0 has 3 versions",)),
        (("--placement", "0:0.0:1", "--versions", "2:2"), ("the last stage has 2 versions",)),
        (("--placement", "0:0.0:1", "--staleness", "-1"), ("staleness is -1",)),
        (
            ("--placement", "0:0-1.0:2", "--sync-batch-norm", "--route", "round-robin"),
            ("--sync-batch-norm and --route round-robin", "leave out one"),
        ),
        (
            ("--placement", "0:0-1.0:2", "--sync-batch-norm", "--shares-by", "ops"),
            ("--sync-batch-norm has nothing to do", "leave it out"),
        ),
        (("--placement", "0:0.0:1", "--cut-at", "layer"), ("'layer' to cut at has no operator",)),
        (("--batch", "8"), ("--batch 8 needs --placement",)),
    ],
)
def test_wrong_words_about_ranks_are_refused(bayplan, deep_project, check_refusal, options, words):
    given = options if "--batch" in options else (*options, "--batch", "64")
    check_refusal(bayplan("run", "train:deep", *given, "--dry-run"), 2, *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "1GiB"), ("--memory is about one device", "--memory-per-rank")),
        (("--pareto",), ("--pareto is about one device",)),
        (("--strategy", "keep"), ("--strategy is about one device",)),
        (("--swap-dir", "."), ("--swap-dir is about one device",)),
    ],
)
def test_what_is_about_one_device_is_not_passed_over(
    bayplan, deep_project, check_refusal, options, words
):
    given = ("plan", "train:deep", "--batch", 64, *PLACED, "-o", "two.json", *options)
    check_refusal(bayplan(*given), 2, *words)


def test_what_is_about_ranks_needs_a_placement(bayplan, deep_project, check_refusal):
    given = ("run", "train:deep", "--shares", "1:2", "--dry-run")
    check_refusal(bayplan(*given), 2, "about many ranks", "--placement")


def test_more_stages_than_places_to_cut_are_refused(bayplan, deep_project, check_refusal):
    placement = ".".join(f"0:{device}" for device in range(40))
    options = ("--batch", 64, "--placement", placement, "--shares-by", "ops", "--dry-run")
    check_refusal(bayplan("run", "train:deep", *options), 2, "40 stages", "at most")
