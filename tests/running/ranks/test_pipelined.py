"""`bayplan.bind` before any rank runs; `whole_runs` trains with it."""

import json

import msgspec
import pytest
import torch
from torch import distributed, nn

import bayplan
from bayplan.data import files
from bayplan.data.errors import ExitCode, FileFault, ForeignPlan, UsageError
from bayplan.data.placement import Placement
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.simulating.checking import check_rank_plan
from bayplan.step import TrainingStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    batch = torch.randn(6, 8, dtype=torch.float64), torch.randint(4, (6,))
    return TrainingStep(model=model, batch=batch, loss_fn=nn.CrossEntropyLoss())


def plan_for(step, placement, **wishes):
    given = RankPlanOptions(placement=Placement.parse(placement), shares_by=SharesBy.OPS, **wishes)
    return place(PreparedStages(step=step), given)


def optimizer_of(step):
    return torch.optim.SGD(step.model.parameters(), lr=0.1)


def test_bind_needs_a_process_group(step):
    with pytest.raises(UsageError, match="torchrun"):
        bayplan.bind(step.model, optimizer_of(step), plan_for(step, "0:0"))


def test_bind_needs_a_plan(step, alone, monkeypatch):
    monkeypatch.delenv("BAYPLAN_PLAN", raising=False)
    with pytest.raises(UsageError, match="BAYPLAN_PLAN"):
        bayplan.bind(step.model, optimizer_of(step))


def test_bind_refuses_another_number_of_ranks(step, alone):
    with pytest.raises(UsageError, match="for 2 ranks, here are 1"):
        bayplan.bind(step.model, optimizer_of(step), plan_for(step, "0:0.0:1"))


def test_bind_refuses_a_plan_of_another_torch_before_all_else(step, alone):
    plan = msgspec.structs.replace(plan_for(step, "0:0.0:1"), torch_version="1.0")
    with pytest.raises(ForeignPlan, match=r"for torch 1\.0, here is") as caught:
        bayplan.bind(step.model, optimizer_of(step), plan)
    assert caught.value.exit_code == ExitCode.FOREIGN_PLAN


def test_a_file_that_is_no_plan_is_refused(step, alone, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(FileFault):
        bayplan.bind(step.model, optimizer_of(step), path)


def test_nonsense_in_the_timeout_is_refused(step, alone, monkeypatch):
    monkeypatch.setenv("BAYPLAN_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="'soon'"):
        bayplan.bind(step.model, optimizer_of(step), plan_for(step, "0:0"))


@pytest.mark.parametrize("placement", ["0:0", "0:0.0:0", "0:0.0:0.0:0"])
def test_stages_on_one_rank_train_as_plain_training(step, alone, placement, tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    files.write(plan, plan_for(step, placement, num_micro_batches=2))
    monkeypatch.setenv("BAYPLAN_PLAN", str(plan))
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    plain.load_state_dict(step.model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = TrainingStep(
        model=plain, batch=step.batch, loss_fn=step.loss_fn, optimizer=optimizer
    )
    bound = bayplan.bind(step.model, optimizer_of(step), loss_fn=step.loss_fn)
    for _ in range(3):
        assert float(bound(*step.batch)) == pytest.approx(float(expected()), abs=1e-12)
    bound.close()
    for mine, theirs in zip(step.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_changed_batch_size_is_traced_anew(step, alone):
    bound = bayplan.bind(
        step.model, optimizer_of(step), plan_for(step, "0:0.0:0"), loss_fn=step.loss_fn
    )
    inputs, targets = step.batch
    losses = [float(bound(inputs, targets)), float(bound(inputs[:4], targets[:4]))]
    losses.append(float(bound(inputs, targets)))
    bound.close()
    assert losses[2] < losses[0]


def test_a_plan_of_another_model_is_refused(step, alone):
    other = TrainingStep(
        model=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double(),
        batch=step.batch,
        loss_fn=step.loss_fn,
    )
    bound = bayplan.bind(
        step.model, optimizer_of(step), plan_for(other, "0:0.0:0"), loss_fn=step.loss_fn
    )
    with pytest.raises(bayplan.BayplanError, match="plan this model anew"):
        bound(*step.batch)


def test_without_static_order_a_transport_without_tags_is_refused(step):
    plan = plan_for(step, "0:0.0:1", num_micro_batches=2, static_order=False)
    with pytest.raises(UsageError, match=r"needs tags .*; use gloo, or plan with static order"):
        check_rank_plan(plan, has_tags=False)


DEFAULT_GROUP = """
import json
import torch
from torch import distributed, nn
import bayplan
from bayplan.running.collectives.groups import backend_of

torch.set_num_threads(1)
distributed.init_process_group()
torch.manual_seed(0)
batch = torch.randn(6, 8, dtype=torch.float64), torch.randint(4, (6,))

def bound(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return bayplan.bind(model, optimizer, folder / name, loss_fn=nn.CrossEntropyLoss())

found = {"backend": backend_of(torch.device("cpu"))}
loose, shared = bound("a.json"), bound("b.json")
found["losses"] = [loose(*batch).item(), shared(*batch).item()]  # the first one needs tags
found["shares"] = shared.shared_bytes > 0
(folder / f"{rank}.json").write_text(json.dumps(found))
for step in (loose, shared):
    step.close()
distributed.destroy_process_group()
"""


def test_a_group_without_a_named_backend_has_tags_and_shared_memory_as_gloo(step, job):
    loose = plan_for(step, "0:0.0:1", num_micro_batches=2, static_order=False)
    files.write(job.folder / "a.json", loose)
    files.write(job.folder / "b.json", plan_for(step, "0:0-1"))
    assert job.run(DEFAULT_GROUP) == 0, job.lines
    first, second = (json.loads((job.folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert (first["backend"], first["shares"]) == ("gloo", True)
