"""Fixtures that hand out the simulated links of `simulated.py`."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIMULATED = Path(__file__).parent / "simulated.py"
collect_ignore = ["sweep.py"]  # a script that imports its neighbour, as scripts can


def load_simulated() -> Any:
    name = "bayplan_tests_simulated_links"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SIMULATED)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def make_world() -> Callable[..., Any]:
    """`make_world(seed, error=0.3)`: a link of any kind, and what is predicted of it."""
    return load_simulated().random_world


@pytest.fixture(scope="session")
def make_machine() -> Callable[..., Any]:
    """`make_machine(link, noise=0.01, seed=0)`: runs steps and times them."""
    return load_simulated().Machine


@pytest.fixture(scope="session")
def drive_tuner() -> Callable[..., None]:
    """`drive_tuner(tuner, machine)`: runs steps until the tuner has ended."""
    return load_simulated().drive
