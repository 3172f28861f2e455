import pytest

from bayplan.data import errors
from bayplan.data.errors import BayplanError, ExitCode, did_you_mean


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("UsageError", 2),
        ("FileFault", 2),
        ("CaptureError", 2),
        ("DoesNotFit", 3),
        ("PlanBroken", 4),
        ("ForeignPlan", 5),
    ],
)
def test_each_error_has_its_exit_code(name, code):
    error = getattr(errors, name)
    assert issubclass(error, BayplanError)
    assert error.exit_code == code


def test_every_error_is_a_value_error_for_those_who_do_not_know_bayplan():
    with pytest.raises(ValueError, match="needs 9 bytes"):
        raise errors.DoesNotFit("needs 9 bytes")


def test_exit_codes_are_as_documented():
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "BUG": 1,
        "USAGE": 2,
        "DOES_NOT_FIT": 3,
        "PLAN_BROKEN": 4,
        "FOREIGN_PLAN": 5,
    }


def test_no_error_claims_success_or_a_bug():
    classes = [getattr(errors, name) for name in errors.__all__]
    codes = {c.exit_code for c in classes if isinstance(c, type) and issubclass(c, BayplanError)}
    assert codes.isdisjoint({ExitCode.DONE, ExitCode.BUG})


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("resnet5", "did you mean 'resnet50'?"),
        ("vgg", "did you mean 'vgg16' or 'vgg19'?"),
        ("zebra", "known: resnet50, vgg16, vgg19"),
    ],
)
def test_hint_names_the_closest_or_all(word, hint):
    assert did_you_mean(word, iter(["vgg19", "resnet50", "vgg16"])) in (
        hint,
        hint.replace("'vgg16' or 'vgg19'", "'vgg19' or 'vgg16'"),
    )
