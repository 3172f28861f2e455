"""The promise about hooks: called as in plain training, with its numbers, or refused by name.

A training is compared with a plain one by its losses and parameters and by all that its hooks were
called with. Hooks come before `fit` or after the first step, and go before the last one.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import bayplan
from bayplan import torch_compat
from bayplan.tracing.hooks import hooked_text

pytestmark = [
    pytest.mark.usefixtures("own_planner_cache"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

HOOKS: dict[str, Callable[[nn.Module, list[Any]], list[Any]]] = {}
STEPS = 4


class Model(nn.Module):
    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(in_place))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.block(self.first(x))) * scale


@pytest.fixture
def _no_global_hooks():
    yield
    for table in torch_compat.global_hooks():
        table.clear()


def train(
    register: Callable[[nn.Module, list[Any]], list[Any]],
    *,
    fitted: bool,
    before: bool,
    build: Callable[[], nn.Module] = Model,
) -> list[Any]:
    """Losses, what hooks heard, and parameters, of a few steps."""
    torch.manual_seed(0)
    model, inputs = build(), torch.randn(4, 6)
    heard: list[Any] = []
    handles = register(model, heard) if before else []
    if fitted:
        bayplan.fit(
            model, inputs, lambda y: y.square().mean(), memory="1GiB", time_limit_seconds=0.1
        )
    assert not heard, "planning is not training"
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        if step == 1 and not before:
            handles = register(model, heard)
        if step == STEPS - 1:
            for handle in handles:
                handle.remove()
        loss = model(inputs, scale=2.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.detach().clone(), f"step {step}: {len(heard)} calls"]
    return [*told, *heard, *(each.detach() for each in model.parameters())]


def assert_equal(planned: list[Any], plain: list[Any]) -> None:
    assert len(planned) == len(plain)
    for one, other in zip(planned, plain, strict=True):
        assert one.equal(other) if isinstance(one, torch.Tensor) else one == other


def kind(register: Callable[[nn.Module, list[Any]], list[Any]]) -> Callable[..., Any]:
    HOOKS[register.__name__.replace("_", " ")] = register
    return register


@kind
def keeps_features(model, heard):
    return [model.first.register_forward_hook(lambda m, i, output: heard.append(output.detach()))]


@kind
def keeps_what_is_then_overwritten(model, heard):
    return [model.block[0].register_forward_hook(lambda m, i, o: heard.append(o.detach()))]


@kind
def keeps_statistics(model, heard):
    return [model.first.register_forward_hook(lambda m, i, o: heard.append(o.detach().std()))]


@kind
def keeps_inputs(model, heard):
    return [model.last.register_forward_pre_hook(lambda m, inputs: heard.append(inputs[0].mean()))]


class Meter:
    def __init__(self, heard: list[Any]) -> None:
        self.calls, self.heard = 0, heard

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        self.heard.append(self.calls)


@kind
def counts_in_an_object(model, heard):
    return [model.first.register_forward_hook(Meter(heard))]


@kind
def keeps_by_name(model, heard):
    features: dict[str, torch.Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        features[name] = output.detach()

    def tell(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        heard.extend([*features, *features.values()])

    parts = [(name, module) for name, module in model.named_modules() if name]
    handles = [m.register_forward_hook(lambda *a, n=name: keep(n, *a)) for name, m in parts]
    return [*handles, model.register_forward_hook(tell)]


@kind
def of_a_method_that_changes_a_buffer(model, heard):
    model.register_buffer("mean", torch.zeros(8), persistent=False)

    def update(self, module, inputs, output):
        self.mean.mul_(0.9).add_(output.detach().mean(0))

    hook = MethodType(update, model)
    told = model.register_forward_hook(lambda m, i, output: heard.append(m.mean.clone()))
    return [model.first.register_forward_hook(hook), told]


@kind
def draws_random_numbers(model, heard):
    return [model.first.register_forward_hook(lambda m, i, o: o + torch.randn_like(o))]


@kind
def changes_outputs(model, heard):
    return [model.first.register_forward_hook(lambda m, i, output: output * 1.5)]


@kind
def changes_inputs(model, heard):
    return [model.last.register_forward_pre_hook(lambda m, inputs: (inputs[0] + 1,))]


@kind
def sees_keywords(model, heard):
    def hook(module, args, kwargs, output):
        heard.append(sorted(kwargs))
        return output + kwargs.get("scale", 0.5)

    modules = model, model.first
    return [m.register_forward_hook(hook, with_kwargs=True) for m in modules]


@kind
def of_the_model_changes_keywords(model, heard):
    def hook(module, args, kwargs):
        heard.append(dict(kwargs))
        return args, {"scale": 3.0}

    return [model.register_forward_pre_hook(hook, with_kwargs=True)]


@kind
def of_the_model_asks_for_values(model, heard):
    return [model.register_forward_hook(lambda m, i, output: heard.append(output.mean().item()))]


@kind
def asks_for_values(model, heard):
    return [model.first.register_forward_hook(lambda m, i, o: heard.append(o.sum().item()))]


@kind
def of_the_model_hears_of_its_backward(model, heard):
    return [
        model.register_full_backward_hook(lambda m, i, o: heard.append(o[0].clone())),
        model.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 2,)),
    ]


@kind
def first_and_always(model, heard):
    for name in ("a", "b"):
        model.first.register_forward_hook(
            lambda *_, n=name: heard.append(n), prepend=True, always_call=True
        )
    return []


@kind
def of_parameters(model, heard):
    weight = model.first.weight
    return [
        weight.register_hook(lambda gradient: gradient * 2),
        weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone())),
    ]


@kind
def scales_the_gradient_of_an_output(model, heard):
    def hook(module, inputs, output):
        output.register_hook(lambda gradient: gradient * 0.5)

    return [model.first.register_forward_hook(hook)]


@kind
def of_all_modules(model, heard):
    home = nn.modules.module
    return [
        home.register_module_forward_hook(lambda m, i, o: heard.append(type(m).__name__)),
        home.register_module_forward_pre_hook(
            lambda m, i: (i[0] * 2,) if isinstance(m, nn.ReLU) else None
        ),
    ]


# Others of their kind are quick.
SLOW = {"keeps statistics", "keeps inputs", "changes inputs", "first and always"}
SLOW |= {"draws random numbers", "keeps what is then overwritten"}


@pytest.mark.parametrize("before", [True, False], ids=["before fit", "after fit"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in HOOKS]
)
@pytest.mark.usefixtures("_no_global_hooks")
def test_hook_is_called_as_in_plain_training(name, before):
    plain = train(HOOKS[name], fitted=False, before=before)
    for table in torch_compat.global_hooks():
        table.clear()
    assert_equal(train(HOOKS[name], fitted=True, before=before), plain)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "full backward": (
        lambda m, heard: [m.block[0].register_full_backward_hook(lambda *_: None)],
        r"the module 'block\.0' has a backward hook.*force_eager",
    ),
    "backward pre": (
        lambda m, heard: [m.first.register_full_backward_pre_hook(lambda *_: None)],
        "the module 'first' has a backward hook.*force_eager",
    ),
    "old backward": (
        lambda m, heard: [m.first.register_backward_hook(lambda *_: None)],
        "the module 'first' has a backward hook.*force_eager",
    ),
    "backward of all modules": (
        lambda m, heard: [nn.modules.module.register_module_full_backward_hook(lambda *_: None)],
        "a backward hook on all modules.*force_eager",
    ),
    "gradient of an output, kept": (
        lambda m, heard: [
            m.first.register_forward_hook(lambda *a: a[2].register_hook(heard.append) and None)
        ],
        "changes something outside of it.*register_hook",
    ),
    "a hook that registers others": (
        lambda m, heard: [
            m.first.register_forward_hook(lambda *a: a[0].register_forward_hook(print) and None)
        ],
        "Forward hooks are traced.*'first'",
    ),
}


@pytest.mark.parametrize("before", [True, False], ids=["before fit", "after fit"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("_no_global_hooks")
def test_hook_that_cannot_be_called_is_refused_by_name(name, before):
    register, message = REFUSED[name]
    with pytest.raises(bayplan.BayplanError, match=f"(?s){message}"):
        train(register, fitted=True, before=before, build=partial(Model, in_place=False))


def test_refused_hook_works_without_a_plan_and_the_plan_goes_on_without_the_hook():
    model, inputs, heard = Model(), torch.randn(4, 6), []
    bayplan.fit(model, inputs, lambda y: y.mean(), memory="1GiB", time_limit_seconds=0.1)
    handle = model.first.register_full_backward_hook(lambda *_: heard.append(1))
    with torch.compiler.set_stance("force_eager"):
        model(inputs).mean().backward()
    handle.remove()
    model(inputs).mean().backward()
    assert heard == [1]


def weighted() -> nn.Module:
    model = Model()
    weight_norm(model.first)  # by a hook before the forward
    nn.utils.spectral_norm(model.last)
    parametrizations.weight_norm(model.block[0])
    return model


def test_weight_norms_by_hooks_and_by_parametrizations():
    results = [
        train(lambda *_: [], fitted=fitted, before=True, build=weighted) for fitted in (False, True)
    ]
    assert_equal(results[1], results[0])


def test_features_of_a_hook_may_be_part_of_the_loss():
    gradients = []
    for fitted in (False, True):
        torch.manual_seed(0)
        model, inputs = Model(), torch.randn(4, 6)
        features: list[torch.Tensor] = []
        model.block[0].register_forward_hook(lambda m, i, o, kept=features: kept.append(o * 1))
        if fitted:
            bayplan.fit(model, inputs, lambda y: y.mean(), memory="1GiB", time_limit_seconds=0.1)
        for _ in range(3):
            (model(inputs).square().mean() + features.pop().square().sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_equal(gradients[1], gradients[0])


def test_library_that_installs_hooks_in_its_first_call():
    transformers = pytest.importorskip("transformers")

    def total(output: Any) -> torch.Tensor:
        return output.loss + output.hidden_states[1].mean()

    losses = []
    for fitted in (False, True):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
        )
        config.output_hidden_states = True
        model, tokens = transformers.BertForMaskedLM(config), torch.randint(20, (2, 8))
        batch = {"input_ids": tokens, "labels": tokens}
        if fitted:
            bayplan.fit(model, batch, total, memory="1GiB", time_limit_seconds=0.1)
        for _ in range(2):
            output = model(**batch)
            total(output).backward()
        losses.append([output.loss, model.bert.embeddings.word_embeddings.weight.grad])
    assert_equal(losses[1], losses[0])


global_calls: list[int] = []


def counting_globally(*_: Any) -> None:
    global_calls.append(1)


def test_hook_that_keeps_things_in_globals_is_not_called_while_planning():
    model, inputs = Model(), torch.randn(4, 6)
    model.first.register_forward_hook(counting_globally)
    bayplan.check(model, inputs, lambda y: y.mean(), memory="1GiB")
    bayplan.profile(model, inputs, lambda y: y.mean(), repeats=1)
    assert not global_calls


def test_model_that_is_traced_at_every_step_says_so():
    model, inputs, seen = Model(), torch.randn(4, 6), []
    bayplan.fit(model, inputs, lambda y: y.mean(), memory="1GiB", time_limit_seconds=0.1)
    model.first.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(15):
        model(inputs)
    with pytest.warns(UserWarning, match="traced 16 times at the same shapes.*like a counter"):
        model(inputs)
    assert len(seen) == 16


def test_hooks_that_a_library_collects_tensors_with_do_not_name_the_user():
    model = Model()
    hook = eval(compile("lambda *_: None", "/x/site-packages/library/collecting.py", "eval"))
    model.first.register_forward_hook(partial(hook))
    assert not hooked_text(model)
    # torch's own, which train for quantisation: `fit` refused these models and blamed their hooks.
    torchs = import_module("torch.ao.quantization.quantize")._observer_forward_hook
    model.first.register_forward_hook(torchs)
    assert not hooked_text(model)
    typed = eval(compile("lambda *_: None", "<ipython-input-1>", "eval"))
    model.last.register_forward_hook(typed)
    assert "'last'" in hooked_text(model)
    model.first.register_forward_hook(lambda *_: None)
    assert "'first'" in hooked_text(model)
