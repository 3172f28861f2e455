"""Where in the user's model an operator comes from: its module path and source line.

Forward operators are found on the Python stack. Backward ones run from C++ with no user frame, but
autograd numbers each forward operator it records and its gradient formula carries the same number;
so the forward's place is remembered by number and looked up again.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from bayplan import torch_private, training

__all__ = ["Locator", "Place", "is_users_file", "short_path"]

Place = tuple[str, str]  # module path, source line

# With the separator at the end: torchvision is not torch.
_TORCH_ROOT = str(Path(torch.__file__).parent) + os.sep
_PYTHON_ROOT = sysconfig.get_path("stdlib") + os.sep
_OUR_ROOT = str(Path(__file__).parent.parent) + os.sep
_OUR_MODELS = str(Path(_OUR_ROOT) / "models") + os.sep


def is_users_file(path: str) -> bool:
    """Whether a file belongs to the model being captured, not to torch, Python or us."""
    if path.startswith("<") or path.startswith(_TORCH_ROOT):
        return False
    if path.startswith(_OUR_ROOT):
        return path.startswith(_OUR_MODELS)
    return not path.startswith(_PYTHON_ROOT) or "site-packages" in path


def short_path(path: str) -> str:
    """A path that means something on another machine: relative, or its last two parts."""
    parts = Path(path).parts
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return "/".join(parts[-2:])


class Locator:
    """Knows the module that is running and the places of all forward operators so far."""

    def __init__(self, model: nn.Module) -> None:
        self._path_of = {module: path for path, module in model.named_modules()}
        self._running: list[str] = [""]
        self._place_of_sequence: dict[int, Place] = {}
        self._next_sequence = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules in and out while the step runs."""

        def enter(module: nn.Module, _: Any) -> None:
            self._running.append(self._path_of.get(module, self._running[-1]))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._running.pop()

        # Global hooks, for they see modules without touching any; gone when the step is over.
        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        self._next_sequence = torch_private.next_forward_sequence()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_place(self) -> Place:
        """The place of the operator running now, remembered for its gradient."""
        place = (self._running[-1], _users_line())
        upto = torch_private.next_forward_sequence()
        for sequence in range(self._next_sequence, upto):
            self._place_of_sequence[sequence] = place
        self._next_sequence = max(self._next_sequence, upto)
        return place

    def backward_place(self) -> Place:
        """The forward place of the gradient formula running now."""
        sequence = torch_private.current_backward_sequence()
        return self._place_of_sequence.get(-1 if sequence is None else sequence, ("", ""))


def _users_line() -> str:
    """The innermost line of user code on the stack; none where torch's own modules do it all."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == training.__file__:  # whoever started the step stands further out
            return ""
        if is_users_file(path):
            return f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
