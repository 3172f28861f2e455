"""`--replan`: attempts in processes of their own, each within less than the one before."""

import subprocess
import sys

import pytest

from bayplan.cli.replanning import Attempt
from bayplan.data.errors import DoesNotFit, RanOut

# What a run does, without the training.
SCRIPT = """\
import os, signal, sys
from bayplan.cli.replanning import attempts

attempt = attempts()
if isinstance(attempt, int):
    assert "torch" not in sys.modules  # its threads would not survive the fork
    sys.exit(attempt)
limit = attempt.limit_bytes
print("within", limit, flush=True)
HOW
"""
RAN_OUT = """\
attempt.planned(1000)
if limit is None or limit > 800:
    attempt.ran_out(900 if limit is None else 700)
    sys.exit(4)
"""


def attempted(how):
    code = SCRIPT.replace("HOW", how)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr


def test_each_attempt_is_within_less_until_one_ends():
    code, out, err = attempted(RAN_OUT)
    assert code == 0, err
    assert out == ["within None", "within 900", "within 700"]
    assert err.count("bayplan: planning anew within") == 2


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("attempt.planned(1000); sys.exit(4)", 4),  # broke its plan in another way
        ("attempt.ran_out(900); sys.exit(4)", 4),  # ran out before there was a plan
        ("sys.exit(3)", 3),
        ("attempt.planned(1000); os.kill(os.getpid(), signal.SIGKILL)", 137),  # not by the kernel
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(143));"
         " os.kill(os.getppid(), signal.SIGTERM); signal.pause()", 143),
    ],
)  # fmt: skip
def test_what_ends_for_another_reason_has_its_exit_code(how, code):
    ended, out, err = attempted(how)
    assert (ended, out) == (code, ["within None"]), err


def test_the_smallest_plan_is_tried_where_the_limit_is_below_it():
    def within(limit_bytes):
        if limit_bytes < 950:
            raise DoesNotFit("needs 950", smallest_bytes=950)
        return limit_bytes

    assert Attempt(900, 1000).plan(within) == 950
    with pytest.raises(RanOut, match="no smaller plan to try than the one of 950 B"):
        Attempt(900, 950).plan(within)


def test_it_needs_checkpoints_and_a_target(bayplan, check_refusal):
    check_refusal(bayplan("run", "resnet18", "--replan"), 2, "need --checkpoint DIR")
