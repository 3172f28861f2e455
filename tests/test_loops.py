"""The first promise in loops as people write them: the numbers of plain training, bit for bit.

Each loop is run plainly, with a plan that keeps everything and with one that makes everything again
in backward. What it yields (losses, outputs, gradients), the parameters, buffers and gradients of
its models and the random state afterwards are compared.
"""

import copy
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import bayplan
from bayplan.planning.memory.orders import by_strategy
from bayplan.planning.memory.strategies import keep
from bayplan.running.ranks.launching import launch
from bayplan.step import TrainingStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")

Fit = Callable[..., Any]  # fit(model, batch, loss_fn): plans it, or leaves it as it is
Loop = Callable[[Fit], Iterator[Any]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


class Net(nn.Module):
    """Something of everything: batch statistics, random numbers, an operation in place."""

    def __init__(self, num_inputs: int = 12, num_outputs: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(num_inputs, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2)
        )
        self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.body(x))))


def batches(number: int, samples: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(samples, 12), torch.randint(5, (samples,))) for _ in range(number)]


def made(fit: Fit, model: nn.Module | None = None) -> tuple[Any, Any, Any]:
    """A model, fitted; an optimizer; some batches."""
    model, data = model or Net(), batches(4)
    fit(model, data[0], F.cross_entropy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), data


@loop
def gradient_accumulation(fit):
    model, optimizer, data = made(fit)
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(model(x), y) / len(data)
            loss.backward()
            yield loss
        optimizer.step()
        optimizer.zero_grad()
    yield model


@loop
def clipping(fit):
    model, optimizer, data = made(fit)
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        yield clip_grad_norm_(model.parameters(), 0.1)
        clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    yield model


@loop
def several_forwards_before_a_backward(fit):
    model, optimizer, data = made(fit)
    for _ in range(2):
        loss = sum(F.cross_entropy(model(x), y) for x, y in data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield model


@loop
def backwards_in_another_order(fit):
    model, _, data = made(fit)
    losses = [F.cross_entropy(model(x), y) for x, y in data]
    for loss in reversed(losses):
        loss.backward()
    yield from (*losses, model)


@loop
def two_optimizers(fit):
    generator, critic = Net(4, 12), Net(12, 1)
    noise, real = torch.randn(8, 4), torch.randn(8, 12)
    fit(generator, noise, lambda output: output.sum())
    fit(critic, real, lambda output: output.sum())
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    for _ in range(3):
        made_up = generator(torch.randn(8, 4))
        of_critic.zero_grad()
        critic_loss = F.softplus(critic(made_up.detach())).mean() + F.softplus(-critic(real)).mean()
        critic_loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = F.softplus(-critic(made_up)).mean()
        loss.backward()
        of_generator.step()
        yield from (critic_loss, loss)
    yield from (generator, critic)


@loop
def averaged_weights(fit):
    model, optimizer, data = made(fit)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn((x for x, _ in data), average)
    average.eval()
    with torch.no_grad():
        yield average(data[0][0])
    yield from (model, average)


@loop
def copied_model(fit):
    model, optimizer, data = made(fit)
    teacher = copy.deepcopy(model)
    for x, y in data:
        with torch.no_grad():
            target = teacher(x)
        loss = F.cross_entropy(model(x), y) + F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    F.cross_entropy(teacher(x), y).backward()
    yield from (model, teacher)


@loop
def saved_and_loaded(fit):
    model, optimizer, data = made(fit)
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    yield from state["model"].values()
    other, _, _ = made(fit)
    other.load_state_dict(state["model"], assign=True)
    loss = F.cross_entropy(other(x), y)
    loss.backward()
    yield from (loss, other, model)


@loop
def retained_graph(fit):
    model, _, data = made(fit)
    for x, y in data:
        output = model(x)
        F.cross_entropy(output, y).backward(retain_graph=True)
        output.square().mean().backward()
    yield model


@loop
def gradients_by_themselves(fit):
    model, _, data = made(fit)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        yield from torch.autograd.grad(loss, list(model.parameters()))
    yield model


@loop
def gradients_of_inputs(fit):
    model, optimizer, data = made(fit)
    for x, y in data:
        noisy = x.clone().requires_grad_()
        F.cross_entropy(model(noisy), y).backward()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + 0.1 * noisy.grad.sign()), y)
        loss.backward()
        optimizer.step()
        yield from (noisy.grad, loss)
    yield model


class Checkpointed(Net):
    def __init__(self, part: str = "middle", **how: Any) -> None:
        super().__init__()
        self.part, self.how = part, {"use_reentrant": False, **how}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("body", "middle", "head"):
            layer = getattr(self, name)
            if name == self.part:
                x = checkpoint(lambda y, run=layer: F.dropout(run(y), 0.1), x, **self.how)
            else:
                x = layer(x)
        return x


def training(fit: Fit, model: nn.Module) -> Iterator[Any]:
    model, optimizer, data = made(fit, model)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield model


@loop
def checkpoints_inside(fit):
    yield from training(fit, Checkpointed())


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    model = Net()
    parametrize.register_parametrization(model.middle, "weight", Symmetric())
    parametrizations.weight_norm(model.head)
    parametrizations.spectral_norm(model.body[0])
    return model


@loop
def parametrized_weights(fit):
    yield from training(fit, parametrized())


@loop
def parametrized_weights_computed_once(fit):
    model, optimizer, data = made(fit, parametrized())
    for x, y in data:
        with parametrize.cached():
            loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield model


class ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyrefly: ignore
        (x,) = ctx.saved_tensors
        return -ctx.scale * gradient * x.cos(), None


class WithFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(ReversedGradient.apply(self.middle(self.body(x)), 0.5))


@loop
def function_with_its_own_gradient(fit):
    yield from training(fit, WithFunction())


@loop
def frozen_and_thawed(fit):
    model, data = Net(), batches(6)
    model.body.requires_grad_(False)
    fit(model, data[0], F.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(data):
        model.body.requires_grad_(number in (2, 3))
        model.head.requires_grad_(number != 4)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield model


@loop
def evaluation(fit):
    model, optimizer, data = made(fit)
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            yield model(torch.cat([x, x, x]))
        with torch.inference_mode():
            yield model(x[:1]).clone()
        yield model(x[:3]).detach()  # with gradients that nobody asks for
        model.train()
    with torch.no_grad():
        yield model(x)  # as for batch statistics
    yield model


@loop
def smaller_last_batch(fit):
    model, optimizer, data = made(fit)
    for _ in range(2):
        for x, y in [*data[:2], (data[2][0][:3], data[2][1][:3])]:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
    yield model


@loop
def schedule_of_the_learning_rate(fit):
    model, optimizer, data = made(fit)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(data))
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        yield schedule.get_last_lr()
    yield model


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class ManyOutputs(Net):
    def forward(self, x: torch.Tensor, *, labels: torch.Tensor | None = None, kind: str = "dict"):
        hidden = self.middle(self.body(x))
        logits = self.head(torch.tanh(hidden))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if kind == "tuple":
            return logits, (hidden, [loss])
        return Output(logits, hidden) if kind == "data" else {"loss": loss, "hidden": hidden}


@loop
def outputs_and_keywords_of_all_kinds(fit):
    model, data = ManyOutputs(), batches(3)
    fit(model, {"x": data[0][0], "labels": data[0][1]}, lambda output: output["loss"])
    for x, labels in data:
        output = model(x, labels=labels)
        (output["loss"] + output["hidden"].square().mean()).backward()
        _, (hidden, [loss]) = model(x=x, labels=labels, kind="tuple")
        loss.backward()
        other = model(x, kind="data")
        other.logits.mean().backward()
        yield from (output["loss"], hidden, loss, other.hidden)
    yield model


@loop
def unused_outputs_and_parts(fit):
    model, data = ManyOutputs(), batches(2)
    fit(model, data[0][0], lambda output: output["hidden"].sum())
    for x, _ in data:
        model(x)["hidden"].sum().backward()
    yield model


@loop
def output_changed_in_place(fit):
    model, optimizer, data = made(fit)
    for x, y in data:
        logits = model(x)
        logits.mul_(0.5).add_(1)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield model


@loop
def weights_changed_by_hand(fit):
    model, _, data = made(fit)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
            model.head.weight.data = model.head.weight.data.clamp(-0.2, 0.2)
        yield loss
    yield model


@loop
def closure_called_several_times(fit):
    model, data = Net(), batches(2)
    fit(model, data[0], F.cross_entropy)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x, y in data:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        yield optimizer.step(closure)
    yield model


class Counting(Net):
    """Its own counter decides what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x) * (2 if self.steps < 3 else 1)


@loop
def model_that_counts(fit):
    model = Counting()
    yield from training(fit, model)
    yield model.steps


class Following(Net):
    """A teacher that follows inside the forward: its weights are other tensors from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        self.teacher.weight.data = 0.9 * self.teacher.weight.data + 0.1 * self.middle.weight.data
        self.mean.data = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.head.bias.data.clamp_(-0.1, 0.1)
        return self.head(self.middle(hidden) - self.teacher(hidden - self.mean).detach())


@loop
def weights_replaced_in_the_forward(fit):
    yield from training(fit, Following())


class Failing(Net):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        if self.fails:
            raise ValueError("a bad sample")
        return self.head(self.middle(hidden))


@loop
def samples_that_fail(fit):
    model, optimizer, data = made(fit, Failing())
    for number, (x, y) in enumerate(data):
        model.fails = number == 1
        try:
            loss = F.cross_entropy(model(x), y)
        except ValueError as fault:  # with the layers before it run, and random numbers drawn
            yield str(fault)
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield model


@loop
def parts_replaced(fit):
    model, _, data = made(fit)
    for change in range(5):
        if change == 1:
            model.head = nn.Linear(16, 5)
        elif change == 2:
            model.body[2] = nn.GELU()
        elif change == 3:
            model.body[1].eval()
        elif change == 4:
            forward = model.forward
            model.forward = lambda x, run=forward: run(x) * 2
        loss = F.cross_entropy(model(data[0][0]), data[0][1])
        loss.backward()
        yield loss
    yield model


@loop
def part_of_another_model(fit):
    inner, _, data = made(fit)
    outer = nn.Sequential(inner, nn.Linear(5, 5))
    for x, y in data:
        loss = F.cross_entropy(outer(x), y) + inner.middle(inner.body(x)).mean()
        loss.backward()
        yield loss
    file = io.BytesIO()
    torch.save(outer, file)
    file.seek(0)
    yield from (outer, torch.load(file, weights_only=False)(x))


def run(loop: Loop, fit: Fit, model_state: Any) -> list[Any]:
    torch.manual_seed(0)
    told = []
    for result in loop(fit):
        if isinstance(result, nn.Module):
            told.append(model_state(result))
        else:
            told.append(result.detach().clone() if isinstance(result, torch.Tensor) else result)
    return [*told, torch.get_rng_state()]


def plainly(model: nn.Module, batch: Any, loss_fn: Any) -> None:
    pass


@pytest.mark.parametrize("plan", [pytest.param("keep", marks=pytest.mark.slow), "repeat"])
@pytest.mark.parametrize("name", LOOPS)
def test_loop_has_the_numbers_of_plain_training(
    name, plan, bind_to, repeat_everything, model_state
):
    strategy = by_strategy("tried", keep() if plan == "keep" else repeat_everything)

    def fit(model: nn.Module, batch: Any, loss_fn: Any) -> None:
        bind_to(TrainingStep(model=model, batch=batch, loss_fn=loss_fn), strategy)

    plain, planned = (run(LOOPS[name], each, model_state) for each in (plainly, fit))
    for number, (one, other) in enumerate(zip(planned, plain, strict=True)):
        is_same = one.equal(other) if isinstance(one, torch.Tensor) else one == other
        assert is_same, f"result {number}"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Checkpointed(use_reentrant=True), "test_loops.*use_reentrant=True, the default"),
        (Checkpointed("body"), "changes a buffer.*test_loops"),
        (Checkpointed(preserve_rng_state=False), "random numbers in it.*test_loops"),
    ],
)
def test_checkpoint_that_plain_training_would_notice_is_refused(model, message):
    data = batches(1)
    with pytest.raises(bayplan.BayplanError, match=f"(?s){message}"):
        bayplan.fit(model, data[0], F.cross_entropy, memory="1GiB", time_limit_seconds=0.1)


RANKS = """
import sys
from pathlib import Path
import torch
from torch import distributed, nn
from torch.nn import functional as F
import bayplan

distributed.init_process_group("gloo")
torch.set_num_threads(1)
rank = distributed.get_rank()


def trained(kind, fitted):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 5))
    x, y = torch.randn(8, 12) + rank, torch.randint(5, (8,))
    if fitted:
        bayplan.fit(model, (x, y), F.cross_entropy, memory="1GiB", time_limit_seconds=0.1)
    if kind == "ours":
        shared = bayplan.data_parallel(model)
    else:
        shared = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(3):
        with bayplan.no_sync(model) if kind == "ours" else shared.no_sync():
            F.cross_entropy(shared(x), y).backward()
        F.cross_entropy(shared(x + step), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers(), torch.get_rng_state()]


for kind in ("ours", "torch's"):
    pairs = zip(trained(kind, False), trained(kind, True), strict=True)
    assert all(plain.equal(planned) for plain, planned in pairs), kind
Path(sys.argv[1], f"{rank} is done").touch()
distributed.destroy_process_group()
"""


@pytest.mark.alone
def test_ranks_accumulate_without_talking(tmp_path):
    script, lines = tmp_path / "script.py", []
    script.write_text(RANKS)
    code = launch(
        [str(script), str(tmp_path)],
        num_ranks=2,
        log_folder=tmp_path / "logs",
        timeout_seconds=250.0,
        on_line=lines.append,
    )
    assert code == 0, "\n".join(lines)
    assert len(list(tmp_path.glob("* is done"))) == 2
