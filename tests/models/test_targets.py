"""Targets: from a word on the command line to a way to build a model."""

import sys

import pytest
import torch

from bayplan.data.errors import CaptureError, UsageError
from bayplan.models import default_batch_size, reference_models
from bayplan.models.targets import resolve_target, without_rest

FUNCTIONS = """\
import torch
from torch import nn

asked = []


def _build(size):
    asked.append(size)
    return nn.Linear(4, 2), torch.zeros(size, 4), lambda output: output.sum()


def required(batch_size):
    return _build(batch_size)


def with_default(batch_size=6):
    return _build(batch_size)


def by_keyword_only(*, batch_size=6):
    return _build(batch_size)


def by_position_only(samples, /):
    return _build(samples)


def any_name(n=6):
    return _build(n)


def not_first(variant="small", batch_size=6):
    assert variant == "small"
    return _build(batch_size)


def own_choice(batch_size=None):
    return _build(batch_size or 3)


def nothing():
    return _build(5)


def first_is_no_size(variant="small"):
    assert variant == "small"
    return _build(5)


def anything(*args, **kwargs):
    return _build(5)


class Recipe:
    def __new__(cls, batch_size=6):
        return _build(batch_size)
"""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The user's module `recipes`, and the sizes its functions were asked for."""
    (tmp_path / "recipes.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "recipes"
    sys.modules.pop("recipes", None)


@pytest.mark.parametrize(
    ("function", "takes_batch_size", "default_batch", "built_by_default"),
    [
        ("required", True, 1, 1),
        ("with_default", True, 6, 6),
        ("by_keyword_only", True, 6, 6),
        ("by_position_only", True, 1, 1),
        ("any_name", True, 6, 6),
        ("not_first", True, 6, 6),
        ("own_choice", True, None, 3),
        ("nothing", False, None, 5),
        ("first_is_no_size", False, None, 5),
        ("anything", False, None, 5),
        ("Recipe", True, 6, 6),
    ],
)
def test_batch_size_reaches_the_function(
    recipes, function, takes_batch_size, default_batch, built_by_default
):
    target = resolve_target(f"recipes:{function}")
    assert target.name == f"recipes:{function}"
    assert target.takes_batch_size is takes_batch_size
    assert target.default_batch == default_batch
    asked = sys.modules["recipes"].asked
    assert asked == []  # nothing is built before it is asked for
    model, batch, loss_fn = target.build(None)
    assert asked == [built_by_default] == [len(batch)]
    assert isinstance(model, torch.nn.Module)
    assert callable(loss_fn)
    if takes_batch_size:
        assert len(target.build(9)[1]) == 9


def test_reference_models_have_their_usual_batch():
    for name in reference_models():
        target = resolve_target(name)
        assert target.takes_batch_size
        assert target.default_batch == default_batch_size(name)
    with torch.device("meta"):
        _, (images, classes), _ = resolve_target("resnet18").build(3)
    assert len(images) == len(classes) == 3


def test_module_in_a_package_is_found_from_here(tmp_path, monkeypatch):
    (tmp_path / "lab" / "nets").mkdir(parents=True)
    (tmp_path / "lab" / "nets" / "tiny.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert resolve_target("lab.nets.tiny:nothing").default_batch is None
    for name in ("lab.nets.tiny", "lab.nets", "lab"):
        sys.modules.pop(name, None)


def test_function_made_elsewhere_counts(recipes):
    """What the module imported or computed is as good as what it defines."""
    with pytest.raises(UsageError, match=r"must return \(model, batch, loss\)"):
        resolve_target("math:floor").build(3)
    with pytest.raises(UsageError, match="no function 'asked'"):
        resolve_target("recipes:asked")


def test_module_without_functions_says_so(tmp_path, monkeypatch):
    (tmp_path / "hollow.py").write_text("size = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError, match="it defines no function"):
        resolve_target("hollow:build")
    sys.modules.pop("hollow", None)


def test_users_own_error_is_the_cause(tmp_path, monkeypatch):
    (tmp_path / "sick.py").write_text("import json\njson.loads('{')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(CaptureError, match="importing 'sick' fails: JSONDecodeError") as caught:
        resolve_target("sick:build")
    assert type(caught.value.__cause__).__name__ == "JSONDecodeError"


def test_batch_is_cut_out_of_what_it_is_a_view_of():
    data, tokens = torch.arange(4000.0).view(1000, 4), torch.arange(9000)
    x, y = tokens[100:164], tokens[101:165]
    whole = torch.randn(8, 4)
    batch = {"rows": data[8:16], "columns": (data[:, 1], whole), "tokens": [x, y], "more": 3}
    cut = without_rest(batch)
    assert cut["rows"].equal(data[8:16])
    assert cut["columns"][0].equal(data[:, 1])
    assert cut["columns"][1] is whole
    assert [*map(torch.equal, cut["tokens"], (x, y))] == [True, True]
    assert cut["more"] == 3
    # Tensors of one storage share one still: those of `data` here and there, x and y.
    assert cut["rows"].untyped_storage().nbytes() == 3997 * 4
    assert cut["tokens"][0].untyped_storage().nbytes() == 65 * 8
    assert cut["tokens"][0].data_ptr() + 8 == cut["tokens"][1].data_ptr()


def test_batch_that_cannot_be_cut_out_stays_as_it_is():
    base = torch.randn(100)
    empty, trained = base[:0], base[:10].detach().requires_grad_()
    two = base[10:20], base.view(torch.int32)[20:30]
    for batch in (empty, trained, two, torch.eye(3).to_sparse(), None):
        assert without_rest(batch) is batch or without_rest(batch) == batch
