import pytest
import torch
from torch import nn

from bayplan.models.alexnet import (
    ONEFLOW_IMAGE_SIZES,
    AlexNet,
    AlexNetOneFlow,
    build_alexnet_oneflow,
)


def test_oneflow_form_has_6400_features_before_fc1() -> None:
    convolutions = 23_296 + 307_392 + 663_936 + 1_327_488 + 884_992
    linears = (6400 + 1) * 4096 + (4096 + 1) * 4096 + 4096 * 1000
    with torch.device("meta"):
        model = AlexNetOneFlow()
        features = model.features(torch.empty(1, 3, 224, 224))
    assert features.shape == (1, 256, 5, 5)
    assert model.fc1.weight.shape == (4096, 6400)
    assert sum(p.numel() for p in model.parameters()) == convolutions + linears


@pytest.mark.parametrize("image_size", [ONEFLOW_IMAGE_SIZES[0], ONEFLOW_IMAGE_SIZES[-1]])
def test_oneflow_form_runs_at_both_ends_of_its_image_sizes(image_size: int) -> None:
    with torch.device("meta"):
        model, (images, _), _ = build_alexnet_oneflow(1, image_size=image_size)
        assert model(images).shape == (1, 1000)


@pytest.mark.parametrize("image_size", [194, 227])
def test_oneflow_form_refuses_other_image_sizes(image_size: int) -> None:
    with pytest.raises(ValueError, match="Use 195 to 226 pixels"):
        build_alexnet_oneflow(1, image_size=image_size)


@pytest.mark.parametrize(
    ("form", "pool"), [(AlexNet, nn.MaxPool2d), (AlexNetOneFlow, nn.AvgPool2d)]
)
def test_forms_differ_in_pooling(form: type[nn.Module], pool: type[nn.Module]) -> None:
    with torch.device("meta"):
        modules = list(form().modules())
    pools = [m for m in modules if isinstance(m, nn.MaxPool2d | nn.AvgPool2d)]
    assert len(pools) == 3
    assert all(isinstance(m, pool) for m in pools)
    assert sum(isinstance(m, nn.Dropout) for m in modules) == 2
