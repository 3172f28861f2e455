"""Turning what goes wrong inside a model into an error that names the user's line."""

import linecache
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from bayplan import torch_private
from bayplan.data.errors import BayplanError, CaptureError
from bayplan.data.source import Owner, owner_of, short_path

__all__ = ["explained", "users_traceback"]

# What torch says of an operator made by torch.library.custom_op, in a plain RuntimeError.
_NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\((.+?)\)>")


@contextmanager
def explained() -> Iterator[None]:
    """Name the user's line behind any error of the step; ours pass through."""
    try:
        yield
    except BayplanError:
        raise
    except torch_private.VALUE_DEPENDENT_ERRORS as fault:
        raise _needs_value(fault) from fault
    except torch_private.UnsupportedOperatorException as fault:
        raise _needs_fake(fault, str(fault)) from fault
    except torch_private.UnsupportedFakeTensorException as fault:
        raise CaptureError(
            f"{_users_place(fault)} makes a tensor that torch cannot describe without data: {fault}"
        ) from fault
    except Exception as fault:
        if ".numpy() is not supported" in str(fault):
            raise _needs_value(fault) from fault
        custom = _NO_FAKE.search(str(fault))
        if custom is not None:
            raise _needs_fake(fault, custom[1]) from fault
        raise CaptureError(
            f"the model fails in its own code at {_users_place(fault)}:"
            f" {type(fault).__name__}: {_first_line(fault)}"
        ) from fault


def users_traceback(fault: BaseException) -> str:
    """The traceback behind an error, without the frames of torch, Python and us."""
    frames = [
        frame
        for frame in traceback.extract_tb(fault.__traceback__)
        if owner_of(frame.filename) is not Owner.BENEATH
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


def _needs_fake(fault: BaseException, operator: str) -> CaptureError:
    return CaptureError(
        f"{_users_place(fault)} calls the operator {operator}, which torch cannot run without data."
        " Register a fake implementation, which returns an empty tensor of the right shape, with"
        " torch.library.register_fake."
    )


def _users_place(fault: BaseException) -> str:
    """File, line and text of the innermost frame that is the user's, else a library's."""
    frames = traceback.extract_tb(fault.__traceback__)
    for owner in (Owner.USER, Owner.LIBRARY):
        for frame in reversed(frames):
            if owner_of(frame.filename) is owner and frame.lineno is not None:
                text = linecache.getline(frame.filename, frame.lineno).strip()
                return f"{short_path(frame.filename)}:{frame.lineno} (`{text}`)"
    return "a place outside the model's files"


def _first_line(fault: BaseException) -> str:
    return str(fault).strip().split("\n", 1)[0]
