"""Real ranks that are tuned: all switch at the same step, and all are told of a failure."""

import json
from types import SimpleNamespace

import pytest

from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.running.ranks.launching import launch
from bayplan.running.tuning import tuned

NUM_RANKS = 2
TIMEOUT_SECONDS = 100.0
SCRIPT = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from bayplan.data.errors import UsageError
from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.running.tuning.search import TuningOptions
from bayplan.running.tuning.tuned import TunedRun
from bayplan.running.tuning.tuner import Tuner

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
names = (Algorithm.RING, Algorithm.SHARED, Algorithm.HIERARCHICAL)
CANDIDATES = [ExchangeSettings(algorithm=name) for name in names]
SECONDS = dict(zip(CANDIDATES, (0.03, 0.01, 0.05)))
found = {}
now = [0.0]

def tuner(predict=lambda setting: 1.0, **options):
    return Tuner(CANDIDATES, predict, TuningOptions(**options)) if rank == 0 else None

def train(run, num_steps):
    used = []
    for _ in range(num_steps):
        with run.step() as setting:
            used.append(str(setting))
            # Only the rank that does not decide sees which setting is slow.
            now[0] += SECONDS[setting] if rank == 1 else 0.001
            # Ranks that sum with different settings would get another sum.
            total = torch.tensor([float(CANDIDATES.index(setting))])
            dist.all_reduce(total)
            assert total.item() == dist.get_world_size() * CANDIDATES.index(setting)
    return used

applied, machine_clock = [], TunedRun._now
own = tuner()
TunedRun._now = lambda run: now[0]
run = TunedRun(own, lambda setting: applied.append(str(setting)))
found["used"] = train(run, 120)
found["applied"] = applied
found["is_tuning"] = run.is_tuning
found["verdict"] = own.verdict if rank == 0 else ""

watched = TunedRun(tuner(is_watching=True, watched_steps=5), print)
found["watched"] = train(watched, 150)

class Failing(Tuner):
    def tell(self, seconds):
        raise UsageError("no such step")

failing = Failing(CANDIDATES, lambda setting: 1.0) if rank == 0 else None
try:
    TunedRun._now = machine_clock
    train(TunedRun(failing, print), 50)
except UsageError as fault:
    found["failure"] = str(fault)

for name, given in {"two": Tuner(CANDIDATES, lambda setting: 1.0), "none": None}.items():
    try:
        TunedRun(given, print)
    except UsageError as fault:
        found[name] = str(fault)

(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.alone  # it times steps
def test_all_ranks_switch_at_the_same_step_and_keep_what_the_slowest_found_fastest(tmp_path):
    script, lines = tmp_path / "script.py", []
    script.write_text(SCRIPT)
    code = launch(
        [str(script), str(tmp_path)],
        num_ranks=NUM_RANKS,
        log_folder=tmp_path / "logs",
        timeout_seconds=TIMEOUT_SECONDS,
        on_line=lines.append,
    )
    assert code == 0, lines
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)
    )
    for name in ("used", "applied", "is_tuning", "watched", "failure", "two", "none"):
        assert first[name] == second[name]
    assert set(first["used"]) == {"algorithm=ring", "algorithm=shared", "algorithm=hierarchical"}
    assert first["used"][-1] == "algorithm=shared"
    assert first["applied"][-1] == "algorithm=shared"
    assert first["is_tuning"] is False
    assert first["verdict"].startswith("algorithm=shared is best")
    assert first["failure"] == "tuning failed on rank 0: UsageError: no such step"
    assert first["two"] == "rank 0 alone must have the tuner, but ranks 0, 1 have one"
    assert first["none"] == "rank 0 alone must have the tuner, but no rank has one"


@pytest.mark.parametrize(("ways", "num_candidates"), [(["ring"], 11), (["ring", "shared"], 13)])
def test_candidates_are_planned_buckets_fixed_sizes_and_what_algorithms_there_are(
    ways, num_candidates
):
    exchange = SimpleNamespace(costs=SimpleNamespace(seconds_of=dict.fromkeys(ways)))
    candidates = tuned._candidates(exchange)
    assert len(set(candidates)) == num_candidates
    assert candidates[0] == ExchangeSettings()
    assert candidates[1].fusion_threshold_bytes == 256 << 10
    assert candidates[10].fusion_threshold_bytes == 128 << 20
    algorithms = {candidate.algorithm for candidate in candidates[11:]}
    assert algorithms <= {Algorithm.RING, Algorithm.REDUCE_SCATTER}
