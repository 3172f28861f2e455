"""Forwards that are not one graph are planned in pieces: the numbers and the limit hold."""

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bayplan
from bayplan import torch_compat
from bayplan.data.errors import BayplanError, CaptureError, DoesNotFit
from bayplan.devices.meters import open_meter, resident_tensor_bytes
from bayplan.preparing.sources import prepare
from bayplan.running.fitted import fitting_of
from bayplan.running.piece_backend import Unplanned
from bayplan.tracing.piece_gradients import GradientWatch

WIDTH, SAMPLES = 64, 1024


def say(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x


def branch(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5 if x.mean() > -100 else x


def check(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return x


def scale(x: torch.Tensor) -> torch.Tensor:
    (size,) = x.detach().abs().mean()[None].tolist()
    return x / size


def choose(x: torch.Tensor) -> torch.Tensor:
    is_chosen = x.mean(1) > x.mean()
    return x.index_add(0, is_chosen.nonzero()[:, 0], x[is_chosen])


@torch.compiler.disable
def outside(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x).tanh()


BREAKS = {each.__name__: each for each in (say, branch, check, scale, choose, outside)}


def block(depth: int = 4) -> nn.Module:
    layers = ((nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))
    return nn.Sequential(*(layer for three in layers for layer in three))


class Broken(nn.Module):
    """Blocks with a break between each two, written out, so that torch goes on after each."""

    def __init__(self, num_breaks: int, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(num_breaks + 1)])
        self.norm, self.cut = nn.BatchNorm1d(WIDTH), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks[0](x))
        x = self.blocks[1](self.cut(x))
        if len(self.blocks) > 2:
            x = self.blocks[2](self.cut(x)) + x
        if len(self.blocks) > 3:
            x = self.blocks[3](self.cut(x))
        if len(self.blocks) > 4:
            x = self.blocks[4](self.cut(x)) + x
        return x


class Looping(Broken):
    """The same in a loop, whose frame torch does not compile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = self.cut(each(x))
        return self.norm(x)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Loop:
    """An ordinary training loop."""

    def __init__(self, model: nn.Module, batch: Any, loss_of: Callable[[Any], Any]) -> None:
        self.model, self.batch, self.loss_of = model, batch, loss_of
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        batch = self.batch
        loss = self.loss_of(self.model(**batch) if isinstance(batch, dict) else self.model(batch))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def trained(self, num_steps: int = 3) -> list[torch.Tensor]:
        """All that steps leave behind, and the state of the random numbers."""
        torch.manual_seed(5)
        results = [self.step() for _ in range(num_steps)]
        results += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        results += [each.clone() for each in self.model.state_dict().values()]
        return [*results, torch.get_rng_state()]

    def own_bytes(self) -> int:
        held = [self.model.state_dict(), self.batch, list(self.optimizer.state.values())]
        storages = [each.untyped_storage() for each in torch_compat.tensors_in(held)]
        return sum({torch_compat.storage_key(each): each.nbytes() for each in storages}.values())

    def peak_bytes(self, cache: Any) -> int:
        self.step()
        self.optimizer.zero_grad()
        gc.collect()
        with open_meter(torch.device("cpu"), cache) as meter:
            meter.reset_peak()
            before_bytes = meter.live_bytes
            self.step()
            return self.own_bytes() + meter.peak_bytes - before_bytes


def assert_as_planned(
    model: nn.Module, batch: Any, loss_fn: Any, memory: str | int, cache: Any
) -> None:
    """The same numbers as plain training, within the limit."""
    loss_of = loss_fn or (lambda output: output.loss)
    plain, fitted = Loop(copy.deepcopy(model), batch, loss_of), Loop(model, batch, loss_of)
    plain_bytes = prepare(model, batch, loss_fn, optimizer=fitted.optimizer).plain_peak_bytes
    limit_bytes = memory if isinstance(memory, int) else int(float(memory[:-1]) / 100 * plain_bytes)
    with pytest.warns(UserWarning, match="is not one graph"):
        bayplan.fit(
            model,
            batch,
            loss_fn,
            memory=limit_bytes,
            optimizer=fitted.optimizer,
            time_limit_seconds=1,
        )
    expected, results = plain.trained(), fitted.trained()
    assert len(expected) == len(results)
    assert all(map(torch.equal, expected, results))
    # A step that is planned anew, for larger sizes than before, takes what planning takes.
    assert min(fitted.peak_bytes(cache) for _ in range(3)) <= limit_bytes


CASES = [("say", 1, "100%"), ("branch", 2, "70%")]
MORE = [
    *(("choose", 1, "70%"), ("choose", 3, "80%"), ("scale", 2, "70%"), ("scale", 4, "100%")),
    *(("outside", 1, "60%"), ("outside", 4, "60%"), ("check", 3, "70%"), ("say", 3, "60%")),
]


@pytest.mark.parametrize(
    ("name", "num_breaks", "memory"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_broken_forward_is_planned_within_one_limit(planner_cache, name, num_breaks, memory):
    torch.manual_seed(0)
    model, batch = Broken(num_breaks, BREAKS[name]), torch.rand(SAMPLES, WIDTH)
    assert_as_planned(model, batch, mean, memory, planner_cache)


def test_planning_pieces_leaves_no_activation_behind():
    # Pieces held the tensors that they were traced with, and by these what earlier pieces had saved
    # for a backward that never ran: a step then took so much more than its limit.
    model, batch = Broken(2, branch), torch.rand(SAMPLES, WIDTH)
    before_bytes = resident_tensor_bytes(torch.device("cpu"))
    bayplan.fit(model, batch, mean, memory="80%", time_limit_seconds=0.3)
    left_bytes = resident_tensor_bytes(torch.device("cpu")) - before_bytes
    assert left_bytes < batch.nbytes / 2  # states of generators


@pytest.mark.slow
@pytest.mark.parametrize("name", ["check", "scale", "choose"])
def test_break_in_a_loop(planner_cache, name):
    torch.manual_seed(0)
    model, batch = Looping(2, BREAKS[name]), torch.rand(SAMPLES, WIDTH)
    assert_as_planned(model, batch, mean, "65%", planner_cache)


def test_fullgraph_refuses_a_break():
    with pytest.raises(CaptureError, match="one graph"):
        bayplan.fit(Broken(1, say), torch.rand(8, WIDTH), mean, memory="100%", fullgraph=True)


@pytest.mark.parametrize("cut", [say, branch])
def test_backend_refuses_pieces_by_line(cut):
    torch.compiler.reset()
    model = torch.compile(Broken(1, cut), backend="bayplan", options={"memory": "1GiB"})
    with pytest.raises(Exception, match=r"test_graph_breaks\.py:\d+.*bayplan\.fit"):
        model(torch.rand(8, WIDTH))


class BeginsBroken(nn.Module):
    """Breaks before its first operator, so that torch compiles what follows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return self.layer(x)


def test_backend_refuses_what_follows_a_break():
    torch.compiler.reset()
    model = torch.compile(BeginsBroken(), backend="bayplan", options={"memory": "1GiB"})
    with pytest.raises(Exception, match=r"test_graph_breaks\.py:\d+.*bayplan\.fit"):
        model(torch.rand(8, WIDTH))


class Dropping(nn.Module):
    """Drops blocks at random, so that steps run more or fewer pieces."""

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.blocks, self.draw = nn.ModuleList([block() for _ in range(3)]), draw
        self.scale = nn.Parameter(torch.ones([]))  # so that there is always something to train

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            if self.draw() < 0.5:
                x = each(x)
        return x * self.scale


def fitted_dropping(draw: Callable[[], torch.Tensor], memory: str) -> tuple[Loop, Loop]:
    """Plain and fitted."""
    torch.manual_seed(0)
    model, batch = Dropping(draw), torch.rand(SAMPLES, WIDTH)
    plain, fitted = Loop(copy.deepcopy(model), batch, mean), Loop(model, batch, mean)
    with pytest.warns(UserWarning, match="is not one graph"):
        bayplan.fit(
            model, batch, mean, memory=memory, optimizer=fitted.optimizer, time_limit_seconds=0.5
        )
    return plain, fitted


def test_step_that_keeps_all_blocks_is_the_one_that_is_planned(planner_cache):
    """It was planned as the first draw went, and anew inside the loop, far above the limit."""
    plain, fitted = fitted_dropping(lambda: torch.rand([]), "70%")
    assert all(map(torch.equal, plain.trained(6), fitted.trained(6)))
    peak_bytes = max(fitted.peak_bytes(planner_cache) for _ in range(16))
    fitting = fitting_of(fitted.model)
    assert fitting.pieces is not None
    (plan,) = fitting.pieces.plans
    assert peak_bytes <= fitting.known["limit_bytes"]
    assert peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


@pytest.mark.slow
def test_step_that_runs_more_pieces_is_planned_anew(planner_cache):
    plain, fitted = fitted_dropping(lambda: torch.rand(2)[0], "8MiB")
    assert all(map(torch.equal, plain.trained(6), fitted.trained(6)))


class Leaving(nn.Module):
    """Leaves early at random: the shorter way is no part of the longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.blocks
        x = first(x)
        if torch.rand(1).item() < 0.5:
            return last(x)
        return last(middle(x))


def test_way_that_is_no_part_of_the_fullest_is_planned_when_it_comes(planner_cache):
    torch.manual_seed(0)
    model, batch = Leaving(), torch.rand(SAMPLES, WIDTH)
    plain, fitted = Loop(copy.deepcopy(model), batch, mean), Loop(model, batch, mean)
    with pytest.warns(UserWarning, match="is not one graph"):
        bayplan.fit(
            model, batch, mean, memory="80%", optimizer=fitted.optimizer, time_limit_seconds=0.5
        )
    assert all(map(torch.equal, plain.trained(6), fitted.trained(6)))
    fitting = fitting_of(model)
    assert fitting.pieces is not None
    assert len(fitting.pieces.plans) == 3  # the fullest way, that again for this batch, this way


class Counting(nn.Module):
    """Goes a way of its own at every other step, by a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        self.mean.mul_(0.9).add_(x.mean())
        x = self.blocks[0](x)
        return self.blocks[1](x) if self.steps % 2 == 0 else self.blocks[2](x) * x


def test_way_that_a_buffer_decides(planner_cache):
    """Runs on tensors without memory went on counting, and met pieces that none had watched."""
    torch.manual_seed(0)
    model, batch = Counting(), torch.rand(SAMPLES, WIDTH)
    plain, fitted = Loop(copy.deepcopy(model), batch, mean), Loop(model, batch, mean)
    with pytest.warns(UserWarning, match="is not one graph"):
        bayplan.fit(model, batch, mean, memory="8MiB", time_limit_seconds=0.5)
    assert all(map(torch.equal, plain.trained(4), fitted.trained(4)))


def test_errors_of_the_model_stay_its_own(planner_cache):
    model, batch = Broken(1, check), torch.rand(SAMPLES, WIDTH)
    with pytest.warns(UserWarning, match="test_graph_breaks.py"):
        bayplan.fit(model, batch, mean, memory="100%", time_limit_seconds=0.5)
    with pytest.raises(ValueError, match="not finite") as raised:
        model(batch * float("nan"))
    assert isinstance(raised.value, BayplanError)


@pytest.mark.slow
def test_limit_below_what_pieces_need_is_refused(planner_cache):
    model, batch = Broken(1, say), torch.rand(SAMPLES, WIDTH)
    with pytest.raises(DoesNotFit) as refused:
        bayplan.fit(model, batch, mean, memory="20%", time_limit_seconds=0.5)
    assert refused.value.smallest_bytes
    with pytest.warns(UserWarning, match="is not one graph"):
        bayplan.fit(
            model,
            batch,
            mean,
            memory=refused.value.smallest_bytes,
            time_limit_seconds=0.5,
        )


def test_a_piece_that_was_not_watched_is_refused_by_its_line(monkeypatch) -> None:
    watched = GradientWatch.found

    def fewer(self: GradientWatch) -> Any:
        gradients, written = watched(self)
        gradients.popitem()
        return gradients, written

    monkeypatch.setattr(GradientWatch, "found", fewer)
    model, x = Broken(2, say), torch.randn(64, WIDTH)
    with pytest.raises(CaptureError, match=r"a piece is new, which ends at \S+\.py:\d+") as refusal:
        bayplan.fit(model, x, mean, memory="70%", progress=False)
    assert "train the model as it is" in str(refusal.value)
    assert not isinstance(refusal.value, Unplanned)


def test_a_break_in_a_loop_is_named_by_its_line():
    for _ in range(2):  # the second has a forward that torch has given up already
        model = Looping(1, say)
        with pytest.warns(UserWarning, match="is not one graph"):
            bayplan.fit(model, torch.rand(8, WIDTH), mean, memory="100%", progress=False)
        fitting = fitting_of(model)
        assert fitting.pieces is not None
        (line,) = fitting.pieces.plans[0].breaks
        assert re.match(r".+test_graph_breaks\.py:\d+ \(`print\(end=\"\"\)`\), in a loop", line)
