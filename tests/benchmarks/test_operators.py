"""The first promise for torch's operators: the bits of plain training, or a named refusal.

A fixed sample of torch's database runs always, all of it in the slow test.
"""

import itertools
from pathlib import Path

import pytest
import torch
from operators import databases, sweep
from operators.main import sweep as sweep_all
from operators.refused import REFUSED

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.usefixtures("own_planner_cache"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own samples
]

# Every kind: elementwise, reductions, views, products, factorisations, losses, pooling, norms,
# attention, indices, random numbers, changes in place.
SAMPLE = (
    *("exp", "tanh", "pow", "atan2", "clamp", "where", "special.erfcx", "lerp", "__rpow__"),
    *("sum", "mean", "prod", "amax", "max.reduction_no_dim", "median", "logsumexp", "var"),
    *("cumprod", "cumsum", "sort", "topk", "masked_fill", "masked.softmax", "norm"),
    *("cat", "unfold", "as_strided", "roll", "expand", "diagonal_scatter", "split"),
    *("matmul", "einsum", "addmm", "linalg.qr", "linalg.eigh", "linalg.cholesky", "linalg.svd"),
    *("gather", "index_select", "index_put", "scatter_add", "take_along_dim", "cov"),
    *("nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.adaptive_avg_pool2d"),
    *("nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic"),
    *("nn.functional.grid_sample", "nn.functional.pad.reflect", "nn.functional.pixel_shuffle"),
    *("nn.functional.batch_norm", "nn.functional.layer_norm", "nn.functional.group_norm"),
    *("nn.functional.cross_entropy", "nn.functional.ctc_loss", "nn.functional.mse_loss"),
    *("nn.functional.multi_margin_loss", "nn.functional.binary_cross_entropy"),
    *("nn.functional.embedding", "nn.functional.embedding_bag"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.dropout", "bernoulli"),
    *("nn.functional.relu", "nn.functional.gelu", "nn.functional.rrelu", "masked_select"),
)

PARTS = 5


@pytest.mark.parametrize("name", SAMPLE)
def test_operator_has_the_bits_of_plain_training(name):
    _, others = sweep_all([name], databases.operator_cases, torch.float32, most=2)
    assert {*others} <= {*REFUSED} & {name}, others


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["prod", "nn.functional.interpolate.bilinear", "softmax"])
def test_other_dtypes(name, dtype):
    _, others = sweep_all([name], databases.operator_cases, dtype, most=2)
    assert not others


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators_have_the_bits_of_plain_training(part):
    # In parts, because a busy machine takes longer for all of them than one test may take.
    names = databases.operator_names(torch.float32)[part::PARTS]
    row, others = sweep_all(names, databases.operator_cases, torch.float32, most=3)
    assert row["wrong"] == row["crash"] == 0, others
    assert row["tried"] > 500 / PARTS
    assert row["share"] >= 0.98


@pytest.mark.slow
def test_all_modules_have_the_bits_of_plain_training():
    names = databases.module_names()
    row, others = sweep_all(names, databases.module_cases, torch.float32, most=1)
    assert row["wrong"] == row["crash"] == 0, others
    assert row["tried"] > 100
    assert row["share"] >= 0.98


def test_a_sweep_tells_other_bits_and_errors_apart():
    x = torch.rand(3, requires_grad=True)
    twice = itertools.chain([1.0, 1.0], itertools.repeat(2.0))  # another number once it is traced
    assert sweep.compare(sweep.Case("", lambda x: x * next(twice), [x])).status == "wrong"
    outcome = sweep.compare(sweep.Case("", lambda x: x[x > 0.5], [x]))
    assert outcome.status == "refused"
    assert "nonzero" in outcome.why
    assert sweep.compare(sweep.Case("", lambda x: x.detach(), [x])).status == "none"


def test_docs_show_what_is_refused():
    text = (ROOT / "docs" / "operators.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert {name.strip("`"): why for name, why in rows} == REFUSED
