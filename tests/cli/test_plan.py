"""`bayplan plan`: the file it writes, for a limit, a strategy, or a whole curve."""

import json
import re
from pathlib import Path

import pytest

from bayplan.data import files
from bayplan.data.plan import Choice, Plan
from bayplan.planning.memory.planner import STRATEGIES

LINE = re.compile(
    r"planned peak [\d.]+ MiB \(\d+% of plain\), planned step [\d.]+ (s|ms|us)"
    r" \([\d.]+( ± [\d.]+)? x plain\); .+ -> (.+)\n"
)
QUICK = ("--time-limit", 1)


def planned(bayplan, *options) -> Plan:
    outcome = bayplan("plan", "train:deep", *QUICK, "-o", "made.json", *options)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert LINE.fullmatch(outcome.out)
    return files.read(Path("made.json"), Plan)


def test_share_of_the_plain_peak_is_kept_and_reads_back_equal(bayplan, deep_project):
    plan = planned(bayplan, "--memory", "80%")
    assert plan.order is not None
    assert plan.request is not None
    assert (plan.request.target, plan.request.memory) == ("train:deep", "80%")
    assert plan.limit_bytes is not None
    assert plan.limit_bytes == int(0.8 * plan.order.plain_peak_bytes)
    assert plan.predicted_peak_bytes == (plan.order.peak_bytes,)
    assert plan.order.peak_bytes <= plan.limit_bytes
    assert plan.order.time_ratio >= 1
    again = deep_project / "again.json"
    files.write(again, plan)
    assert files.read(again, Plan) == plan
    assert again.read_text() == (deep_project / "made.json").read_text()


def test_limit_in_bytes_is_the_limit(bayplan, deep_project):
    plan = planned(bayplan, "--memory", "8MiB", "--batch", 4096)
    assert plan.limit_bytes == 8 * 2**20
    assert plan.order is not None
    assert plan.order.peak_bytes <= 8 * 2**20
    assert plan.request is not None
    assert plan.request.batch == 4096
    assert any(decision.choice is Choice.RECOMPUTE for decision in plan.decisions)


def test_limit_above_the_plain_peak_keeps_everything(bayplan, deep_project):
    plan = planned(bayplan, "--memory", "1GiB")
    assert plan.decisions == ()
    assert plan.order is not None
    assert plan.order.time_ratio == 1


def test_json_is_the_plan_that_is_written(bayplan, deep_project):
    outcome = bayplan("plan", "train:deep", "--memory", "80%", *QUICK, "-o", "p.json", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out) == json.loads((deep_project / "p.json").read_text())


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "auto"])
def test_each_strategy_plans_without_a_limit(bayplan, deep_project, strategy):
    plan = planned(bayplan, "--strategy", strategy)
    assert plan.order is not None
    assert plan.order.strategy == strategy
    assert plan.limit_bytes is None
    assert bool(plan.order.swaps) == (strategy == "swap")
    repeats = len(plan.order.schedule) > len({*plan.order.schedule})
    assert repeats == (strategy in ("checkpoint", "checkpoint-speed", "ome"))


def test_nothing_is_packed_where_it_may_not_be(bayplan, add_to_project, project):
    add_to_project(
        "def packable(batch_size=512):\n"
        "    torch.manual_seed(0)\n"
        "    block = (nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5))\n"
        "    layers = [type(part)(*arguments) for _ in range(4) for part, arguments in\n"
        "              zip(block, ((32, 32), (), (0.5,)))]\n"
        "    inputs = torch.randn(batch_size, 32)\n"
        "    return nn.Sequential(*layers), inputs, lambda y: y.square().mean()\n"
    )
    arguments = ("plan", "train:packable", "--memory", "85%", *QUICK, "-o", "p.json")
    for options in ((), ("--no-pack",)):
        assert bayplan(*arguments, *options).code == 0
        plan = files.read(project / "p.json", Plan)
        assert plan.order is not None
        assert plan.limit_bytes is not None
        assert plan.limit_bytes is not None
    assert plan.order.peak_bytes <= plan.limit_bytes
    assert plan.order.packs == ()


def test_curve_is_a_folder_of_plans_where_more_memory_is_never_slower(bayplan, deep_project):
    outcome = bayplan("plan", "train:deep", "--pareto", "--time-limit", 0.3, "-o", "plans")
    assert outcome.code == 0, outcome.err
    names = sorted(path.name for path in (deep_project / "plans").iterdir())
    assert {"0.80.json", "0.90.json", "1.00.json", "floor.json"} <= {*names}
    assert all(re.fullmatch(r"(\d\.\d0|floor)\.json", name) for name in names)
    plans = {name: files.read(deep_project / "plans" / name, Plan) for name in names}
    for plan in plans.values():
        assert plan.order is not None
        assert plan.limit_bytes is not None
        assert plan.limit_bytes is not None
    assert plan.order.peak_bytes <= plan.limit_bytes
    by_limit = sorted(plans.values(), key=lambda plan: plan.limit_bytes or 0)
    seconds = [plan.predicted_seconds for plan in by_limit]
    assert seconds == sorted(seconds, reverse=True)
    assert by_limit[0] == plans["floor.json"]
    header, *rows = outcome.out.splitlines()
    assert header.split() == ["limit", "peak", "of", "plain", "time", "/", "plain", "gap"]
    assert len(rows) == len(names)


def test_ctrl_c_leaves_the_plans_found_so_far(bayplan, deep_project, monkeypatch):
    """The third write is stopped; the first two stay, each a whole plan."""
    written: list[Path] = []
    write = files.write

    def stop_at_third(path: Path, noun: object) -> None:
        if path.parent.name == "plans":
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(path)
        write(path, noun)

    monkeypatch.setattr("bayplan.planning.memory.planner.files.write", stop_at_third)
    outcome = bayplan("plan", "train:deep", "--pareto", "--time-limit", 0.2, "-o", "plans")
    assert outcome.code == 130
    assert outcome.out == ""
    assert outcome.err == "bayplan: interrupted; plans found so far are in plans\n"
    left = {path.name for path in (deep_project / "plans").iterdir()}
    assert left == {path.name for path in written}
    for name in left:
        assert files.read(deep_project / "plans" / name, Plan).order is not None


@pytest.mark.parametrize("memory", ["10%", "30KiB"])
def test_limit_nobody_can_meet_says_both_numbers_and_the_smallest(
    bayplan, deep_project, memory, check_refusal
):
    options = ("plan", "train:deep", *QUICK, "-o", "p.json")
    outcome = bayplan(*options, "--memory", memory)
    check_refusal(outcome, 3, "in every schedule", "limit ", "inputs and resident")
    assert not (deep_project / "p.json").exists()
    smallest = re.search(r"Fits with (\d+) bytes", outcome.err)
    assert smallest is not None
    # A search that ends by the clock may miss by some share what another one found.
    enough_bytes = int(1.25 * int(smallest[1]))
    assert bayplan(*options, "--memory", f"{enough_bytes}B").code == 0


@pytest.mark.parametrize(
    ("options", "phrases"),
    [
        (["--memory", "8XB"], ["cannot read '8XB' as bytes", "8GiB"]),
        (["--memory", "0%"], ["'0%' is not between 0 % and 100 %"]),
        (["--memory", "140%"], ["'140%' is not between"]),
        (["--memory", "-1GiB"], ["'-1GiB' as bytes"]),
        ([], ["say the limit with --memory", "--pareto"]),
        (
            ["--pareto", "--memory", "1GiB"],
            ["--pareto plans for many limits", "leave out --memory"],
        ),
        (["--pareto", "--strategy", "keep"], ["--pareto plans for many limits"]),
        (["--strategy", "chekpoint"], ["no strategy 'chekpoint'", "did you mean 'checkpoint'"]),
        (["--strategy", "qqq"], ["no strategy 'qqq'", "known: auto, checkpoint"]),
        (["--memory", "1GiB", "--swap-size", "1GiB"], ["--swap-size 1GiB needs --swap-dir"]),
        (["--memory", "1GiB", "--swap-dir", "sw", "--swap-size", "x"], ["cannot read 'x'"]),
        (["--memory", "1GiB", "--swap-dir", "missing"], ["missing"]),
        (["--memory", "1GiB", "--swap-dir", "train.py"], ["train.py"]),
        (["--memory", "1GiB", "--swap-dir", "/proc"], ["/proc"]),
        (["--memory", "1GiB", "--swap-dir", "/dev/shm"], ["/dev/shm lies in memory", "a disk"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_mistake_is_named_and_no_file_is_left(
    bayplan, deep_project, options, phrases, check_refusal, files_in
):
    before = files_in(deep_project)
    outcome = bayplan("plan", "train:deep", "-o", "p.json", *QUICK, *options)
    check_refusal(outcome, 2, *phrases)
    assert files_in(deep_project) == before


def test_output_that_cannot_be_written_is_refused_first(bayplan, deep_project, check_refusal):
    for options in (("--memory", "80%"), ("--pareto",)):
        outcome = bayplan("plan", "train:deep", *options, *QUICK, "-o", "train.py/plans")
        check_refusal(outcome, 2, "train.py/plans")


def test_again_measures_and_plans_anew(bayplan, deep_project, monkeypatch, tmp_path):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "own cache"))
    first = planned(bayplan, "--memory", "80%")
    assert planned(bayplan, "--memory", "80%") == first
    renewed = planned(bayplan, "--memory", "80%", "--again")
    assert renewed.order.plain_seconds != first.order.plain_seconds
    assert planned(bayplan, "--memory", "80%") == renewed


def test_again_is_about_one_device(bayplan, deep_project, check_refusal):
    options = ("--placement", "0:0-1", "--again", "-o", "made.json")
    check_refusal(bayplan("plan", "train:deep", *options), 2, "--again is about one device")
