"""Turning what goes wrong inside a model into an error that names the user's line."""

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from bayplan import torch_private
from bayplan.capturing.locate import is_users_file, short_path
from bayplan.data.errors import BayplanError, CaptureError

__all__ = ["explained", "users_traceback"]


@contextmanager
def explained() -> Iterator[None]:
    """Name the user's line behind any error of the step; ours pass through."""
    try:
        yield
    except BayplanError:
        raise
    except torch_private.VALUE_DEPENDENT_ERRORS as fault:
        raise _needs_value(fault) from fault
    except (
        torch_private.UnsupportedOperatorException,
        torch_private.UnsupportedFakeTensorException,
    ) as fault:
        raise CaptureError(
            f"{_users_place(fault)} calls an operator that torch cannot run without data ({fault})."
            " Register a fake implementation with torch.library.register_fake."
        ) from fault
    except Exception as fault:
        if ".numpy() is not supported" in str(fault):
            raise _needs_value(fault) from fault
        raise CaptureError(
            f"the model fails in its own code at {_users_place(fault)}:"
            f" {type(fault).__name__}: {_first_line(fault)}"
        ) from fault


def users_traceback(fault: BaseException) -> str:
    """The traceback behind an error, only its frames in the user's files."""
    frames = [
        frame
        for frame in traceback.extract_tb(fault.__traceback__)
        if is_users_file(frame.filename)
    ]
    if not frames:
        return ""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return "".join(lines + traceback.format_exception_only(fault))


def _needs_value(fault: BaseException) -> CaptureError:
    return CaptureError(
        f"{_users_place(fault)} needs a tensor's value, which is not known before the step runs."
        " Keep the decision out of the step: pass it in as a Python number, or compute both sides"
        " and choose with torch.where."
    )


def _users_place(fault: BaseException) -> str:
    """File, line and text of the innermost frame that is the user's."""
    place = "a place outside the model's files"
    for frame in traceback.extract_tb(fault.__traceback__):
        if is_users_file(frame.filename) and frame.lineno is not None:
            text = linecache.getline(frame.filename, frame.lineno).strip()
            place = f"{short_path(frame.filename)}:{frame.lineno} (`{text}`)"
    return place


def _first_line(fault: BaseException) -> str:
    return str(fault).strip().split("\n", 1)[0]
