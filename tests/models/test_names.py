import subprocess
import sys

import pytest

from bayplan.data.errors import UsageError
from bayplan.models import default_batch_size, reference_models

NAMES = [
    "alexnet",
    "alexnet-oneflow",
    "vgg16",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "inception_v4",
    "gpt",
    "llama-7b",
]


def test_names_are_complete_and_unique() -> None:
    names = reference_models()
    assert sorted(names) == sorted(NAMES)
    assert len(set(names)) == len(names)


def test_listing_the_names_does_not_import_torch() -> None:
    code = (
        "import sys, bayplan.models as models; models.reference_models(); "
        "models.default_batch_size('gpt'); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("alexnet", 128), ("vgg16", 32), ("resnet50", 32), ("inception_v4", 32), ("gpt", 4)],
)
def test_default_batch_size(name: str, batch_size: int) -> None:
    assert default_batch_size(name) == batch_size


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="no reference model 'resnet5O'; did you mean 'resnet50'"):
        default_batch_size("resnet5O")
