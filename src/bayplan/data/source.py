"""Whose file a line of code stands in, so that a message names the user's and never a stranger's.

Only the path tells, because that is all that a stack frame or a traceback has.
"""

import os
import sysconfig
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["Owner", "is_users_file", "owner_of", "short_path"]


class Owner(StrEnum):
    USER = "user"  # also the reference models, which stand in for a user's
    LIBRARY = "library"  # installed beside us: transformers, a command line's parser
    BENEATH = "beneath"  # what every step runs on: torch, Python, us


# With the separator at the end: torchvision is not torch.
_OUR_ROOT = str(Path(__file__).parent.parent) + os.sep
_OUR_MODELS = _OUR_ROOT + "models" + os.sep
_LOADERS = tuple(_OUR_MODELS + name for name in ("registry.py", "targets.py"))  # call models
_PYTHON_ROOT = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@cache
def owner_of(path: str) -> Owner:
    """Tell who wrote a file; what has no file (`<string>`) is Python's own."""
    if path.startswith(_OUR_MODELS) and path not in _LOADERS:
        return Owner.USER
    if path.startswith(("<", _OUR_ROOT, _torch_root())):
        return Owner.BENEATH
    if any(folder in path for folder in _INSTALLED):
        return Owner.LIBRARY
    return Owner.BENEATH if path.startswith(_PYTHON_ROOT) else Owner.USER


def is_users_file(path: str) -> bool:
    return owner_of(path) is Owner.USER


def short_path(path: str) -> str:
    """A path that means something on another machine: relative, or its last two parts.

    A library is not part of the project, even where its environment lies in the project's folder.
    """
    here, file = Path.cwd(), Path(path)
    if owner_of(path) is not Owner.LIBRARY and file.is_relative_to(here):
        return str(file.relative_to(here))
    return "/".join(file.parts[-2:])


@cache
def _torch_root() -> str:
    """Found without importing torch; who builds it from source has it outside site-packages."""
    spec = find_spec("torch")
    assert spec is not None, "torch is a dependency"
    assert spec.origin is not None, "torch is a package with a file of its own"
    return str(Path(spec.origin).parent) + os.sep
