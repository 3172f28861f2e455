"""What every reference model promises, checked on meta, where even 7B parameters are free."""

from functools import cache

import pytest
import torch

from bayplan.data.errors import UsageError
from bayplan.models import load, reference_models
from bayplan.models.building import BuiltModel

# As published; for alexnet-oneflow no exact number is, so it is summed by hand in test_alexnet.
NUM_PARAMETERS = {
    "alexnet": 61_100_840,
    "alexnet-oneflow": 50_302_912,
    "vgg16": 138_357_544,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet200": 64_673_832,
    "inception_v4": 42_679_816,
    "gpt": 124_439_808,
    "llama-7b": 6_738_415_616,
}


@cache
def built_on_meta(name: str) -> BuiltModel:
    with torch.device("meta"):
        return load(name)(2)


@pytest.mark.parametrize("name", reference_models())
def test_number_of_parameters_is_the_published_one(name: str) -> None:
    model, _, _ = built_on_meta(name)
    assert sum(p.numel() for p in model.parameters()) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", reference_models())
def test_one_step_reaches_every_parameter(name: str) -> None:
    model, (inputs, targets), loss_fn = built_on_meta(name)
    output = model(inputs)
    loss = loss_fn(output, targets)
    assert model.training
    assert len(inputs) == len(targets) == len(output) == 2
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape"),
    [("vgg16", (3, 224, 224)), ("inception_v4", (3, 299, 299)), ("gpt", (1024,))],
)
def test_default_sample_shape(name: str, shape: tuple[int, ...]) -> None:
    _, (inputs, _), _ = built_on_meta(name)
    assert inputs.shape == (2, *shape)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no reference model 'bert'; known: alexnet, "):
        load("bert")
