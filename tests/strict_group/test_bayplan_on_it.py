"""What of bayplan runs on the strict group: ranks that are tuned, and a plan that needs tags.

Ranks are processes that have the test accelerator registered (`own_process.py`).
"""

from itertools import count

import pytest
import torch
from strict import late_messages, ranks
from torch import distributed, nn

import bayplan
from bayplan.data.errors import UsageError
from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.data.placement import Placement
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.prepared_stages import PreparedStages
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


@pytest.mark.ranks(2)
def test_a_plan_that_needs_tags_is_refused_before_anything_is_sent():
    with ranks():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to("bay")
        batch = torch.randn(6, 8).to("bay"), torch.randint(4, (6,)).to("bay")
        step = TrainingStep(model=model, batch=batch, loss_fn=nn.CrossEntropyLoss())
        options = RankPlanOptions(
            placement=Placement.parse("0:0.0:1"),
            shares_by=SharesBy.OPS,
            num_micro_batches=2,
            static_order=False,
        )
        plan = place(PreparedStages(step=step), options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bound = bayplan.bind(model, optimizer, plan, loss_fn=step.loss_fn)
        with pytest.raises(UsageError, match=r"needs tags .*; use gloo, or plan with static order"):
            bound(*batch)
        bound.close()
