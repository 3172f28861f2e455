"""`bayplan check`: the verdict, what explains it, and what would make it fit."""

import re
from pathlib import Path

import msgspec
import pytest

from bayplan.costing.catalogue import load_device
from bayplan.data.profile import Origin
from bayplan.data.units import parse_bytes
from bayplan.data.verdict import Verdict
from bayplan.devices.device import Cpu

SIZE = r"[\d.]+ [KMGT]?i?B"
SECONDS = r"[\d.]+ (s|ms|us)"
PEAK = "plain (?:peak|reserved memory)"
FITS = re.compile(rf"fits: {PEAK} [\d.]+( [KMGT]?i?B)? of {SIZE}, {SECONDS} per plain step")
DOES_NOT_FIT = re.compile(rf"does not fit: {PEAK} {SIZE}, limit {SIZE}, {SIZE} too much; .+")


def verdict_of(outcome) -> Verdict:
    assert outcome.err == ""
    return msgspec.json.decode(outcome.out, type=Verdict)


def test_reference_model_is_measured_here_and_fits(bayplan):
    outcome = bayplan("check", "resnet18", "--batch", 1, "--memory", "8GiB")
    assert outcome.code == 0
    first, *rest = outcome.out.splitlines()
    assert FITS.fullmatch(first)
    text = "\n".join(rest)
    for word in ("parameters", "gradients", "optimizer state", "buffers"):
        assert word in text
    assert "activations held for backward" in text
    shapes = "float32[1, 3, 224, 224], int64[1]"
    step = f"resnet18, batch 1 ({shapes}), 11.7 M parameters in float32, optimizer adamw, on cpu"
    assert step in text
    assert "time measured on this device" in text
    assert outcome.err == ""


def test_reference_model_on_a_device_that_is_not_here_does_not_fit(bayplan):
    options = ("--batch", 1, "--optimizer", "sgd", "--autocast", "bf16", "--device", "h100")
    outcome = bayplan("check", "resnet18", *options, "--memory", "100MiB")
    assert outcome.code == 3
    assert DOES_NOT_FIT.fullmatch(outcome.out.splitlines()[0])
    assert "on h100" in outcome.out
    assert "time derived from the device's figures, nothing ran" in outcome.out
    assert "CUDA context" in outcome.out.splitlines()[-1]
    assert not re.search("fragmentation|cuBLAS", outcome.out.splitlines()[-1])  # reserved bytes are
    live = bayplan("check", "resnet18", *options, "--memory", "100MiB", "--limit-counts", "live")
    assert re.search("fragmentation.*cuBLAS", live.out.splitlines()[-1])


def test_reserved_memory_of_a_cuda_device_is_told_beside_the_peak(bayplan):
    options = ("check", "resnet18", "--batch", 8, "--device", "titan-v", "--no-plan")
    outcome = bayplan(*options, "--memory", "1GiB")
    assert re.search(
        r"^torch reserves .* for plain steps, .* lost to fragmentation; nvidia-smi shows .*GiB$",
        outcome.out,
        re.MULTILINE,
    )
    verdict = verdict_of(bayplan(*options, "--memory", "1GiB", "--json"))
    assert verdict.plain_peak_bytes <= verdict.allocator.allocated_bytes
    assert verdict.allocator.allocated_bytes < verdict.allocator.reserved_bytes
    assert verdict.allocator.reserved_bytes < verdict.total_bytes
    assert verdict.runs_out == ""
    tight = (*options, "--memory", verdict.plain_peak_bytes)
    assert bayplan(*tight).code == 3
    by_live = bayplan(*tight, "--limit-counts", "live")
    assert by_live.code == 0
    assert "but the device is out of memory: " in by_live.out


def test_limit_is_for_the_bytes_that_it_counts(bayplan):
    options = ("check", "resnet18", "--batch", 8, "--device", "titan-v", "--no-plan", "--json")
    verdict = verdict_of(bayplan(*options))
    assert verdict.total_bytes is not None
    counted = {
        "live": verdict.plain_peak_bytes,
        "reserved": verdict.allocator.reserved_bytes,
        "total": verdict.total_bytes,
    }
    assert verdict.limit_counts == "reserved"
    for counts, size_bytes in counted.items():
        asked = (*options, "--limit-counts", counts, "--memory")
        assert bayplan(*asked, size_bytes).code == 0
        refused = bayplan(*asked, size_bytes - 1)
        assert refused.code == 3
        assert verdict_of(refused).plain_bytes == size_bytes


def test_plans_reserve_no_more_than_their_limit(bayplan):
    options = ("check", "resnet18", "--batch", 32, "--device", "titan-v", "--time-limit", 1)
    options += ("--memory", "70%", "--json")
    by_live = verdict_of(bayplan(*options, "--limit-counts", "live")).planned
    verdict = verdict_of(bayplan(*options))
    assert not verdict.plain_fits
    assert verdict.limit_bytes == int(0.7 * verdict.allocator.reserved_bytes)
    assert verdict.planned.peak_bytes < verdict.planned.reserved_bytes <= verdict.limit_bytes
    assert (by_live.reserved_bytes, verdict.planned_bytes) == (None, verdict.planned.reserved_bytes)


def test_bytes_that_nobody_can_count_are_refused(bayplan, project, check_refusal):
    asked = ("check", "train:build", "--memory", "1GiB", "--limit-counts")
    check_refusal(bayplan(*asked, "reserved"), 2, "a limit counts live bytes there")
    check_refusal(bayplan(*asked, "some"), 2, "it counts live, reserved or total bytes")


def test_no_memory_is_reserved_on_a_cpu(bayplan, project):
    verdict = verdict_of(bayplan("check", "train:build", "--memory", "1GiB", "--json"))
    assert (verdict.allocator, verdict.total_bytes, verdict.runs_out) == (None, None, "")


def test_unit_is_said_once_when_it_is_the_same(bayplan, project):
    options = ("--device", "h100", "--memory", "100MiB", "--limit-counts", "live")
    outcome = bayplan("check", "train:build", *options)
    assert re.match(r"fits: plain peak \d\.\d of 100\.0 MiB, ", outcome.out)


def test_json_is_a_verdict_and_says_the_same_as_the_text(bayplan, project):
    options = ("check", "train:build", "--batch", 4, "--device", "v100")
    verdict = verdict_of(bayplan(*options, "--json"))
    assert verdict.fits
    assert (verdict.model, verdict.batch, verdict.device) == ("train:build", 4, "v100")
    assert (verdict.optimizer, verdict.time_origin) == ("adamw", Origin.DERIVED)
    assert verdict.would_fit == ()
    text = bayplan(*options).out
    assert verdict.peak_place in text
    assert all(value.name in text for value in verdict.largest)


def test_breakdown_sums_to_the_peak(bayplan, project):
    for where in (("--device", "h100"), ()):
        verdict = verdict_of(bayplan("check", "train:build", "--json", *where))
        assert sum(verdict.peak_by_kind.values()) == verdict.plain_peak_bytes
        assert set(verdict.peak_by_kind) >= {"parameter", "gradient", "optimizer_state", "input"}


def test_five_largest_values_are_named_by_module_and_line(bayplan, project):
    # No optimizer and many samples, so that the peak is among the activations.
    options = ("--batch", 64, "--optimizer", "none", "--device", "h100")
    verdict = verdict_of(bayplan("check", "train:build", *options, "--json"))
    assert len(verdict.largest) == 5
    sizes = [value.size_bytes for value in verdict.largest]
    assert sizes == sorted(sizes, reverse=True)
    lines = (project / "train.py").read_text().splitlines()
    relu, product = verdict.largest[:2]
    assert (relu.kind, relu.name) == ("activation", "relu")
    assert (product.kind, product.name) == ("temporary", "head (mm)")
    for value, text in ((relu, "torch.relu(self.conv(images))"), (product, "self.head(")):
        file, number = value.source.rsplit(":", 1)
        assert Path(file).name == "train.py"
        assert text in lines[int(number) - 1]
    assert [value.name for value in verdict.largest[3:]] == ["batch", "head.weight"]


def test_limit_is_what_the_device_has_left_after_its_context(bayplan, project):
    verdict = verdict_of(bayplan("check", "train:build", "--device", "p100", "--json"))
    p100 = load_device("p100")
    assert verdict.limit_bytes == p100.memory_bytes.value - p100.context_bytes.value


def test_limit_here_is_what_is_free(bayplan, project, monkeypatch):
    monkeypatch.setattr(Cpu, "free_bytes", 3 * 2**30)
    verdict = verdict_of(bayplan("check", "train:build", "--json"))
    assert verdict.limit_bytes == 3 * 2**30
    assert verdict.time_origin is Origin.MEASURED


def test_peak_at_the_limit_fits_and_one_byte_less_does_not(bayplan, project):
    options = ("check", "train:build", "--device", "h100", "--no-plan", "--json")
    options += ("--limit-counts", "live")
    peak_bytes = verdict_of(bayplan(*options)).plain_peak_bytes
    assert bayplan(*options, "--memory", f"{peak_bytes}B").code == 0
    assert bayplan(*options, "--memory", f"{peak_bytes - 1}B").code == 3


@pytest.mark.parametrize("where", [("--device", "h100"), ()], ids=["derived", "measured"])
def test_each_suggested_change_really_fits(bayplan, project, where):
    options = ["check", "train:build", "--batch", 96, "--memory", "3MiB", *where]
    options += ["--no-plan", "--json", "--limit-counts", "live"]
    outcome = bayplan(*options)
    assert outcome.code == 3
    changes = verdict_of(outcome).would_fit
    words = [change.split()[0] for change in changes]
    assert words[0] == "--batch"
    assert words[-1] == "--memory"
    for change in changes:
        name, value = change.split()
        changed = [*options]
        if name in changed:
            changed[changed.index(name) + 1] = value
        else:
            changed += [name, value]
        assert bayplan(*changed).code == 0, change


def test_suggested_batch_is_the_largest_that_fits(bayplan, project):
    options = (
        "check",
        "train:build",
        "--device",
        "h100",
        "--memory",
        "3MiB",
        "--no-plan",
        "--json",
        "--limit-counts",
        "live",
    )
    suggested = verdict_of(bayplan(*options, "--batch", 96)).would_fit[0]
    batch = int(suggested.removeprefix("--batch "))
    assert bayplan(*options, "--batch", batch).code == 0
    assert bayplan(*options, "--batch", batch + 1).code == 3


def test_lighter_optimizer_is_suggested_and_fits(bayplan, project):
    options = ("check", "train:build", "--batch", 1, "--device", "h100", "--json")
    options += ("--limit-counts", "live")
    heavy = verdict_of(bayplan(*options)).plain_peak_bytes
    light = verdict_of(bayplan(*options, "--optimizer", "sgd")).plain_peak_bytes
    assert light < heavy
    outcome = bayplan(*options, "--memory", f"{light}B")
    assert outcome.code == 3
    assert "--optimizer sgd" in verdict_of(outcome).would_fit


def test_suggested_memory_is_enough_and_no_mebibyte_more(bayplan, project):
    options = ("check", "train:build", "--batch", 1, "--device", "h100", "--json")
    options += ("--limit-counts", "live")
    verdict = verdict_of(bayplan(*options, "--memory", "100KiB"))
    suggested = parse_bytes(verdict.would_fit[-1].removeprefix("--memory "))
    assert verdict.plain_peak_bytes <= suggested < verdict.plain_peak_bytes + 2**20


def test_larger_device_is_suggested_where_the_device_is_the_limit(bayplan, add_to_project):
    # 2.5 GiB of parameters, as much of gradients, twice that of state; nothing is allocated.
    add_to_project(
        "def wide(batch_size=1):\n"
        "    return nn.Linear(2**15, 20480), torch.randn(batch_size, 2**15), lambda y: y.sum()\n"
    )
    outcome = bayplan("check", "train:wide", "--device", "rtx-2080-ti", "--no-plan", "--json")
    assert outcome.code == 3
    changes = verdict_of(outcome).would_fit
    device = next(change for change in changes if change.startswith("--device "))
    assert not any(change.startswith("--memory") for change in changes)
    assert bayplan("check", "train:wide", *device.split()).code == 0
    # Where the limit was chosen, another device would not change it.
    limited = bayplan("check", "train:wide", "--device", "h100", "--memory", "1GiB", "--json")
    assert not any("--device" in change for change in verdict_of(limited).would_fit)


def test_machine_without_enough_memory_is_told_how_much_is_needed(bayplan, project, monkeypatch):
    monkeypatch.setattr(Cpu, "free_bytes", 2**18)
    outcome = bayplan("check", "train:build", "--batch", 1)
    assert outcome.code == 3
    assert re.search(rf"a machine with {SIZE} free", outcome.out)
    # It cannot run here, so nothing ran.
    assert "nothing ran" in outcome.out


def test_large_batch_is_measured_at_a_small_one(bayplan, project, monkeypatch):
    monkeypatch.setattr("bayplan.preparing.step._MEASURED_FLOPS", 2e7)
    verdict = verdict_of(bayplan("check", "train:build", "--batch", 32, "--json"))
    assert verdict.time_origin is Origin.SCALED
    text = bayplan("check", "train:build", "--batch", 32).out
    assert "time measured here at another batch size and scaled" in text


NORMALIZED = """\
def normalized(batch_size=8):
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    return model, (torch.randn(batch_size, 64), torch.randint(10, (batch_size,))), \
nn.CrossEntropyLoss()
"""


def test_model_that_refuses_one_sample_still_gets_an_answer(bayplan, add_to_project, monkeypatch):
    """Batch normalization cannot train on a single sample, yet 1 is where both searches start."""
    add_to_project(NORMALIZED)
    monkeypatch.setattr("bayplan.preparing.step._MEASURED_FLOPS", 1.0)
    options = ("--batch", 512, "--memory", "1MiB", "--no-plan", "--json")
    outcome = bayplan("check", "train:normalized", *options)
    assert outcome.code == 3
    verdict = verdict_of(outcome)
    assert verdict.time_origin is Origin.SCALED
    assert re.fullmatch(r"--batch \d+", verdict.would_fit[0])


PICKY = """\
class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, images):
        scores = self.net(images)
        return scores.sum(0, keepdim=True) if len(images) < 4 else scores.mean(0, keepdim=True)


def picky(batch_size=8):
    return Picky(), (make_batch(batch_size)[0], torch.zeros(1, dtype=torch.long)), \
nn.CrossEntropyLoss()
"""


def test_model_that_changes_with_the_batch_is_measured_where_it_is_the_same(
    bayplan, add_to_project, monkeypatch
):
    """Other operators at a small batch cannot price those of the batch asked about."""
    add_to_project(PICKY)
    monkeypatch.setattr("bayplan.preparing.step._MEASURED_FLOPS", 1.0)
    outcome = bayplan("check", "train:picky", "--batch", 16, "--memory", "1GiB", "--json")
    assert outcome.code == 0
    assert verdict_of(outcome).time_origin is Origin.SCALED


KEYWORDS = """\
class Output:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, *, images, labels=None):
        logits = self.net(images)
        return Output(nn.functional.cross_entropy(logits, labels), logits)


def keywords():
    images, labels = make_batch(4)
    return WithLoss(), {"images": images, "labels": labels}, None
"""


def test_dict_batch_and_own_loss_without_a_batch_size(bayplan, add_to_project):
    add_to_project(KEYWORDS)
    verdict = verdict_of(bayplan("check", "train:keywords", "--json"))
    assert verdict.fits
    assert verdict.batch is None
    derived = verdict_of(bayplan("check", "train:keywords", "--device", "a100", "--json"))
    assert derived.fits
    assert ", batch" not in bayplan("check", "train:keywords", "--device", "a100").out


def test_batch_that_a_function_keeps_to_itself_is_never_suggested(bayplan, add_to_project):
    add_to_project(KEYWORDS)
    outcome = bayplan("check", "train:keywords", "--device", "a100", "--memory", "9kB", "--json")
    assert outcome.code == 3
    assert not any(change.startswith("--batch") for change in verdict_of(outcome).would_fit)


def test_autocast_and_optimizer_change_the_answer(bayplan, project):
    def peak_of(*options) -> int:
        arguments = ("check", "train:build", "--batch", 64, "--device", "h100", "--json")
        return verdict_of(bayplan(*arguments, *options)).plain_peak_bytes

    plain = peak_of("--optimizer", "none")
    assert peak_of("--optimizer", "none", "--autocast", "bf16") < plain
    assert peak_of("--optimizer", "sgd") > plain


def test_given_profile_is_used_and_nothing_runs(bayplan, project, monkeypatch):
    path = project / "train.profile.json"
    assert bayplan("profile", "train:build", "-o", path, "--repeats", 1).code == 0
    monkeypatch.setattr("bayplan.preparing.step.profile_step", pytest.fail)
    outcome = bayplan("check", "train:build", "--memory", "1GiB", "--profile", path, "--json")
    assert outcome.code == 0
    assert verdict_of(outcome).time_origin is Origin.MEASURED


def test_derived_profile_is_used_with_its_device(bayplan, project):
    path = project / "h100.profile.json"
    assert bayplan("profile", "train:build", "--device", "h100", "-o", path).code == 0
    assert bayplan("check", "train:build", "--device", "h100", "--profile", path).code == 0


def test_device_file_and_cluster_file_are_asked_about(bayplan, project):
    kinds = {name: msgspec.to_builtins(load_device(name)) for name in ("titan-v", "p100")}
    (project / "mine.json").write_bytes(
        msgspec.json.encode({**kinds["titan-v"], "name": "my-titan"})
    )
    verdict = verdict_of(bayplan("check", "train:build", "--device", "mine.json", "--json"))
    assert verdict.device == "my-titan"
    cluster = {
        "schema": "bayplan/cluster",
        "version": 1,
        "name": "two kinds",
        "kinds": kinds,
        "hosts": [{"name": "a", "memory_bytes": {"value": 2**36, "source": "guess"}}],
        "devices": [{"kind": "p100", "host": 0}, {"kind": "titan-v", "host": 0}],
    }
    (project / "cluster.json").write_bytes(msgspec.json.encode(cluster))
    verdict = verdict_of(bayplan("check", "train:build", "--cluster", "cluster.json", "--json"))
    assert verdict.device == "titan-v"  # 12 GiB, the P100 has 16


def test_progress_goes_to_stderr_of_a_terminal(bayplan, project, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    outcome = bayplan("check", "train:build", "--device", "h100")
    assert FITS.fullmatch(outcome.out.splitlines()[0])
    assert "capturing" in outcome.err


def test_profile_is_kept_between_answers_and_renewed_when_asked(
    bayplan, project, monkeypatch, tmp_path
):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "own cache"))
    command = ("check", "train:build", "--memory", "1GiB", "--json")
    first = verdict_of(bayplan(*command))
    assert verdict_of(bayplan(*command)) == first
    renewed = verdict_of(bayplan(*command, "--again"))
    assert renewed.plain_step_seconds != first.plain_step_seconds
    assert verdict_of(bayplan(*command)) == renewed


def test_step_that_fits_with_a_plan_says_so_and_what_it_costs(bayplan, deep_project):
    options = ("check", "train:deep", "--device", "h100", "--memory", "8MiB", "--time-limit", 1)
    options += ("--limit-counts", "live")
    outcome = bayplan(*options)
    assert outcome.code == 0
    line = outcome.out.splitlines()[0]
    figures = (
        r"planned peak [\d.]+ of 8\.0 MiB at [\d.]+( ± [\d.]+)? x the plain step's time \(.+\);"
        rf" plain peak {SIZE}"
    )
    assert re.fullmatch(f"fits with a plan: {figures}", line)
    verdict = verdict_of(bayplan(*options, "--json"))
    assert (verdict.fits, verdict.plain_fits) == (True, False)
    assert verdict.would_fit == ()
    assert verdict.planned is not None
    assert verdict.planned.peak_bytes <= verdict.limit_bytes < verdict.plain_peak_bytes
    assert verdict.planned.time_ratio >= 1
    assert verdict.planned.num_recomputed + verdict.planned.num_packed > 0
    refused = bayplan(*options, "--no-plan", "--json")
    assert refused.code == 3
    assert verdict_of(refused).planned is None


def test_limit_may_be_a_share_of_the_plain_peak(bayplan, deep_project, check_refusal):
    options = ("check", "train:deep", "--device", "h100", "--time-limit", 1)
    options += ("--limit-counts", "live")
    outcome = bayplan(*options, "--memory", "75%", "--json")
    assert outcome.code == 0
    verdict = verdict_of(outcome)
    assert verdict.limit_bytes == int(0.75 * verdict.plain_peak_bytes)
    assert verdict.planned is not None
    assert verdict.planned.peak_bytes <= verdict.limit_bytes
    check_refusal(bayplan(*options, "--memory", "75%", "--max-batch"), 2, "limit in bytes")


@pytest.mark.parametrize("where", [(), ("--device", "h100")])
def test_all_of_the_plain_peak_is_enough(bayplan, deep_project, where):
    """A limit of 100 % was an odd byte below the peak, and so did not fit."""
    outcome = bayplan("check", "train:deep", *where, "--memory", "100%", "--json")
    assert outcome.code == 0
    assert verdict_of(outcome).plain_fits


def test_precision_and_length_of_a_language_model_are_told(bayplan):
    outcome = bayplan("check", "llama-7b", "--device", "h100", "--no-plan")
    assert "llama-7b, batch 1 (int64[1, 4096], int64[1, 4096]), 6.7 G parameters in bfloat16" in (
        outcome.out
    )


def test_batch_cut_from_a_data_set_counts_alone(bayplan, add_to_project):
    """Of `data[:8]` all of `data` was counted, which only the function that made it had."""
    add_to_project("""
def cut(batch_size=8):
    data = torch.randn(100_000, 16)
    return nn.Linear(16, 4), data[:batch_size], lambda output: output.sum()
""")
    verdict = verdict_of(bayplan("check", "train:cut", "--device", "h100", "--json"))
    assert verdict.peak_by_kind["input"] == 8 * 16 * 4


def test_limit_that_no_plan_reaches_is_told_the_smallest_that_has_one(bayplan, deep_project):
    options = ("check", "train:deep", "--device", "h100", "--time-limit", 1, "--json")
    outcome = bayplan(*options, "--memory", "100KiB")
    assert outcome.code == 3
    *_, planned, plain = verdict_of(outcome).would_fit
    memory = re.fullmatch(r"--memory (\S+) and a plan", planned)
    assert memory is not None
    assert re.fullmatch(r"--memory \S+", plain)
    assert bayplan(*options, "--memory", memory[1]).code == 0
