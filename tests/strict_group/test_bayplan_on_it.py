"""What bayplan does on the strict group beside training: checks, times, states, lost ranks.

Ranks are processes that have the test accelerator registered (`own_process.py`).
"""

import os
import time
from itertools import count
from pathlib import Path

import bay
import pytest
import torch
from bay import slow
from strict import late_messages, ranks, register_strict
from torch import distributed, nn

import bayplan
from bayplan.data import files
from bayplan.data.errors import UsageError
from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.data.links import LinkSpeeds
from bayplan.data.placement import Placement
from bayplan.data.record import Lane
from bayplan.devices.device import device_of
from bayplan.devices.moments import moment
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.running.ranks import link_speeds
from bayplan.running.ranks.launching import launch
from bayplan.running.tuning.tuned import TunedRun
from bayplan.running.tuning.tuner import Tuner
from bayplan.step import TrainingStep

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well

CANDIDATES = [
    ExchangeSettings(algorithm=algorithm) for algorithm in (Algorithm.RING, Algorithm.SHARED)
]


@pytest.mark.ranks(2)
def test_ranks_are_tuned_alike_while_their_steps_are_late():
    with ranks() as (rank, _):
        is_first, seconds = rank == 0, count()
        tuner = Tuner(CANDIDATES, lambda setting: 1.0) if is_first else None
        run = TunedRun(tuner, lambda setting: None, device=torch.device("bay", 0))
        run._now = lambda: float(next(seconds))  # every step takes as long
        with late_messages(0.001):
            for _ in range(40):
                with run.step() as setting:
                    place = CANDIDATES.index(setting)
                    total = torch.full((1,), float(place), device="bay")
                    distributed.all_reduce(total)
                    assert total.item() == 2 * place  # both had the same setting
        assert not run.is_tuning


def build(num_samples=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to("bay")
    batch = torch.randn(num_samples, 8).to("bay"), torch.randint(4, (num_samples,)).to("bay")
    return TrainingStep(model=model, batch=batch, loss_fn=nn.CrossEntropyLoss())


def bound_to(step, **wishes):
    options = {"placement": Placement.parse("0:0.0:1"), "shares_by": SharesBy.OPS, **wishes}
    plan = place(PreparedStages(step=step), RankPlanOptions(**options))
    optimizer = torch.optim.SGD(step.model.parameters(), lr=0.1)
    return bayplan.bind(step.model, optimizer, plan, loss_fn=step.loss_fn)


@pytest.mark.ranks(2)
def test_a_plan_that_needs_tags_is_refused_before_anything_is_sent():
    with (
        ranks(),
        pytest.raises(UsageError, match=r"needs tags .*; use gloo, or plan with static order"),
    ):
        bound_to(build(), num_micro_batches=2, static_order=False)


@pytest.mark.ranks(2)
def test_another_batch_on_one_rank_is_found_a_step_later():
    with ranks() as (rank, _), late_messages(0.002):
        step = build()
        bound, (inputs, targets) = bound_to(step), step.batch
        bound(inputs, targets)
        inputs = inputs.clone()
        inputs[-1, -1] += float(rank)
        bound(inputs, targets)
        with pytest.raises(UsageError, match=r"rank 1 was given another batch than rank 0: its"):
            bound(inputs, targets)


@pytest.mark.ranks(2)
def test_another_size_of_batch_opens_what_it_needs_and_states_are_whole():
    with ranks(), late_messages(0.002):
        step = build()
        bound = bound_to(step, num_micro_batches=2)
        alone = build()
        optimizer = torch.optim.SGD(alone.model.parameters(), lr=0.1)
        for num_samples in (6, 4, 6):
            batch = build(num_samples).batch
            loss = bound(*batch)
            optimizer.zero_grad()
            wanted = alone.loss_fn(alone.model(batch[0]), batch[1])
            wanted.backward()
            optimizer.step()
            torch.testing.assert_close(loss.float(), wanted.detach())
        for found, one in zip(
            step.model.state_dict().values(), alone.model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(found, one)
        bound.close()


@pytest.mark.ranks(2)
def test_a_rank_records_when_its_device_did_what():
    late_seconds = 0.05
    with ranks():
        step = build()
        bound = bound_to(step)
        bound(*step.batch)
        with late_messages(late_seconds):
            bound(*step.batch)
            events = bound.journal.events()
        (received,) = (event for event in events if event.lane is Lane.RECEIVE)
        assert received.seconds >= late_seconds
        bound.flush()
        bound.close()


@pytest.mark.ranks(2)
def test_links_are_measured_by_the_device(tmp_path):
    late_seconds, path = 0.01, Path(tmp_path) / "speeds.json"
    register_strict()
    with late_messages(late_seconds):
        link_speeds.main(path, "bay")
    torch.accelerator.set_device_index(0)
    if os.environ["RANK"] != "0":
        return
    speeds = files.read(path, LinkSpeeds)
    assert late_seconds <= speeds.message.latency_seconds
    assert late_seconds <= speeds.reduce.latency_seconds
    assert speeds.message.cores == speeds.reduce.cores == 0


def test_moments_are_those_of_the_device_on_the_clock_of_the_host():
    device = torch.device("bay", 0)
    number = torch.ones(4, device=device)
    with slow(kernel_seconds=0.05):
        begun_seconds, begin = time.perf_counter(), moment(device)
        number + 1
        end = moment(device)
        assert float(end) - float(begin) >= 0.05
        # The host hears late of what it compares with, so moments may be late, and never early.
        assert begun_seconds + 0.05 <= float(end)
        number + 1
        assert device_of(device).now() >= begun_seconds + 0.1  # two kernels


LOSING = """
import os, signal, sys
sys.path[:0] = [{accelerator!r}, {here!r}]
import bay
bay.register({library!r})
import torch
from strict import register_strict
from torch import distributed
import test_bayplan_on_it as tests

register_strict()
distributed.init_process_group("strict")
step = tests.build()
bound = tests.bound_to(step)
for number in range(5):
    if number == 2 and distributed.get_rank() == 1:
        if {way!r} == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if {way!r} == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        bound.journal.listener = type("Bad", (), dict(began=lambda self, _: 1 / 0))()
    bound(*step.batch).item()
"""


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raise", "failed at [step 2, stage 1, 1RECV_F0]: ZeroDivisionError"),
        pytest.param("kill", "died", marks=pytest.mark.slow),
        pytest.param("stop", "fell silent", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_ends_all_with_one_message(way, words, tmp_path):
    here = Path(__file__).parent
    script = Path(tmp_path) / "losing.py"
    accelerator, library = str(here.parent / "accelerator"), bay._library._name
    script.write_text(
        LOSING.format(way=way, here=str(here), accelerator=accelerator, library=library)
    )
    lines: list[str] = []
    code = launch(
        [str(script)],
        num_ranks=2,
        log_folder=Path(tmp_path) / "logs",
        timeout_seconds=400.0,  # a fresh cache compiles first, on a busy machine for minutes
        on_line=lines.append,
        environment={"BAYPLAN_TIMEOUT": "10"},
    )
    assert code
    told = [line for line in lines if line.startswith("bayplan: ")]
    assert len(told) == 1, lines
    assert "rank 1" in told[0], told
    assert words in told[0], told
