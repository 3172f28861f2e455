"""What a figure needs beside it to mean something later."""

import platform
import subprocess
import sys

import torch

from bayplan.devices.machine import cache_directory, describe_machine


def test_description_names_what_times_depend_on():
    machine = describe_machine()
    assert machine["torch"] == torch.__version__
    assert machine["python"] == platform.python_version()
    assert machine["threads"] == str(torch.get_num_threads())
    assert all(isinstance(word, str) and word for word in machine.values())
    assert set(machine) == {
        *("bayplan", "torch", "python", "system", "processor", "cores", "threads")
    }


def test_description_follows_the_number_of_threads():
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert describe_machine()["threads"] == "1"
    finally:
        torch.set_num_threads(num_threads)


SETTINGS = {
    "torch.use_deterministic_algorithms(True)": "deterministic algorithms",
    "torch.set_float32_matmul_precision('medium')": "oneDNN float32 products",
    "torch.set_float32_matmul_precision('high')": "CUDA float32 products",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "CUDA float32 products",
    "torch.backends.cuda.matmul.allow_tf32 = True": "CUDA float32 products",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False": (
        "CUDA bfloat16 reductions"
    ),
    "torch.backends.cudnn.benchmark = True": "cuDNN benchmark",
    "torch.backends.cudnn.deterministic = True": "cuDNN deterministic",
    "torch.backends.cudnn.allow_tf32 = False": "cuDNN float32 convolutions",
    "torch.backends.cuda.enable_flash_sdp(False)": "flash attention",
    "torch.backends.cuda.enable_mem_efficient_sdp(False)": "memory-efficient attention",
    "torch.backends.cuda.enable_cudnn_sdp(False)": "cuDNN attention",
    "torch.backends.cuda.enable_math_sdp(False)": "composed attention",
}


def test_description_names_settings_that_choose_other_kernels():
    """All in a process of their own, each in a child of it, as torch refuses to take some back."""
    script = f"""
import os, torch
from bayplan.devices.machine import describe_machine
before = describe_machine()
for code, name in {SETTINGS!r}.items():
    child = os.fork()
    if child == 0:
        exec(code)
        os._exit(0 if name in describe_machine() and name not in before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, code
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_processor_is_unknown_rather_than_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("bayplan.devices.machine.Path", lambda path: tmp_path / "nothing there")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert describe_machine()["processor"] == "unknown"


def test_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "chosen"
    monkeypatch.delenv("BAYPLAN_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "bayplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / "home" / ".cache" / "bayplan"
    assert not list(tmp_path.iterdir())  # asking makes no folder
