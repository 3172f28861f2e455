"""The step that everything means: what it calls, in which order, on which part of the batch."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayplan.data.errors import UsageError
from bayplan.data.graph import Phase
from bayplan.step import TrainingStep, split_batch

X, Y, TARGET = torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 2)
HERE = re.escape(__file__)


def total(output):
    return output.sum()


def line_of(function) -> int:
    return function.__code__.co_firstlineno


# The loop body.


def test_step_is_the_loop_body_that_people_write():
    torch.manual_seed(0)
    models = [nn.Linear(4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    step = TrainingStep(
        model=models[0], batch=(X, TARGET), loss_fn=nn.MSELoss(), optimizer=optimizers[0]
    )
    for _ in range(3):
        optimizers[1].zero_grad()
        loss = functional.mse_loss(models[1](X), TARGET)
        loss.backward()
        optimizers[1].step()
        assert torch.equal(step(), loss)
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(models[0].weight.grad, models[1].weight.grad)


def test_gradients_of_the_step_before_do_not_add_up():
    model = nn.Linear(4, 2)
    step = TrainingStep(model=model, batch=X, loss_fn=total)
    step()
    first = model.weight.grad.clone()
    step()
    assert torch.equal(model.weight.grad, first)


def test_loss_that_is_returned_holds_no_graph():
    loss = TrainingStep(model=nn.Linear(4, 2), batch=X, loss_fn=total)()
    assert loss.shape == ()
    assert not loss.requires_grad


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_phases_and_the_loss_are_announced_in_order(has_optimizer):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters()) if has_optimizer else None
    heard = []
    TrainingStep(model=model, batch=X, loss_fn=total, optimizer=optimizer)(
        heard.append, lambda loss: heard.append(loss.grad_fn is not None)
    )
    update = [Phase.UPDATE] if has_optimizer else []
    assert heard == [Phase.FORWARD, Phase.BACKWARD, True, *update]


def test_autocast_covers_forward_and_loss_only():
    seen = []

    class Watching(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    model = Watching(4, 2)
    step = TrainingStep(model=model, batch=X, loss_fn=total, autocast=torch.bfloat16)
    step(on_phase=lambda phase: seen.append(torch.is_autocast_enabled("cpu")))
    assert seen == [False, torch.bfloat16, False]
    assert model.weight.grad.dtype == torch.float32


def test_autocast_of_a_model_without_parameters():
    step = TrainingStep(
        model=nn.Identity(),
        batch=X.clone().requires_grad_(),
        loss_fn=total,
        autocast=torch.bfloat16,
    )
    assert step() == 12


# Batches.


class Keeping(nn.Linear):
    """Takes anything and remembers what."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, *args, **kwargs):
        self.got = args, kwargs
        return super().forward(X)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, Y), (X, Y), {}),
        ([X, Y], (X, Y), {}),
        ({"x": X, "y": Y}, (), {"x": X, "y": Y}),
        ((), (), {}),
    ],
)
def test_inputs_reach_the_model_as_they_are_written(batch, args, kwargs):
    model = Keeping()
    TrainingStep(model=model, batch=batch, loss_fn=total)()
    assert model.got == (args, kwargs)


def test_pair_is_split_for_a_loss_of_two():
    assert split_batch((X, TARGET), functional.mse_loss) == (X, (TARGET,))
    assert split_batch([{"x": X}, TARGET], nn.MSELoss()) == ({"x": X}, (TARGET,))


@pytest.mark.parametrize(
    "loss_fn",
    [
        None,
        total,
        lambda output, scale=2: output.sum() * scale,
        functools.partial(functional.mse_loss, target=TARGET),
        lambda output, *, weight=None: output.sum(),
    ],
)
def test_whole_batch_goes_to_the_model_unless_the_loss_needs_targets(loss_fn):
    assert split_batch((X, Y), loss_fn) == ((X, Y), ())


def test_builtin_that_tells_no_signature_counts_as_a_loss_of_two():
    assert split_batch((X, TARGET), torch.dist) == (X, (TARGET,))


@pytest.mark.parametrize(
    ("batch", "description"),
    [
        (X, r"a tensor of shape \(3, 4\)"),
        ((X, Y, TARGET), "a tuple of 3"),
        ([X], "a list of 1"),
        ({"x": X}, "a dict"),
        (None, "none"),
    ],
)
def test_batch_that_is_no_pair_for_a_loss_of_two(batch, description):
    def loss_of_two(output, target):
        return output.sum()

    message = (
        r"needs the batch as a pair \(inputs, targets\), but for loss_of_two"
        rf" \({HERE}:{line_of(loss_of_two)}\) it is {description}; or give a loss of the output"
    )
    with pytest.raises(UsageError, match=message):
        split_batch(batch, loss_of_two)


# Losses.


class Returning(nn.Linear):
    def __init__(self, make):
        super().__init__(4, 2)
        self.make = make

    def forward(self, x):
        return self.make(super().forward(x))


class Output:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize(
    "make",
    [torch.sum, lambda y: y.sum().view(1), lambda y: {"loss": y.sum()}, lambda y: Output(y.sum())],
    ids=["scalar", "one element", "dict", "attribute"],
)
def test_output_that_holds_its_loss(make):
    model = Returning(make)
    TrainingStep(model=model, batch=X)()
    assert model.bias.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda y: y, r"a tensor of shape \(3, 2\) from output a tensor of shape \(3, 2\)"),
        (lambda y: {"logits": y}, "none from output a dict"),
        (lambda y: (y.sum(), y), "none from output a tuple of 2"),
        (lambda y: {"loss": 3.0}, "a float from output a dict"),
        (lambda y: None, "none from output none"),
    ],
)
def test_output_without_a_loss_of_one_number(make, got):
    with pytest.raises(UsageError, match=f"needs a loss of one number, got {got}; give a loss"):
        TrainingStep(model=Returning(make), batch=X)()


def test_loss_function_that_returns_many_numbers_is_named_with_its_line():
    def forgot_to_reduce(output):
        return output * 2

    place = rf"{HERE}:{line_of(forgot_to_reduce)}"
    with pytest.raises(UsageError, match=rf"\(3, 2\) from forgot_to_reduce \({place}\)"):
        TrainingStep(model=nn.Linear(4, 2), batch=X, loss_fn=forgot_to_reduce)()


def test_loss_of_torch_is_named_without_a_line():
    step = TrainingStep(
        model=nn.Linear(4, 2), batch=(X, TARGET), loss_fn=nn.MSELoss(reduction="none")
    )
    with pytest.raises(UsageError, match=r"\(3, 2\) from MSELoss; give"):
        step()


def test_loss_without_a_gradient_says_what_to_check():
    def detached(output):
        return output.detach().sum()

    place = rf"{HERE}:{line_of(detached)}"
    message = rf"the loss detached \({place}\) does not depend on any parameter that requires"
    with pytest.raises(UsageError, match=message):
        TrainingStep(model=nn.Linear(4, 2), batch=X, loss_fn=detached)()


def test_frozen_model_has_no_backward():
    model = Returning(torch.sum).requires_grad_(False)
    with pytest.raises(
        UsageError, match=r"the loss does not depend on any .*check `requires_grad`"
    ):
        TrainingStep(model=model, batch=X)()
