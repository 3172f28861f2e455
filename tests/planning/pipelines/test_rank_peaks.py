"""Where in the model the memory of a rank is highest."""

import pytest

import bayplan

_TARGET = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(64, 64)
        self.wide = nn.Linear(64, 4096)
        self.back = nn.Linear(4096, 64)

    def forward(self, x):
        return self.back(self.wide(self.narrow(x)).relu())

def build(batch_size=512):
    model = nn.Sequential(Wide(), nn.Linear(64, 64), nn.Linear(64, 10))
    batch = torch.randn(batch_size, 64), torch.randint(10, (batch_size,))
    return model, batch, nn.functional.cross_entropy
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peaks")
    (folder / "wide_model.py").write_text(_TARGET)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        asked = {"batch": 512, "optimizer": "sgd", "num_micro_batches": 2}
        plan = bayplan.plan(
            "wide_model:build", cluster="titanv-8", placement="0:0.0:1", cut_at=("1",), **asked
        )
        return bayplan.simulate(plan, cluster="titanv-8", target="wide_model:build")


def test_peak_of_a_rank_is_named_by_module_and_line(record):
    """It was named by its action alone: `0B0` tells nobody which layer to make smaller."""
    action, *operator, module, line = record.devices[0].peak_place.split()
    assert action.startswith("0")
    assert operator
    assert module in ("0.wide", "0.back")
    assert line == "wide_model.py:13"


def test_largest_values_at_the_peak_of_a_rank_have_module_and_line(record):
    largest = record.devices[0].largest
    assert largest[0].name.startswith(("0.wide (", "0.back ("))
    assert largest[0].source == "wide_model.py:13"
    sizes = [live.size_bytes for live in largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 256 * 4096 * 4
