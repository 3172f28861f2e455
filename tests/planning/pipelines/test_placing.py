"""Plans for many ranks from what a user says, and what is said to wishes that cannot be met."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from bayplan.costing.pricing import samples_to_price
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.links import LinkSpeed, LinkSpeeds
from bayplan.data.placement import Placement
from bayplan.data.plan import Route
from bayplan.models.alexnet import AlexNetOneFlow
from bayplan.models.vgg import VGG16
from bayplan.planning.pipelines import placing
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy
from bayplan.preparing import stages
from bayplan.preparing.stages import PreparedStages
from bayplan.reporting.ranks import pipeline_text
from bayplan.simulating.network import SpeedsNetwork
from bayplan.step import TrainingStep
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.whole_trace import trace_whole

pytestmark = pytest.mark.usefixtures("own_planner_cache")

TWO = "0:0.0:1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 64)
        self.body = nn.Sequential(nn.Tanh(), nn.Linear(64, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, inputs):
        return self.head(self.body(self.stem(inputs)))


def mean_square(output):
    return output.square().mean()


def wishes(placement=TWO, **more):
    return RankPlanOptions(
        placement=Placement.parse(placement), **{"shares_by": SharesBy.OPS, **more}
    )


def place(step, options, *, optimizer=None, **more):
    return placing.place(PreparedStages(step=step, optimizer=optimizer), options, **more)


def step_of(model=None, *, batch=8):
    return TrainingStep(
        model=Net() if model is None else model, batch=torch.randn(batch, 4), loss_fn=mean_square
    )


def first_ops(plan, step):
    """The operators that stages begin with, by name."""
    ops = StagedStep(trace_whole(step, num_samples=2), (0,)).step.program.ops
    return [ops[stage.first].name for stage in plan.stages]


@pytest.fixture(scope="module")
def alexnet():
    """OneFlow's AlexNet with narrow layers, for which operators count the same."""
    model = AlexNetOneFlow(num_classes=4)
    model.fc1, model.fc2 = nn.Linear(6400, 8), nn.Linear(8, 8)
    model.fc3 = nn.Linear(8, 4, bias=False)
    batch = torch.randn(8, 3, 224, 224), torch.randint(4, (8,))
    return TrainingStep(model=model, batch=batch, loss_fn=nn.CrossEntropyLoss())


def test_alexnet_3_to_1_by_operators_is_cut_before_the_second_dropout_as_by_oneflow(alexnet):
    plan = place(alexnet, wishes("0:0-6.0:7", shares=(3, 1)))
    assert first_ops(plan, alexnet) == ["convolution", "native_dropout_1"]


def test_alexnet_15_to_1_by_operators_leaves_only_the_loss_as_by_oneflow(alexnet):
    plan = place(alexnet, wishes("0:0-6.0:7", shares=(15, 1)))
    assert first_ops(plan, alexnet) == ["convolution", "nll_loss_forward"]
    assert all(bucket.stages == (0,) for bucket in plan.buckets)


@pytest.mark.slow
def test_vgg16_11_to_7_by_operators_is_cut_before_the_last_convolution_as_by_oneflow():
    with torch.device("meta"):
        model = VGG16()
        batch = torch.empty(14, 3, 32, 32), torch.empty(14, dtype=torch.long)
    step = TrainingStep(model=model, batch=batch, loss_fn=nn.CrossEntropyLoss())
    plan = place(step, wishes("0:0-6.0:7", shares=(11, 7)))
    assert first_ops(plan, step) == ["convolution", "convolution_12"]


def test_by_parameters_each_stage_has_its_share_of_them():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    step = step_of(model)
    plan = place(step, wishes("0:0.0:1.0:2", shares=(2, 1, 1), shares_by=SharesBy.PARAMETERS))
    assert first_ops(plan, step) == ["addmm", "addmm_4", "addmm_6"]


def test_by_time_every_stage_has_parameters_and_nothing_is_lost():
    plan = place(step_of(), wishes(shares_by=SharesBy.TIME))
    first, second = plan.stages
    assert (first.first, second.first) == (0, first.last + 1)
    names = [name for bucket in plan.buckets for name in bucket.parameters]
    assert sorted(names) == sorted(name for name, _ in Net().named_parameters())


def test_modules_are_cut_at_by_name():
    step = step_of()
    assert first_ops(place(step, wishes(cut_at=("head",))), step) == ["addmm", "addmm_2"]
    three = place(step, wishes("0:0.0:1.0:2", cut_at=("body.1", "head")))
    assert first_ops(three, step) == ["addmm", "addmm_1", "addmm_2"]


def test_a_plan_names_ranks_links_buckets_and_actions():
    plan = place(step_of(), wishes("0:0-2.0:3", num_micro_batches=2, cut_at=("head",)))
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2), (3,)]
    assert plan.links == plan.gradient_links == ((0, 1),)
    assert {bucket.stages for bucket in plan.buckets} == {(0,), (1,)}
    assert len(plan.actions) == 4
    assert plan.actions[0][0] == "0F0"
    assert all(own[-1].endswith("U0") for own in plan.actions)


def test_a_tied_weight_is_in_a_bucket_of_both_stages():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    plan = place(step_of(model), wishes(cut_at=("2",)))
    (tied,) = (bucket for bucket in plan.buckets if bucket.parameters == ("0.weight",))
    assert tied.stages == (0, 1)


def test_micro_batches_go_round_when_asked():
    plan = place(step_of(), wishes("0:0-1.0:2", num_micro_batches=4, route=Route.ROUND_ROBIN))
    assert "0F1" not in plan.actions[0]
    assert "0F1" in plan.actions[1]


def test_without_static_order_more_messages_may_be_on_their_way():
    given = {"num_micro_batches": 8, "cut_at": ("head",)}
    strict, loose = (place(step_of(), wishes(static_order=one, **given)) for one in (True, False))
    assert (strict.static_order, loose.static_order) == (True, False)
    assert strict.actions == loose.actions
    less, more = strict.predicted_peak_bytes, loose.predicted_peak_bytes
    assert less[0] <= more[0]
    assert less[1] < more[1]  # it sends gradients, of which it never hears again
    with pytest.raises(UsageError, match="needs ranks that wait for others; name several"):
        wishes("0:0", static_order=False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shares": (1, 2, 3)}, r"3 shares \(1:2:3\) for 2 stages \(0:0.0:1\); give one for each"),
        ({"cut_at": ("a", "b")}, r"2 modules to cut at for 2 stages .*; name 1"),
        ({"cut_at": ("head",), "shares": (1, 1)}, "two ways to say the same; give one"),
        (
            {"sync_batch_norm": True, "static_order": False},
            "all need the same order; leave out one",
        ),
    ],
)
def test_wishes_that_contradict_are_refused_at_once(more, message):
    with pytest.raises(UsageError, match=message):
        wishes(**more)


@pytest.mark.parametrize(
    ("placement", "more", "message"),
    [
        (TWO, {"shares": (0, 1)}, "shares are 0:1; each must be at least 1"),
        (
            TWO,
            {"cut_at": ("tail",)},
            "module 'tail' to cut at has no operator; .* stem, body, head",
        ),
        (TWO, {"cut_at": ("stem",)}, "module 'stem' to cut at begins no later than the one before"),
        (
            ".".join(f"0:{rank}" for rank in range(9)),
            {},
            "9 stages, but the model can be cut into 7 at most; name fewer stages",
        ),
        (
            TWO,
            {"shares": (99, 1), "shares_by": SharesBy.PARAMETERS},
            r"stage 1 \(.*\) has no parameter to train, so it would only pass values on",
        ),
        (
            "0:0-8",
            {},
            "8 samples in 1 micro-batches leave 8 .* 9 replicas; works with a batch of 9",
        ),
        (TWO, {"num_micro_batches": 9}, "works with a batch of 9, or with 8 micro-batches"),
        (TWO, {"schedule": "gpip"}, "no schedule 'gpip'; did you mean 'gpipe'"),
        (TWO, {"depth": 0}, "depth is 0, must be at least 1"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_what_helps(placement, more, message):
    with pytest.raises(UsageError, match=message):
        place(step_of(), wishes(placement, **more))


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, inputs):
        return self.head(self.body(self.norm(self.stem(inputs))))


def test_synchronised_batch_norm_is_in_the_plan_and_named():
    plan = place(step_of(Normed()), wishes("0:0-1.0:2", cut_at=("head",), sync_batch_norm=True))
    assert plan.sync_batch_norm
    assert plan.synchronised_stages == (0,)
    assert "normalises the batch by the statistics of all replicas" in pipeline_text(plan)


@pytest.mark.parametrize(
    ("model", "placement"),
    [(Net, "0:0-1.0:2"), (Normed, TWO), (lambda: Normed().eval(), "0:0-1.0:2")],
    ids=["no BatchNorm", "no replicas", "frozen"],
)
def test_a_wish_to_synchronise_nothing_is_refused(model, placement):
    with pytest.raises(UsageError, match="--sync-batch-norm has nothing to do"):
        place(step_of(model()), wishes(placement, sync_batch_norm=True))


def test_a_wish_to_synchronise_what_is_never_together_is_refused():
    with pytest.raises(UsageError, match="--sync-batch-norm and --route round-robin"):
        wishes("0:0-1.0:2", route=Route.ROUND_ROBIN, sync_batch_norm=True)


def test_an_order_in_which_replicas_would_wait_for_ever_is_refused_with_one_that_works():
    given = {"num_micro_batches": 2, "cut_at": ("head",), "sync_batch_norm": True}
    message = r"with 1f1b on 0:0-1.0:1-2 that has no end: .* waits for .*--schedule gpipe"
    with pytest.raises(UsageError, match=message):
        place(step_of(Normed()), wishes("0:0-1.0:1-2", **given))
    assert place(step_of(Normed()), wishes("0:0-1.0:1-2", schedule="gpipe", **given))


def test_a_batch_whose_samples_cannot_be_told_is_refused():
    step = TrainingStep(
        model=Net(), batch=(torch.randn(4, 4), torch.randn(3, 2)), loss_fn=nn.MSELoss()
    )
    with pytest.raises(UsageError, match="need one first dimension, got 3, 4"):
        place(step, wishes())


def test_a_stage_of_positions_alone_is_refused():
    class Placed(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 1)

        def forward(self, inputs):
            return super().forward(inputs + self.table(torch.arange(4)).T)

    with pytest.raises(UsageError, match="stage 0 of 2, from arange on, computes nothing"):
        place(step_of(Placed()), wishes(shares=(1, 99)))


LINKS = LinkSpeeds(
    message=LinkSpeed(latency_seconds=1e-4, bytes_per_second=1e9),
    reduce=LinkSpeed(latency_seconds=1e-4, bytes_per_second=1e9),
)


def test_time_is_predicted_where_links_are_known():
    plan = place(
        step_of(), wishes(), optimizer=torch.optim.AdamW, network=lambda: SpeedsNetwork(LINKS)
    )
    assert plan.predicted_seconds >= 3 * 1e-4  # there, back, and the loss
    assert len(plan.predicted_busy) == 2
    assert all(0 < share < 1 for share in plan.predicted_busy)


def test_time_is_not_predicted_where_links_are_unknown():
    plan = place(step_of(), wishes("0:0.1:0"))
    assert (plan.predicted_seconds, plan.predicted_busy) == (0.0, ())


def test_slower_links_take_longer():
    slow = LinkSpeed(latency_seconds=1.0, bytes_per_second=1e9)
    links = LinkSpeeds(message=slow, reduce=LINKS.reduce)
    plan = place(step_of(), wishes(), network=lambda: SpeedsNetwork(links))
    assert 2 < plan.predicted_seconds < 3


@pytest.mark.parametrize("placement", [TWO, "0:0.0:1-2", "0:0.0:1.0:0.0:1"])
def test_the_limit_that_a_refusal_names_has_a_plan_however_short_the_search(placement):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(12)]
    prepared = PreparedStages(step=step_of(nn.Sequential(*layers), batch=4096))
    options = wishes(placement, num_micro_batches=4, limit_bytes=1000, time_limit_seconds=2.0)
    with pytest.raises(DoesNotFit) as refused:
        placing.place(prepared, options)
    named_bytes = refused.value.smallest_bytes
    assert named_bytes
    short = replace(options, limit_bytes=named_bytes, time_limit_seconds=1e-6)
    assert max(placing.place(prepared, short).predicted_peak_bytes) <= named_bytes


def test_a_step_is_traced_once_for_each_number_of_samples(monkeypatch):
    sizes = []

    def counted(step, *, num_samples):
        sizes.append(num_samples)
        return trace_whole(step, num_samples=num_samples)

    monkeypatch.setattr(stages, "trace_whole", counted)
    prepared = PreparedStages(step=step_of())
    options = wishes("0:0-1.0:2", cut_at=("head",), limit_bytes=1 << 40)
    plan = placing.place(prepared, options, network=lambda: SpeedsNetwork(LINKS))
    assert placing.place(prepared, wishes("0:0.0:1-2")).step_fingerprint == plan.step_fingerprint
    assert sorted(sizes) == [4, 8]


def test_long_steps_are_priced_at_fewer_samples():
    nodes = trace_whole(step_of(), num_samples=8).nodes
    assert samples_to_price(nodes, 8) == 8
    wide = TrainingStep(
        model=nn.Linear(4096, 4096).to("meta"),
        batch=torch.empty(2**14, 4096, device="meta"),
        loss_fn=mean_square,
    )
    nodes = trace_whole(wide, num_samples=2**14).nodes  # 8e11 or more
    assert 4 <= samples_to_price(nodes, 2**14) < 2**14
