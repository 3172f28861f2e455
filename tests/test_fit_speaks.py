"""What `fit` says, and what `plan_of` tells of a fitted model."""

import logging
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import bayplan
from bayplan.data.errors import UsageError
from bayplan.data.plan import Choice

SCRIPT = """\
import sys

import torch
from torch import nn

import bayplan

torch.manual_seed(0)
layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())]
model, batch = nn.Sequential(*layers), torch.randn(2048, 64)
options = {"memory": "80%", "time_limit_seconds": 1, **eval(sys.argv[1])}
bayplan.fit(model, batch, lambda y: y.square().mean(), **options)
"""
LINE = (
    r"Sequential fits [\d.]+ MiB: planned peak [\d.]+ MiB \(plain [\d.]+ MiB\), planned step"
    r" [\d.]+( ± [\d.]+)? x plain \(.*recomputed.*\); "
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "cache"))


def deep() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(2048, 64)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def fitted(**options) -> nn.Module:
    model, batch = deep()
    return bayplan.fit(
        model, batch, loss_fn, **{"memory": "80%", "time_limit_seconds": 1, **options}
    )


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "bayplan"]


def test_fit_says_one_line_and_whether_the_plan_was_kept(caplog):
    caplog.set_level(logging.INFO, logger="bayplan")
    fitted()
    first = lines_of(caplog)[0]
    caplog.clear()
    fitted()
    again = lines_of(caplog)[0]
    caplog.clear()
    fitted(again=True)
    anew = lines_of(caplog)[0]
    assert re.match(LINE + "planned in", first), first
    assert re.match(LINE + "with a plan of the cache, ready in", again), again
    assert re.match(LINE + "planned in", anew), anew


def test_fit_is_silent_where_nobody_wants_to_hear(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="bayplan")
    fitted(progress=False)
    monkeypatch.setenv("BAYPLAN_LOG", "off")
    fitted()
    assert lines_of(caplog) == []
    fitted(progress=True)
    assert len(lines_of(caplog)) >= 1


def test_line_goes_to_stderr_where_logging_is_not_set_up():
    command = [sys.executable, "-c", SCRIPT, "{}"]
    done = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == ""
    assert done.stderr.startswith("bayplan: Sequential fits ")


def test_progress_is_told():
    heard: list[str] = []
    fitted(on_progress=lambda what, done, total: heard.append(what))
    assert list(dict.fromkeys(heard)) == ["capturing", "pricing operators", "planning"]


def test_plan_of_a_fitted_model_says_what_it_runs():
    model = fitted()
    plan = bayplan.plan_of(model)
    order, limit_bytes = plan.order, plan.limit_bytes
    assert limit_bytes is not None
    assert order.peak_bytes <= limit_bytes < order.plain_peak_bytes
    assert limit_bytes == int(0.8 * order.plain_peak_bytes)
    assert order.time_ratio >= 1
    assert any(decision.choice is Choice.RECOMPUTE for decision in plan.decisions)
    text = bayplan.explain(plan)
    assert text.startswith("Sequential: planned peak ")
    model(torch.randn(2048, 64)).sum().backward()
    with pytest.raises(UsageError, match="no plan 1: the model has 1"):
        bayplan.plan_of(model, number=1)
    model(torch.randn(1024, 64)).sum().backward()
    other = bayplan.plan_of(model, number=1)
    assert other.order.peak_bytes < order.peak_bytes
    assert bayplan.plan_of(model) == plan
    with pytest.raises(UsageError, match="no plan 2: the model has 2"):
        bayplan.plan_of(model, number=2)


def test_plan_of_a_fitted_model_can_be_run():
    plan = bayplan.plan_of(fitted())
    model, batch = deep()
    record = bayplan.run(plan, model, batch, loss_fn, num_steps=1)
    assert plan.limit_bytes is not None
    assert record.peak_bytes <= 1.01 * plan.limit_bytes


def test_plan_of_another_model_is_refused():
    model, batch = deep()
    with pytest.raises(UsageError, match="Sequential was not fitted"):
        bayplan.plan_of(model)
    model = bayplan.fit(model, batch, loss_fn, memory="100%")
    assert bayplan.plan_of(model).decisions == ()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="was compiled or copied since"):
        bayplan.plan_of(model)


def test_bar_is_shown_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    fitted()
    shown = capsys.readouterr().err
    assert "planning" in shown
    fitted(progress=False, again=True)
    assert capsys.readouterr().err == ""
