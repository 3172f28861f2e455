"""A model with its loss as one graph: where its inputs come from, and what is refused."""

import pytest
import torch
from torch import nn

from bayplan.data.errors import CaptureError, UsageError
from bayplan.step import TrainingStep
from bayplan.tracing.stages.drawing import find_draws
from bayplan.tracing.stages.whole import Input, InputKind, batch_dimensions
from bayplan.tracing.stages.whole_trace import (
    batch_tensors,
    named_tensors,
    num_samples_of,
    trace_whole,
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Calls what it is given between two layers."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(4))
        self.between = between

    def forward(self, inputs):
        return self.last(self.between(self.first(inputs) + self.shift))


def mean_square(output):
    return output.square().mean()


def step_of(model, batch=None, loss_fn=mean_square):
    given = torch.randn(5, 4) if batch is None else batch
    return TrainingStep(model=model, batch=given, loss_fn=loss_fn)


def test_every_input_is_known_by_where_it_comes_from():
    whole = trace_whole(step_of(Net()), num_samples=3)
    assert set(whole.inputs) == {
        Input(InputKind.BATCH, "0"),
        Input(InputKind.BUFFER, "shift"),
        *(
            Input(InputKind.PARAMETER, f"{layer}.{part}", needs_gradient=True)
            for layer in ("first", "last")
            for part in ("weight", "bias")
        ),
    }
    assert whole.num_samples == 3
    assert set(whole.gradients()) == {"first.weight", "first.bias", "last.weight", "last.bias"}


def test_a_loss_with_parameters_is_part_of_the_step():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, output):
            return (output * self.scale).square().mean()

    step = step_of(Net(), loss_fn=Scaled())
    assert "loss_fn.scale" in trace_whole(step, num_samples=2).gradients()
    assert named_tensors(step)["loss_fn.scale"] is step.loss_fn.scale


def test_nothing_of_the_step_is_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = step_of(model)
    state = torch.get_rng_state()
    trace_whole(step, num_samples=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].weight.grad is None


def test_new_values_of_buffers_are_outputs():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    whole = trace_whole(step_of(model), num_samples=3)
    assert set(whole.new_buffers()) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_the_fingerprint_is_the_same_for_every_batch_size_and_differs_between_models():
    step = step_of(Net())
    prints = {trace_whole(step, num_samples=size).fingerprint for size in (1, 2, 5)}
    assert len(prints) == 1
    assert trace_whole(step_of(Net(torch.relu)), num_samples=2).fingerprint not in prints


def test_one_sample_has_the_operators_of_more():
    # torch copies before the view for several samples, and for one it does not.
    def between(value):
        return value.unflatten(1, (2, 2)).transpose(0, 1).flatten(1).T.reshape(-1, 4)

    step = step_of(Net(between))
    one, two = (trace_whole(step, num_samples=size) for size in (1, 2))
    one.check_same_nodes(two)
    assert one.num_samples == 1
    shapes = {node.name: tuple(node.meta["val"].shape) for node in one.primals}
    assert (1, 4) in shapes.values()


def test_a_model_that_loses_the_dimension_of_one_sample_is_refused_for_one():
    step = step_of(Net(), loss_fn=lambda output: output[:, :1].squeeze().square().mean())
    assert trace_whole(step, num_samples=2)
    with pytest.raises(CaptureError, match=r"squeeze has \(2,\) for 2 samples .* pieces of 2"):
        trace_whole(step, num_samples=1)


def test_a_tensor_that_no_rank_can_find_is_refused():
    table = torch.randn(4)
    with pytest.raises(
        CaptureError, match=r"shape \(4,\) that is neither a parameter, a buffer nor in the batch"
    ):
        trace_whole(step_of(Net(lambda value: value * table)), num_samples=2)


def test_operators_that_depend_on_the_batch_size_are_refused():
    def between(value):
        return value.relu() if value.shape[0] > 3 else value.tanh()

    step = step_of(Net(between))
    small, large = (trace_whole(step, num_samples=size) for size in (3, 4))
    with pytest.raises(CaptureError, match=r"tanh with 3 samples .* relu with 4; .* batch size"):
        small.check_same_nodes(large)


def test_a_model_with_more_operators_for_more_samples_is_refused():
    def between(value):
        for _ in range(value.shape[0]):
            value = value.tanh()
        return value

    step = step_of(Net(between))
    small, large = (trace_whole(step, num_samples=size) for size in (3, 4))
    with pytest.raises(CaptureError, match="depend on the batch size"):
        batch_dimensions(small, large)


def test_samples_that_are_related_to_each_other_are_refused():
    step = step_of(Net(), loss_fn=lambda output: (output @ output.T).square().mean())
    small, large = (trace_whole(step, num_samples=size) for size in (3, 4))
    with pytest.raises(
        CaptureError, match=r"mm relates samples to each other: its shape is \(3, 3"
    ):
        batch_dimensions(small, large)


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (lambda value: value + torch.rand_like(value), "rand_like"),
        (lambda value: value * torch.bernoulli(value.sigmoid()), "bernoulli"),
        (nn.Dropout(0.5, inplace=True), "bernoulli"),
        (nn.functional.alpha_dropout, "bernoulli"),
    ],
    ids=["rand_like", "bernoulli", "in place", "alpha"],
)
def test_random_numbers_other_than_dropout_s_are_refused(between, name):
    if between is nn.functional.alpha_dropout:

        def between(value):
            return nn.functional.alpha_dropout(value, 0.5, training=True)

    step = step_of(Net(between))
    small, large = (trace_whole(step, num_samples=size) for size in (3, 4))
    with pytest.raises(CaptureError, match=f"{name}.* draws random numbers in the forward"):
        find_draws(small, batch_dimensions(small, large), num_samples=7)


def test_tensors_of_different_first_dimensions_are_refused():
    batch = {"x": torch.zeros(3, 2), "y": torch.zeros(4), "z": torch.zeros(())}
    with pytest.raises(UsageError, match="need one first dimension, got 3, 4; keep what is the"):
        num_samples_of(batch)
    with pytest.raises(UsageError, match="got no tensors"):
        num_samples_of({"x": 3})
    assert num_samples_of((torch.zeros(3, 2), [torch.zeros(3), torch.zeros(())])) == 3


def test_batch_tensors_come_in_an_order_of_their_own():
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = batch_tensors(({"b": second, "a": first, "n": 5}, [third]))
    assert sorted(tensor.numel() for tensor in found) == [1, 2, 3]
    again = batch_tensors(({"b": second, "a": first, "n": 5}, [third]))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in again]


def test_a_tied_weight_has_one_gradient_under_its_first_name():
    model = Net()
    model.last = nn.Linear(4, 4, bias=False)
    model.last.weight = model.first.weight
    step = step_of(model)
    assert set(trace_whole(step, num_samples=2).gradients()) == {"first.weight", "first.bias"}
    assert named_tensors(step)["last.weight"] is named_tensors(step)["first.weight"]
