"""Mistakes of a user in words: one clear screen, the right exit code, nothing of ours."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (["check", "resnet05"], ["no reference model 'resnet05'", "did you mean", "'resnet50'"]),
        (["check", "zzz"], ["known: alexnet", "module:function"]),
        (["check", "missing:build"], ["cannot find module 'missing'", "PYTHONPATH"]),
        (["check", "pkg.missing:build"], ["cannot find module 'pkg.missing'"]),
        (["check", "train:biuld"], ["has no function 'biuld'", "did you mean 'build'"]),
        (["check", "train:Missing"], ["has no function 'Missing'"]),
        (["check", "train.py:build"], ["write module:function", "my_project.train:build"]),
        (["check", "./train:build"], ["write module:function"]),
        (["check", ":build"], ["write module:function"]),
        (["check", "train:"], ["write module:function"]),
        (["check", "train:build", "--batch", "0"], ["--batch is 0", "at least 1"]),
        (["check", "train:build", "--batch", "-3"], ["--batch is -3", "at least 1"]),
        (["check", "train:build", "--batch", "many"], ["--batch", '"many"']),
        (["check", "train:build", "--batch", "1.5"], ["--batch", '"1.5" is not a whole number']),
        (["run", "plan.json", "--steps", "2.0"], ["--steps", '"2.0" is not a whole number']),
        (["check", "train:build", "--memory", "8XB"], ["cannot read '8XB' as bytes", "8GiB"]),
        (["check", "train:build", "--memory", ""], ["cannot read '' as bytes"]),
        (["check", "train:build", "--memory", "0"], ["not a usable limit"]),
        (["check", "train:build", "--memory", "-1GiB"], ["'-1GiB' as bytes"]),
        (["check", "train:build", "--device", "h10"], ["no device 'h10'", "did you mean 'h100'"]),
        (["check", "train:build", "--device", "qqq"], ["known: a10, a100"]),
        (["check", "train:build", "--device", "no.yaml"], ["cannot read no.yaml"]),
        (["check", "train:build", "--optimizer", "adamx"], ["no optimizer 'adamx'", "'adam'"]),
        (["check", "train:build", "--autocast", "bf61"], ["no autocast 'bf61'", "'bf16'"]),
        (["check", "train:build", "--cluster", "no.yaml"], ["cannot read no.yaml"]),
        (["check", "train:build", "--profile", "no.json"], ["cannot read no.json"]),
        (
            ["check", "train:build", "--device", "h100", "--cluster", "c.yaml"],
            ["--device and --cluster", "give one"],
        ),
        (["check", "train:build", "--bach", "2"], ["--bach", "--batch", "bayplan check --help"]),
        (["check"], ["TARGET", "bayplan check --help"]),
        (["chek", "resnet18"], ["chek", '"check"']),
        (["fit", "resnet18"], ["`bayplan check`", "bayplan.fit"]),
        (["profile", "train:build", "--repeats", "0"], ["repeats is 0", "at least 1"]),
        (["profile", "train:build", "--clock", "cup"], ["no clock 'cup'", "'cpu'"]),
        (["capture", "train:build"], ["--output"]),
        (["simulate", "no.json", "--device", "h100"], ["cannot read no.json"]),
        (["report", "no.json"], ["cannot read no.json"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].islower() else "",
)
def test_mistake_is_named_with_what_would_help(
    bayplan, project, arguments, phrases, check_refusal, files_in
):
    before = files_in(project)
    check_refusal(bayplan(*arguments), 2, *phrases)
    assert files_in(project) == before


FUNCTIONS = """\
def number():
    return 3


def pair():
    return Net(), make_batch(2)


def swapped():
    return make_batch(2), Net(), nn.CrossEntropyLoss()


def word_for_loss():
    return Net(), make_batch(2), "mse"


def no_batch():
    return build(4)


def two_needed(batch_size, width):
    return build(batch_size)


def no_scalar(batch_size=2):
    return Net(), make_batch(batch_size), nn.CrossEntropyLoss(reduction="none")


def frozen(batch_size=2):
    return Net().requires_grad_(False), make_batch(batch_size), nn.CrossEntropyLoss()


def tensor_for_pair(batch_size=2):
    return Net(), make_batch(batch_size)[0], nn.CrossEntropyLoss()
"""


@pytest.mark.parametrize(
    ("function", "options", "phrases"),
    [
        ("number", (), ["must return (model, batch, loss)", "it returns int"]),
        ("pair", (), ["must return (model, batch, loss)", "tuple of 2 items"]),
        ("swapped", (), ["must return (model, batch, loss)", "a module first"]),
        ("word_for_loss", (), ["returns a loss that is not a function but str"]),
        ("no_batch", ("--batch", 2), ["takes no batch size", "--batch 2", "batch_size"]),
        ("two_needed", (), ["needs width", "give those a default"]),
        ("no_scalar", (), ["loss of one number", "(2,)"]),
        ("frozen", (), ["nothing to train", "requires_grad"]),
        ("tensor_for_pair", (), ["pair (inputs, targets)", "a tensor of shape (2, 3, 16, 16)"]),
    ],
)
def test_wrong_function_is_told_what_it_must_return(
    bayplan, add_to_project, function, options, phrases, check_refusal
):
    add_to_project(FUNCTIONS)
    check_refusal(bayplan("check", f"train:{function}", *options), 2, *phrases)


def test_bug_of_ours_says_so_and_exits_1(bayplan, project, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("an invariant broke")

    monkeypatch.setattr("bayplan.preparing.step.simulate_step", fail)
    outcome = bayplan("check", "train:build", "--device", "h100")
    assert outcome.code == 1
    assert "an invariant broke" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("bayplan: this is a bug of bayplan")
