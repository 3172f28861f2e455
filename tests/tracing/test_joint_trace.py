"""Tracing for planning: nothing runs and nothing changes."""

import pytest
import torch
from torch import nn

from bayplan.costing.pricing import free_prices
from bayplan.data.errors import BayplanError, CaptureError, DoesNotFit
from bayplan.step import TrainingStep
from bayplan.torch_compat import changes_of_inputs
from bayplan.tracing.joint_trace import compile_whole, trace_step, untraceable
from bayplan.tracing.traced_step import MemoryContext

pytestmark = pytest.mark.usefixtures("own_planner_cache")
FREE = MemoryContext(prices=free_prices)


class Net(nn.Module):
    def __init__(self, num_features: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num_features)
        self.layer = nn.Linear(num_features, num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(self.norm(x)))


def total(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


def test_nothing_of_the_model_runs_or_changes(model_state):
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(4, 8)
    before = model_state(model)
    traced = trace_step(TrainingStep(model=model, batch=batch, loss_fn=total), FREE)
    assert traced.num_forward_outputs >= 1
    assert model_state(model) == before
    assert model._compiled_call_impl is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_new_statistics_of_a_norm_are_gone_after_forward():
    """They are copied into the model's buffers then; only gradients and the output last."""
    step = TrainingStep(model=Net(), batch=torch.randn(4, 8), loss_fn=lambda y: y.square().mean())
    traced = trace_step(step, FREE)
    variants = [traced.with_packs(), traced.with_packs([pack.name for pack in traced.packs[:1]])]
    for variant in variants:
        program = variant.program
        changed = {variant.buffers_of[node][0] for node in changes_of_inputs(variant.graph)}
        assert len(changed) == 3
        assert not changed & program.outputs
        (loss,) = (op for op in program.ops if op.name == "loss")
        assert changed <= {*loss.reads}


def test_step_too_large_for_any_machine_is_traced():
    step = TrainingStep(
        model=nn.Sequential(nn.Flatten(), nn.Linear(4, 4)),
        batch=torch.empty(1).expand(2**42, 4),
        loss_fn=total,
    )
    program = trace_step(step, FREE).with_packs().program
    assert max(program.buffers) >= 2**46


def test_error_of_the_model_is_told_with_its_cause():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x)

    with pytest.raises(CaptureError, match=r"its own code at .*`return self.layer\(x\)`"):
        trace_step(TrainingStep(model=Wrong(), batch=torch.ones(2, 4), loss_fn=total), FREE)


def test_our_own_errors_come_through_as_they_are():
    ours = DoesNotFit("too large")
    assert untraceable(ours) is ours
    other = untraceable(RuntimeError("no such luck"))
    assert isinstance(other, CaptureError)
    assert "no such luck" in str(other)


def test_backends_error_is_found_in_its_wrapping():
    def backend(module, inputs):
        raise DoesNotFit("too large")

    model = Net()
    compile_whole(model, backend)
    with pytest.raises(Exception, match="too large") as fault:
        model(torch.randn(4, 8))
    found = untraceable(fault.value)
    assert type(found) is DoesNotFit
    assert isinstance(found, BayplanError)


def test_memory_that_runs_out_is_not_taken_for_an_untraceable_model():
    def backend(module, inputs):
        return lambda *_: torch.empty(2**62, dtype=torch.uint8)

    model = Net()
    compile_whole(model, backend)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as fault:
        model(torch.randn(4, 8))
    told = untraceable(fault.value)
    assert isinstance(told, DoesNotFit)
    assert "asked for 4194304.0 TiB" in str(told)


def test_hooks_on_a_module_of_torchs_own_are_called():
    graphs, calls = [], []

    def backend(module, inputs):
        graphs.append(module)
        return module

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model.register_forward_hook(lambda *_: calls.append(1))
    compile_whole(model, backend)
    assert model(torch.ones(2, 8)).shape == (2, 8)
    assert len(graphs) == 1
    assert calls == [1]
