"""Where in the user's model an operator comes from: its module path and source line.

Forward operators are found on the Python stack. Backward ones run from C++ with no user frame, but
autograd numbers each forward operator it records and its gradient formula carries the same number;
so the forward's place is remembered by number and looked up again.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from bayplan import torch_private
from bayplan.data.source import Owner, is_users_file, owner_of, short_path
from bayplan.training import TrainingStep

__all__ = ["Locator", "Place"]

Place = tuple[str, str]  # module path, source line

# Whoever started the step stands further out than this, and made no operator of it.
_STEP_FILE = TrainingStep.__call__.__code__.co_filename


class Locator:
    """Knows the module that is running and the places of all forward operators so far."""

    def __init__(self, model: nn.Module) -> None:
        self._path_of = {module: path for path, module in model.named_modules()}
        self._model_files = _files_of(model)
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
        place = (self._running[-1], _line_of_operator(self._model_files))
        upto = torch_private.next_forward_sequence()
        for sequence in range(self._next_sequence, upto):
            self._place_of_sequence[sequence] = place
        self._next_sequence = max(self._next_sequence, upto)
        return place

    def backward_place(self) -> Place:
        """The forward place of the gradient formula running now."""
        sequence = torch_private.current_backward_sequence()
        return self._place_of_sequence.get(-1 if sequence is None else sequence, ("", ""))


def _files_of(model: nn.Module) -> frozenset[str]:
    """The files of libraries that the model's modules are written in."""
    homes = {sys.modules.get(type(module).__module__) for module in model.modules()}
    paths = {getattr(home, "__file__", None) for home in homes}
    return frozenset(path for path in paths if path and owner_of(path) is Owner.LIBRARY)


def _line_of_operator(model_files: frozenset[str]) -> str:
    """The innermost line of the user's own on the stack, else of a library's model.

    None where torch's modules do it all: better no line than one of a file that is not the model's.
    """
    line = ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _STEP_FILE:
        path = frame.f_code.co_filename
        if is_users_file(path):
            return f"{short_path(path)}:{frame.f_lineno}"
        if not line and path in model_files:
            line = f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return line
