"""PreparedSteps: a target with all that decides its step, checked before anything is built."""

import pytest
import torch
from torch import nn

from bayplan.costing.catalogue import load_device
from bayplan.data.errors import CaptureError, UsageError
from bayplan.data.graph import Phase, StorageKind
from bayplan.models.targets import Target
from bayplan.preparing.step import PreparedStep
from bayplan.step import AUTOCASTS, OPTIMIZERS


def linear(batch_size):
    samples = 2 if batch_size is None else batch_size
    return nn.Linear(4, 3), torch.zeros(samples, 4), lambda output: output.sum()


def question(build=linear, *, takes_batch_size=True, default_batch=2, **options) -> PreparedStep:
    target = Target(
        name="linear",
        build=build,
        takes_batch_size=takes_batch_size,
        default_batch=default_batch,
    )
    return PreparedStep(target=target, **options)


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"batch": 0}, "--batch is 0"),
        ({"batch": -1}, "at least 1 sample"),
        ({"optimizer": "adamm"}, "did you mean 'adam'"),
        ({"autocast": "fp61"}, "did you mean 'fp16'"),
        ({"batch": 2, "takes_batch_size": False}, "takes no batch size, so --batch 2"),
    ],
)
def test_impossible_question_is_refused_at_once(options, phrase):
    with pytest.raises(UsageError, match=phrase):
        question(lambda batch_size: pytest.fail("built"), **options)


def test_samples_are_those_asked_for_or_the_targets_own():
    assert question().samples == 2
    assert question(batch=7).samples == 7
    assert question().at(5).samples == 5
    assert question(default_batch=None).samples is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_is_captured_and_built(optimizer):
    asked = question(optimizer=optimizer)
    graph = asked.graph
    step = asked.build()
    has_update = any(node.phase is Phase.UPDATE for node in graph.nodes)
    assert has_update == (step.optimizer is not None) == (optimizer != "none")
    state = sum(s.kind is StorageKind.OPTIMIZER_STATE for s in graph.storages)
    # Two parameters; AdamW also counts its steps in a tensor per parameter.
    assert state == {"sgd": 2, "adam": 6, "adamw": 6, "none": 0}[optimizer]
    step()


@pytest.mark.parametrize(("autocast", "dtype"), AUTOCASTS.items())
def test_each_precision_shows_in_the_graph(autocast, dtype):
    graph = question(autocast=autocast, optimizer="none").graph
    product = next(node for node in graph.nodes if node.op == "aten.addmm.default")
    expected = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    assert graph.values[product.writes[0]].dtype == expected


def test_capture_at_another_batch_is_the_same_model():
    small, large = question().graph, question().at(64).graph
    assert [node.op for node in small.nodes] == [node.op for node in large.nodes]
    assert small.num_parameters == large.num_parameters == 15
    assert small.fingerprint != large.fingerprint


def test_device_that_is_not_here_updates_all_parameters_in_one_call():
    """torch's default on CUDA, with other temporaries than the loop it uses on a CPU."""
    here = {node.op for node in question().graph.nodes}
    there = {node.op for node in question(device=load_device("h100")).graph.nodes}
    assert not any("_foreach" in op for op in here)
    assert any("_foreach" in op for op in there)


def test_nothing_to_train_is_said_so():
    def frozen(batch_size):
        model, batch, loss_fn = linear(batch_size)
        return model.requires_grad_(False), batch, loss_fn

    with pytest.raises(UsageError, match="'linear' requires a gradient, so there is nothing"):
        _ = question(frozen).graph
    with pytest.raises(UsageError, match="nothing to train"):
        _ = question(lambda batch_size: (nn.ReLU(), torch.zeros(2), None)).graph


def test_build_that_fails_only_for_real_is_the_users_error():
    def build(batch_size):
        if torch.zeros(1).untyped_storage().data_ptr():
            raise OSError("no dataset")
        return linear(batch_size)

    with pytest.raises(CaptureError, match="OSError: no dataset"):
        question(build).build()


def test_frozen_parameters_are_kept_from_the_optimizer():
    def half_frozen(batch_size):
        model, batch, loss_fn = linear(batch_size)
        model.bias.requires_grad_(False)
        return model, batch, loss_fn

    step = question(half_frozen).build()
    assert step.optimizer is not None
    (group,) = step.optimizer.param_groups
    assert [tuple(parameter.shape) for parameter in group["params"]] == [(3, 4)]
