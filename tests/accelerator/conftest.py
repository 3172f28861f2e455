"""Tests of this folder run where the test accelerator is registered; `own_process.py` says how."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from device_report import pytest_addoption
from own_process import children, device_library, pytest_configure, pytest_pyfunc_call

__all__ = [
    "children",
    "device_library",
    "pytest_addoption",
    "pytest_configure",
    "pytest_pyfunc_call",
]
