"""Measuring a step: every node gets its time and workspace, and nothing of the user's changes.

Times come from a clock of our own where figures are compared; the real clock only where its sign
matters.
"""

import copy

import msgspec
import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing import measure
from bayplan.costing.measure import measure_profile
from bayplan.data.errors import CaptureError, UsageError
from bayplan.data.graph import Node, Phase
from bayplan.data.profile import Clock, Origin
from bayplan.devices.device import HOST
from bayplan.devices.meters import open_meter
from bayplan.step import TrainingStep

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(cache))


class Ticking:
    """A clock that moves only when it is told to, and by one second per reading."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


@pytest.fixture
def ticking(monkeypatch):
    clock = Ticking()
    monkeypatch.setattr(measure, "clock_function", lambda kind, device: clock)
    return clock


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        hidden = torch.relu(self.norm(self.conv(images)))
        return self.head(self.drop(hidden.mean((2, 3))))


def loss_of(output):
    return output.square().mean()


def make_step(model=None, *, optimizer=torch.optim.AdamW):
    model = Net() if model is None else model
    built = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
    return TrainingStep(
        model=model, batch=torch.randn(2, 3, 8, 8), loss_fn=loss_of, optimizer=built
    )


def profile_of(step, cache, *, repeats=1, graph=None, on_progress=lambda done, total: None):
    if graph is None:
        graph = bayplan.capture(step.model, step.batch, step.loss_fn, optimizer=step.optimizer)
    with open_meter(CPU, cache) as meter:
        found = measure_profile(
            step,
            graph,
            meter=meter,
            device=CPU,
            repeats=repeats,
            granularity_bytes=HOST.granularity_bytes,
            on_progress=on_progress,
        )
    return graph, found


def test_every_node_has_its_figures(cache):
    graph, profile = profile_of(make_step(), cache, repeats=2)
    assert len(profile.seconds) == len(graph.nodes)
    assert len(profile.workspace_bytes) == len(profile.spread_seconds) == len(graph.nodes)
    profile.check_belongs_to(graph)
    assert sum(profile.seconds) > 0
    assert (profile.origin, profile.repeats, profile.clock) == (Origin.MEASURED, 2, Clock.WALL)
    assert profile.threads == torch.get_num_threads()
    assert profile.device == "cpu"


def test_operators_are_scaled_down_to_the_plain_step(cache, ticking):
    """Each watched operator takes a tick, the whole plain step one: watching costs something."""
    graph, profile = profile_of(make_step(), cache)
    assert profile.step_seconds == pytest.approx(1.0)
    assert profile.seconds == pytest.approx([1 / len(graph.nodes)] * len(graph.nodes))
    assert profile.overhead_seconds == 0.0


def test_time_outside_the_operators_is_overhead(cache, ticking):
    class Slow(Net):
        def forward(self, images):
            ticking.seconds += 500.0
            return super().forward(images)

    graph, profile = profile_of(make_step(Slow()), cache)
    # A plain step takes one tick and the 500 s of Python; its operators a tick each.
    assert profile.seconds == pytest.approx([1.0] * len(graph.nodes))
    assert profile.overhead_seconds == pytest.approx(501.0 - len(graph.nodes))
    assert profile.step_seconds == pytest.approx(501.0)


def test_fastest_repeat_counts_and_the_median_gives_the_spread(cache, ticking):
    class Uneven(Net):
        steps = 0

        def forward(self, images):
            Uneven.steps += 1
            # Captures are steps 1 and 2, the warm-up 3, then plain and watched take turns.
            ticking.seconds += {4: 900.0, 6: 100.0, 8: 500.0}.get(Uneven.steps, 0.0)
            return super().forward(images)

    _, profile = profile_of(make_step(Uneven()), cache, repeats=3)
    assert profile.step_seconds == pytest.approx(101.0)
    assert profile.step_spread_seconds == pytest.approx(400.0)
    assert all(spread == 0.0 for spread in profile.spread_seconds)


def test_progress_tells_each_step(cache):
    heard = []
    profile_of(make_step(), cache, repeats=2, on_progress=lambda *done: heard.append(done))
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_workspace_is_what_a_kernel_takes_beyond_its_outputs(cache):
    class Sorts(nn.Linear):
        def forward(self, rows):
            return super().forward(rows).flatten().sort().values

    step = TrainingStep(model=Sorts(64, 64), batch=torch.randn(512, 64), loss_fn=loss_of)
    graph, profile = profile_of(step, cache)
    workspace = {node.op: profile.workspace_bytes[index] for index, node in enumerate(graph.nodes)}
    # Sorting n floats needs room for values and indices once more; adding a bias needs none.
    assert workspace["aten.sort.default"] > 512 * 64 * 4
    assert workspace["aten.view.default"] < 8 * 1024
    assert workspace["aten.mean.default"] < 8 * 1024


def test_gradients_are_summed_as_plain_training_does(cache):
    """Two uses of one tensor: autograd adds in place, unless a dispatch mode watches it."""

    class Twice(nn.Linear):
        def forward(self, rows):
            hidden = super().forward(rows)
            return hidden.sin() + hidden.cos()

    step = TrainingStep(model=Twice(64, 64), batch=torch.randn(256, 64), loss_fn=loss_of)
    graph, profile = profile_of(step, cache)
    index = next(i for i, node in enumerate(graph.nodes) if node.op == "aten.add_.Tensor")
    assert profile.workspace_bytes[index] < 256 * 64 * 4


def test_forward_that_changes_between_steps_is_refused_with_the_place(cache):
    class Moody(Net):
        steps = 0

        def forward(self, images):
            Moody.steps += 1
            return super().forward(images * 2 if Moody.steps > 3 else images)

    with pytest.raises(CaptureError, match=r"ran aten.mul.Tensor at node 0.*aten.convolution"):
        profile_of(make_step(Moody()), cache)


def test_step_of_another_length_is_refused(cache):
    step = make_step(optimizer=None)
    graph = bayplan.capture(step.model, step.batch, loss_of)
    more = msgspec.structs.replace(
        graph, nodes=(*graph.nodes, Node(op="aten.x", phase=Phase.UPDATE))
    )
    with pytest.raises(CaptureError, match=rf"ended at node {len(graph.nodes)}, .* run aten\.x;"):
        profile_of(step, cache, graph=more)
    with pytest.raises(CaptureError, match=r"at node .* run aten\.detach"):
        profile_of(make_step(step.model), cache, graph=graph)


def snapshot_of(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_profiling_leaves_model_optimizer_gradients_and_generator_alone():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(2, 3, 8, 8)
    loss_of(model(inputs)).backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    before = snapshot_of(model, optimizer)
    kept_inputs = inputs.clone()
    generator = torch.get_rng_state()

    profile = bayplan.profile(model, inputs, loss_of, optimizer=optimizer, repeats=1)

    assert profile.step_seconds > 0
    assert equal(snapshot_of(model, optimizer), before)
    assert all(
        parameter.grad is gradient
        for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    )
    assert equal([g for g in gradients if g is not None], values)
    assert torch.equal(inputs, kept_inputs)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training


def test_optimizer_may_be_a_function_of_the_parameters():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    profile = bayplan.profile(
        model, torch.randn(2, 3, 8, 8), loss_of, optimizer=torch.optim.Adagrad, repeats=1
    )
    graph = bayplan.capture(model, torch.randn(2, 3, 8, 8), loss_of, optimizer=torch.optim.Adagrad)
    profile.check_belongs_to(graph)
    assert equal(model.state_dict(), before)


def test_cpu_clock_asks_for_one_thread():
    num_threads = torch.get_num_threads()
    arguments = (nn.Linear(4, 4), torch.ones(2, 4), loss_of)
    try:
        torch.set_num_threads(2)
        with pytest.raises(UsageError, match="torch uses 2"):
            bayplan.profile(*arguments, clock="cpu", again=True)
        torch.set_num_threads(1)
        profile = bayplan.profile(*arguments, clock="cpu", repeats=1, again=True)
    finally:
        torch.set_num_threads(num_threads)
    assert (profile.clock, profile.threads) == (Clock.CPU, 1)


def test_no_repeats_is_refused():
    with pytest.raises(UsageError, match="repeats is 0"):
        bayplan.profile(nn.Linear(4, 4), torch.ones(2, 4), loss_of, repeats=0)


def test_clocks_go_forward():
    for kind in Clock:
        now = measure.clock_function(kind, CPU)
        assert now() <= now()
