"""Frameworks are optional: bayplan loads none of them, and says what to install."""

import subprocess
import sys

import pytest

FRAMEWORKS = {
    "transformers": "pip install transformers accelerate",
    "lightning": "pip install lightning",
    "accelerate": "pip install accelerate",
}


def ran(script):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


def test_bayplan_loads_no_framework():
    names = sorted({*FRAMEWORKS, "pytorch_lightning", "torchmetrics"})
    script = f"import sys, bayplan.api, bayplan.integrations; print(*sys.modules.keys() & {names})"
    done = ran(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_missing_framework_is_named_with_its_command(name):
    # None in sys.modules is what Python itself takes for a module that is not there.
    script = f"import sys; sys.modules[{name!r}] = None; import bayplan.integrations.{name}"
    done = ran(script)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert last.endswith(f"bayplan.integrations.{name} needs {name}: {FRAMEWORKS[name]}")
