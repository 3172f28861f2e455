"""`bayplan plan` and `bayplan run` on many ranks."""

import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest

from bayplan.devices.device import Cpu
from bayplan.reporting.progress import ProgressBar
from bayplan.running.checkpoints.folders import saved_steps
from bayplan.running.swaps.lanes import lies_in_memory

PLACED = ("--placement", "0:0.0:1", "--shares-by", "ops")


def test_plan_for_ranks_is_written_and_told(bayplan, deep_project, tmp_path):
    answer = bayplan("plan", "train:deep", "--batch", 64, *PLACED, "-o", "two.json")
    assert answer.code == 0
    assert "2 stages on 2 ranks, 1 micro-batch (split), 1f1b" in answer.out
    plan = json.loads((deep_project / "two.json").read_text())
    assert [stage["devices"] for stage in plan["stages"]] == [[0], [1]]
    assert plan["actions"][0] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0U0"]


def test_dry_run_tells_what_ranks_would_do(bayplan, deep_project):
    options = ("--batch", 64, "--placement", "0:0-1.0:2", "--cut-at", "layers.3", "--dry-run")
    answer = bayplan("run", "train:deep", *options)
    assert answer.code == 0
    assert "stage 1: operators 6 to" in answer.out
    assert "on ranks 0, 1" in answer.out
    assert "static order" not in answer.out
    assert "no static order" in bayplan("run", "train:deep", *options, "--no-static-order").out


TABLE = "device  stage  peak MiB  predicted  busy %  predicted"


def test_run_on_two_ranks_trains_and_shows_each(bayplan, deep_project):
    options = ("--batch", 8192, *PLACED, "--micro-batches", 2, "--steps", 3, "--optimizer", "sgd")
    answer = bayplan("run", "train:deep", *options, "-o", "two.record.json", "--logs", "kept")
    assert answer.code == 0, answer.err
    compared = bayplan("compare", "two.record.json", "two.record.json")
    assert compared.code == 0
    assert "first (measured)" in compared.out
    losses = [float(word) for word in answer.out.splitlines()[0].split(" ", 1)[1].split(", ")]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert TABLE in answer.out
    assert re.search(r"step .+, predicted .+, [0-9.]+ samples/s", answer.out)
    assert "an epoch" not in answer.out, "nobody said how many samples it has"
    assert re.search(
        r"^step 3 of 3, loss .+ samples/s, peak .+ 0 s left$", answer.err, re.MULTILINE
    )
    record = json.loads((deep_project / "two.record.json").read_text())
    assert [device["device"] for device in record["devices"]] == [
        "rank 0, stage 0",
        "rank 1, stage 1",
    ]
    names = [event["name"] for event in record["devices"][1]["events"]]
    assert names[:3] == ["1RECV_F0", "1F0", "1B0"]
    assert (deep_project / "kept" / "rank1.log").exists()
    assert record["predicted"]["step_seconds"] > 0
    for device, peak_bytes in zip(
        record["devices"], record["predicted"]["peak_bytes"], strict=True
    ):
        assert device["step_peak_bytes"][-1] == pytest.approx(peak_bytes, rel=0.02)
        kinds = device["peak_by_kind"]
        assert sum(kinds.values()) == max(device["step_peak_bytes"][1:])
        assert kinds["activation"] >= 2 * 4096 * 64 * 4  # of one micro-batch, at the least
    told = bayplan("report", "two.record.json")
    assert told.code == 0
    table = answer.out[answer.out.index(TABLE) : answer.out.index("logs of all ranks")]
    assert table in told.out


def test_ranks_whose_batches_overlap_take_what_is_predicted(bayplan, deep_project):
    """Messages of two steps before are kept, and count once where backward needs them too.

    A run on eight ranks was predicted at 1124 MiB and took 988.
    """
    options = ("--batch", 8192, *PLACED, "--micro-batches", 4, "--schedule", "gpipe")
    options = (*options, "--staleness", 1, "--steps", 5, "--optimizer", "sgd", "-o", "stale.json")
    assert bayplan("run", "train:deep", *options).code == 0
    record = json.loads((deep_project / "stale.json").read_text())
    found = [device["step_peak_bytes"][-1] for device in record["devices"]]
    assert found == pytest.approx(record["predicted"]["peak_bytes"], rel=0.005)


def test_ctrl_c_ends_the_step_and_keeps_the_record(bayplan, deep_project, monkeypatch):
    """A real signal, sent when the first step of thousands is told."""

    def interrupt(bar, line, done, total):
        if done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "tell", interrupt)
    options = ("--batch", 64, *PLACED, "--staleness", 1, "--steps", 10_000)
    answer = bayplan("run", "train:deep", *options, "-o", "cut.json", "--epoch-samples", 640)
    assert answer.code == 130
    record = json.loads((deep_project / "cut.json").read_text())
    assert 1 <= len(record["step_seconds"]) < 10_000
    assert [len(device["step_peak_bytes"]) for device in record["devices"]] == [
        len(record["step_seconds"])
    ] * 2
    assert max(record["devices"][0]["staleness"]) == 1
    assert record["devices"][0]["events"][0]["name"] == "0F0"  # of a whole step, not of its end
    assert TABLE in answer.out
    assert "weights up to 1 updates old" in answer.out
    assert "an epoch of 640 samples" in answer.out
    assert not (deep_project / "logs").exists()


LATE = """
import os
import signal


class Late(Deep):
    def get_extra_state(self):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        return 0


def late():
    torch.manual_seed(5)
    return Late(), (torch.randn(64, 64), torch.randint(10, (64,))), nn.CrossEntropyLoss()
"""
"""Whose rank 0 gets both signals while it saves."""


def test_signal_that_finds_a_run_in_its_last_save_loses_nothing(bayplan, deep_project):
    """After the last step a rank heard no signals, but died of them; a launcher sends them late.

    Of ten runs that got Ctrl-C one had reached its end, and lost all since the checkpoint before.
    """
    with (deep_project / "train.py").open("a") as file:
        file.write(LATE)
    options = (*PLACED, "--staleness", 1, "--steps", 3, "--optimizer", "sgd")
    answer = bayplan("run", "train:late", *options, "--checkpoint", "saved", "-o", "late.json")
    assert answer.code == 0, answer.err
    assert list(saved_steps(deep_project / "saved")) == [3]
    assert len(json.loads((deep_project / "late.json").read_text())["losses"]) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--placement", "0:0.0:9"), ("names device 9 of node 0, but not device 1", "0:0.0:1")),
        (("--placement", "0:0"), ("is one device", "leave out --placement")),
        (("--placement", "", "--ranks", 1), ("is one device", "name two devices or more")),
        (("--placement", "0:0.2:0"), ("names node 2, but not node 1", "0:0.1:0")),
        (("--placement", "0:0.1:0"), ("names 2 nodes", "this machine", "torchrun --nnodes 2")),
        (("--placement", "0:0-"), ("placement '0:0-'", "like 0:0-6.0:7")),
        (("--placement", "0:0.0:1", "--shares", "1:2:3"), ("3 shares (1:2:3) for 2 stages",)),
        (("--placement", "0:0.0:1", "--shares", "0:1"), ("--shares is '0:1'", "like 11:7")),
        (("--placement", "0:0.0:1", "--shares-by", "tme"), ("no --shares-by 'tme'", "time")),
        (("--placement", "0:0.0:1", "--schedule", "1f2b"), ("no schedule '1f2b'", "1f1b")),
        (("--placement", "0:0.0:1", "--route", "robin"), ("no --route 'robin'",)),
        (
            ("--placement", "0:0.0:1", "--micro-batches", "9", "--batch", "8"),
            ("8 samples in 9 micro-batches", "a batch of 9", "8 micro-batches"),
        ),
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
        (("--memory", "1GiB", "--placement", "0:0.0:1"), ("--memory is about one device",)),
        (("--placement", "0:0.0:1", "--epoch-samples", "0"), ("--epoch-samples is 0",)),
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
        (("--swap-dir", "."), ("--swap-dir is about a limit", "--memory-per-rank")),
        (("--no-pack",), ("--no-pack is about a limit", "--memory-per-rank")),
        (
            ("--swap-dir", ".", "--schedule", "zero-bubble", "--memory-per-rank", "1GiB"),
            ("zero-bubble", "leave out --swap-dir or --swap-size, or use --schedule 1f1b"),
        ),
    ],
)
def test_what_is_about_one_device_is_not_passed_over(
    bayplan, deep_project, check_refusal, options, words
):
    given = ("plan", "train:deep", "--batch", 64, *PLACED, "-o", "two.json", *options)
    check_refusal(bayplan(*given), 2, *words)


@pytest.mark.slow
def test_ranks_stay_within_their_limit_by_swapping_and_repeating(
    bayplan, deep_project, check_refusal
):
    if lies_in_memory(deep_project):
        pytest.skip("the tests' folder lies in memory")
    three = ("--micro-batches", 3, "--schedule", "gpipe", "--optimizer", "sgd")
    given = ("plan", "train:deep", "--batch", 12288, *PLACED, *three, "-o", "two.json")
    assert bayplan(*given).code == 0
    plain = json.loads((deep_project / "two.json").read_text())["predicted_peak_bytes"]
    limit_bytes = int(0.75 * max(plain))
    tight = ("--memory-per-rank", limit_bytes, "--time-limit", 1)
    answer = bayplan(*given, *tight, "--swap-dir", ".")
    assert answer.code == 0, answer.err
    assert "4096 samples at a time, 3 in flight" in answer.out
    plan = json.loads((deep_project / "two.json").read_text())
    assert max(plan["predicted_peak_bytes"]) <= limit_bytes
    chosen = {one["choice"] for stage in plan["stage_orders"] for one in stage["decisions"]}
    assert chosen
    told = bayplan("explain", "two.json").out
    assert "inside stages:" in told
    assert "stage 1, 4096 samples at a time" in told
    for stage in plan["stage_orders"]:
        assert all(one["value"] in told for one in stage["decisions"][:5])
    where = (
        ("--swap-dir", ".") if any(stage["swap_bytes"] for stage in plan["stage_orders"]) else ()
    )
    ran = ("run", "two.json", "--target", "train:deep", "--steps", 2)
    answer = bayplan(*ran, *where, "-o", "two.record.json")
    assert answer.code == 0, answer.err
    record = json.loads((deep_project / "two.record.json").read_text())
    assert max(max(one["step_peak_bytes"]) for one in record["devices"]) <= limit_bytes
    if where:
        check_refusal(bayplan(*ran), 2, "say where to, with --swap-dir")
        check_refusal(bayplan(*ran, *where, "--swap-size", 4096), 2, "--swap-size allows 4.0 KiB")


def test_a_limit_that_no_rank_can_keep_is_refused_with_what_is_needed(
    bayplan, deep_project, check_refusal
):
    given = ("plan", "train:deep", "--batch", 64, *PLACED, "-o", "two.json", "--time-limit", 0.5)
    answer = bayplan(*given, "--memory-per-rank", "1KiB")
    check_refusal(answer, 3, "rank ", "at the least, the limit is 1.0 KiB", "--swap-dir DIR")
    (enough,) = re.findall(r"--memory-per-rank (\w+);", answer.err)
    assert bayplan(*given, "--memory-per-rank", enough).code == 0


def test_what_is_about_ranks_needs_a_placement(bayplan, deep_project, check_refusal):
    given = ("run", "train:deep", "--shares", "1:2", "--dry-run")
    check_refusal(bayplan(*given), 2, "about many ranks", "--placement")


def test_more_stages_than_places_to_cut_are_refused(bayplan, deep_project, check_refusal):
    placement = ".".join(f"0:{device}" for device in range(40))
    options = ("--batch", 64, "--placement", placement, "--shares-by", "ops", "--dry-run")
    check_refusal(bayplan("run", "train:deep", *options), 2, "40 stages", "at most")


@pytest.fixture
def rank_plan(bayplan, deep_project):
    assert bayplan("plan", "train:deep", "--batch", 64, *PLACED, "-o", "two.json").code == 0
    return deep_project / "two.json"


def test_explanation_shows_every_rank_and_how_to_start_them(bayplan, rank_plan):
    answer = bayplan("explain", rank_plan)
    assert (answer.code, answer.err) == (0, "")
    assert "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0 0U0" in answer.out
    assert "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1U0" in answer.out
    assert "torchrun --nproc-per-node 2" in answer.out


def test_a_plan_for_two_nodes_is_not_started_on_one(bayplan, deep_project, check_refusal):
    options = ("--batch", 64, "--placement", "0:0.1:0", "--shares-by", "ops", "-o", "far.json")
    made = bayplan("plan", "train:deep", *options)
    assert made.code == 0
    assert "node 1, ranks 1 to 1: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1" in made.out
    given = ("run", "far.json", "--target", "train:deep", "--dry-run")
    check_refusal(bayplan(*given), 2, "names 2 nodes", "torchrun --nnodes 2")


def test_a_plan_for_ranks_names_its_target_before_any_is_started(bayplan, rank_plan, check_refusal):
    check_refusal(bayplan("run", rank_plan), 2, "not trusted to name code", "--target train:deep")


@pytest.mark.parametrize("command", [("run", "--dry-run"), ("explain",)])
def test_an_edited_plan_is_refused_before_any_rank_is_started(
    bayplan, rank_plan, check_refusal, command
):
    plan = json.loads(rank_plan.read_text())
    plan["actions"][1].remove("1RECV_F0")
    rank_plan.write_text(json.dumps(plan))
    verb, *options = command
    check_refusal(bayplan(verb, rank_plan, *options), 2, "1RECV_F0 is missing", "plan anew")


@pytest.mark.parametrize("command", ["report", "simulate"])
def test_other_commands_say_what_a_plan_is_good_for(bayplan, rank_plan, check_refusal, command):
    more = ("--device", "h100") if command == "simulate" else ()
    check_refusal(bayplan(command, rank_plan, *more), 2, "'bayplan/plan'", "bayplan explain")


def test_more_ranks_than_memory_are_not_started(bayplan, rank_plan, check_refusal, monkeypatch):
    monkeypatch.setattr(Cpu, "shared_free_bytes", 300 << 20)
    given = ("run", rank_plan, "--target", "train:deep", "--dry-run")
    check_refusal(bayplan(*given), 3, "2 ranks", "400.0 MiB for torch", "300.0 MiB are free")


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_with_one_line(rank_plan):
    code = "import sys; from bayplan.cli import main; main(sys.argv[1:])"
    options = ["--target", "train:deep", "--steps", "100000"]
    running = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(rank_plan), *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert any(line.startswith("step 3 ") for line in running.stderr)
        os.killpg(running.pid, signal.SIGINT)
        rest = running.communicate(timeout=100)[1]
    finally:
        running.kill()
    assert running.returncode == 130
    (told,) = (line for line in rest.splitlines() if not line.startswith("step "))
    assert re.fullmatch(r"bayplan: interrupted; the figures are those of \d+ of 100000 steps", told)
