"""The promise that the house stays livable: imports go one way, and torch stays where it belongs.

The contracts themselves are written in `pyproject.toml`; here they are run, and what they cannot
see is checked: modules that really load torch, and uses of torch's private names.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "bayplan"
PRIVATE_TORCH = [SOURCE / f"torch_{name}.py" for name in ("answers", "compat", "gpu", "joint")]


def test_import_contracts_are_kept():
    script = "from importlinter.cli import lint_imports_command as main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


IMPORT_ALL_BELOW = """
import importlib, pkgutil, sys
name = sys.argv[1]
module = importlib.import_module(name)
for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
    importlib.import_module(found.name)
    assert "torch" not in sys.modules, found.name + " imports torch"
assert "torch" not in sys.modules, name + " imports torch"
"""


@pytest.mark.parametrize(
    "name",
    [
        "bayplan",
        "bayplan.cli",
        "bayplan.data",
        "bayplan.planning",
        "bayplan.reporting",
        "bayplan.simulating",
    ],
)
def test_importing_leaves_torch_out(name):
    if name == "bayplan":  # its parts may import torch, itself it may not
        script = "import sys, bayplan; assert 'torch' not in sys.modules, 'bayplan imports torch'"
    else:
        script = IMPORT_ALL_BELOW
    result = subprocess.run(
        [sys.executable, "-c", script, name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def private_torch_names(code: str) -> list[str]:
    """Every name with a leading underscore that code takes from below torch, as `line: name`.

    Found: imports, attributes of torch or of anything imported from it, and names in strings
    handed to a call (`import_module("torch._x")`). Not found: attributes of instances
    (`tensor._base`), whose type the syntax does not tell.
    """
    tree = ast.parse(code)
    path_of: dict[str, str] = {}
    found: set[tuple[int, str]] = set()

    def note(line: int, path: str) -> None:
        parts = path.split(".")
        if parts[0] == "torch" and any(re.match(r"_(?!_)", part) for part in parts[1:]):
            found.add((line, path))

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                note(node.lineno, name.name)
                if name.asname:
                    path_of[name.asname] = name.name
                else:
                    root = name.name.split(".")[0]
                    path_of[root] = root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                path = f"{node.module}.{name.name}"
                note(node.lineno, path)
                path_of[name.asname or name.name] = path

    def resolve(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return path_of.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = resolve(node.value)
            return owner and f"{owner}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            note(node.lineno, resolve(node) or "")
        elif isinstance(node, ast.Call):
            constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            for text in (value for value in constants if isinstance(value, str)):
                if re.fullmatch(r"torch(\.\w+)+", text):
                    note(node.lineno, text)
            if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
                owner, name = resolve(node.args[0]), node.args[1]
                if owner and isinstance(name, ast.Constant):
                    note(node.lineno, f"{owner}.{name.value}")
    return [f"{line}: {path}" for line, path in sorted(found)]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch.add(1, 2)\ntorch.__version__", []),
        ("import torch._dynamo", ["1: torch._dynamo"]),
        ("import torch._inductor.config as config", ["1: torch._inductor.config"]),
        ("from torch import _C", ["1: torch._C"]),
        ("from torch._subclasses import FakeTensorMode", ["1: torch._subclasses.FakeTensorMode"]),
        ("from torch.utils import _pytree as tree", ["1: torch.utils._pytree"]),
        ("import torch\nx = torch._C", ["2: torch._C"]),
        ("import torch.nn.functional as F\nF._pad", ["2: torch.nn.functional._pad"]),
        ("from torch import nn\nnn.Module._call_impl", ["2: torch.nn.Module._call_impl"]),
        ("import torch\ngetattr(torch, '_C')", ["2: torch._C"]),
        ("import importlib\nimportlib.import_module('torch._C')", ["2: torch._C"]),
        ("def f(self):\n  return self._torch._x", []),
        ('"""Speaks of torch._C in words."""', []),
    ],
)
def test_private_names_are_found(code, found):
    assert private_torch_names(code) == found


def test_private_names_of_torch_are_used_in_one_file_only():
    uses = {
        str(path.relative_to(ROOT)): names
        for path in sorted(SOURCE.rglob("*.py"))
        if path not in PRIVATE_TORCH and (names := private_torch_names(path.read_text("utf-8")))
    }
    assert not uses, f"move these to {[path.name for path in PRIVATE_TORCH]}: {uses}"


# What asks for the kind of a device, where it should ask `device_of` for the property it needs.
DEVICE_KINDS = re.compile(
    r"""torch\.(backends\.)?(cuda|cudnn|xpu|mps)\b|backends\.cud|import cuda\b"""
    r"""|\.(cuda|xpu)\(|\.is_(cuda|xpu|mps|cpu)\b|["']cuda(:\d+)?["']"""
    r"""|[=!]= ["'](cpu|xpu|mps)["']|["'](cpu|xpu|mps)["'] [=!]="""
    r"""|(not )?in [\[({]["'](cpu|xpu|mps)["']|case ["'](cpu|xpu|mps)["']"""
    r"""|device\.type (in|not in|==|!=) |device [=!]= torch\.device\("""
)


@pytest.mark.parametrize(
    "line",
    [
        'if value.device.type == "cpu":',
        "if 'cpu' != device:",
        "if device.type in kinds:",
        "if kind in ('cpu', 'mps'):",
        "torch.cuda.synchronize()",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cudnn.benchmark",
        "from torch.backends import cudnn, backends.cudnn",
        "from torch import cuda",
        'torch.device("cuda", 1)',
        'torch.device("cuda:1")',
        "batch.cuda()",
        "if tensor.is_cuda:",
        "if tensor.is_cpu:",
        'if tensor.device == torch.device("cpu"):',
    ],
)
def test_questions_about_the_kind_of_a_device_are_found(line):
    assert DEVICE_KINDS.search(line)


# Functions of torch's own that Dynamo has answers for, which are given and not asked.
ANSWERED = {
    '"torch.cuda.is_current_stream_capturing",',
    "torch.compiler.substitute_in_graph(torch.xpu.is_current_stream_capturing)(_not_capturing)",
}


def test_devices_are_told_apart_in_their_room_only():
    own = {SOURCE / "torch_gpu.py", *(SOURCE / "devices").rglob("*.py")}
    asked = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted({*SOURCE.rglob("*.py")} - own)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if DEVICE_KINDS.search(line) and line.strip() not in ANSWERED
    ]
    assert not asked, f"ask bayplan.devices.device.device_of instead: {asked}"
