"""The log: Horovod's columns first, a line for every trial, there as soon as it is written."""

import csv
from contextlib import closing

import pytest

from bayplan.data.errors import FileFault
from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.running.tuning.tuned import TrialLog
from bayplan.running.tuning.tuner import Outcome, Purpose, Trial, Tuner

HOROVOD = (
    "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score"
)
REST = (
    ",search,trial,purpose,algorithm,compression,strip_bytes,steps,seconds,spread,"
    "predicted_seconds,ratio_to_best,is_best"
)
FUSED = ExchangeSettings(
    fusion_threshold_bytes=4 << 20,
    cycle_time_ms=5,
    cache_enabled=True,
    hierarchical_allreduce=True,
    algorithm=Algorithm.HIERARCHICAL,
)


def outcome(setting, purpose=Purpose.COMPARE):
    given = {"search": 0, "number": 7, "num_steps": 6, "num_ignored": 1}
    return Outcome(
        trial=Trial(setting=setting, purpose=purpose, **given),
        steps=5,
        seconds=0.25,
        spread=0.01,
        predicted_seconds=0.2,
        ratio_to_best=1.0,
        is_best=True,
    )


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_first_columns_are_horovods_in_its_units(tmp_path):
    path = tmp_path / "tune.csv"
    with closing(TrialLog(path, reduced_bytes=100_000_000)) as log:
        log.write(outcome(FUSED))
        log.write(outcome(ExchangeSettings(), Purpose.RESULT))
    header, fused, planned = path.read_text().splitlines()
    assert header == HOROVOD + REST
    # 100 MB in 250 ms are 400 MB/s; what is chosen or planned is left empty.
    assert fused == "1,0,1,5,4,400,0,7,compare,hierarchical,none,1048576,5,0.25,0.01,0.2,1,1"
    assert planned == ",0,0,0,,400,0,,result,auto,none,1048576,5,0.25,0.01,0.2,1,1"
    assert [row["purpose"] for row in rows_of(path)] == ["compare", "result"]


def test_a_line_is_there_before_the_file_is_closed(tmp_path):
    path = tmp_path / "new" / "tune.csv"
    with closing(TrialLog(path, reduced_bytes=1)) as log:
        assert path.read_text().count("\n") == 1
        log.write(outcome(FUSED))
        assert path.read_text().count("\n") == 2


def test_a_search_is_told_trial_by_trial_and_ends_with_its_best(tmp_path):
    path = tmp_path / "tune.csv"
    candidates = [ExchangeSettings(fusion_threshold_bytes=size << 20) for size in (1, 8, 64)]

    def seconds(setting):
        return 0.1 + 1e-9 * (setting.fusion_threshold_bytes or 1 << 24)

    with closing(TrialLog(path, reduced_bytes=25_000_000)) as log:
        tuner = Tuner(candidates, seconds, on_outcome=log.write)
        num_trials = 0
        while not tuner.is_finished:
            trial = tuner.ask()
            tuner.tell([seconds(trial.setting) for _ in range(trial.num_steps)])
            num_trials += 1
            assert len(rows_of(path)) >= num_trials
    rows = rows_of(path)
    assert [row["trial"] for row in rows] == [*map(str, range(num_trials)), ""]
    assert rows[-1]["purpose"] == "result"
    assert rows[-1]["tensor_fusion_threshold"] == "1"
    assert float(rows[-1]["score"]) == max(float(row["score"]) for row in rows)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileFault, match=f"cannot write {tmp_path}: Is a directory"):
        TrialLog(tmp_path, reduced_bytes=1)
