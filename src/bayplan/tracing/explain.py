"""Turning what goes wrong inside a model into an error that names the user's line."""

import errno
import linecache
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bayplan import torch_compat
from bayplan.data.errors import BayplanError, CaptureError, OutOfMemory
from bayplan.data.source import Owner, owner_of, short_path
from bayplan.data.units import format_bytes
from bayplan.devices.device import HOST, default_device
from bayplan.step import loss_of

__all__ = [
    "asked_memory",
    "explained",
    "is_out_of_memory",
    "memory_fault",
    "out_of_memory",
    "users_traceback",
]

# What torch says of an operator made by torch.library.custom_op, in a plain RuntimeError.
_NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\((.+?)\)>")
_NUMPY = ".numpy() is not supported"
_NO_DATA = "its data is not allocated yet"  # where C++ reads a tensor, as lengths of sequences
_SPARSE = re.compile(r"Cannot access storage of Sparse\w*TensorImpl")
# Files of torch's whose frames tell what the model wanted.
_PACKING = os.path.join("torch", "nn", "utils", "rnn.py")
_NESTING = os.path.join("torch", "nested", "")
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # raises plain RuntimeErrors
# As torch's CPU allocator ("4000 bytes"), its CUDA one and numpy ("20.00 MiB") write it.
_ASKED = re.compile(r"(?:tried|unable) to allocate (?:(\d+) bytes|([\d.]+ \w+))", re.IGNORECASE)


@contextmanager
def explained() -> Iterator[None]:
    """Name the user's line behind any error of the step; ours pass through."""
    try:
        yield
    except BayplanError:
        raise
    except Exception as fault:
        raise _explanation(fault) from fault


def _explanation(fault: Exception) -> BayplanError:
    place, text = _users_place(fault), str(fault)
    custom = _NO_FAKE.search(text)
    if by_lengths := _by_lengths(fault):
        return CaptureError(f"{place} {by_lengths}")
    if isinstance(fault, torch_compat.VALUE_DEPENDENT_ERRORS) or _NUMPY in text or _NO_DATA in text:
        return CaptureError(
            f"{place} needs a tensor's value, which is not known before the step runs. Keep the"
            " decision out of the step: pass it in as a Python number, or compute both sides and"
            " choose with torch.where. (Packed sequences decide by their lengths; use padded ones.)"
        )
    if isinstance(fault, torch_compat.UnsupportedOperatorException) or custom is not None:
        operator = text if custom is None else custom[1]
        return CaptureError(
            f"{place} calls the operator {operator}, which torch cannot run without data. Register"
            " a fake implementation, which returns an empty tensor of the right shape, with"
            " torch.library.register_fake."
        )
    if isinstance(fault, torch_compat.UnsupportedFakeTensorException):
        return CaptureError(
            f"{place} makes a tensor that torch cannot describe without data: {text}"
        )
    if _SPARSE.search(text):
        return CaptureError(
            f"{place} meets a sparse tensor, of the model or of the batch, whose memory depends on"
            " values. Use a dense one, or compute with its indices and values (index_add, gather)"
        )
    first_line = text.strip().split("\n", 1)[0]
    frames = traceback.extract_tb(fault.__traceback__)
    culprit = "loss" if any(frame.name == loss_of.__name__ for frame in frames) else "model"
    return out_of_memory(fault) or CaptureError(
        f"the {culprit} fails in its own code at {place}: {type(fault).__name__}: {first_line}"
    )


def _by_lengths(fault: BaseException) -> str:
    """Why a model is refused that packs or nests its samples; empty for others."""
    files = {frame.filename for frame in traceback.extract_tb(fault.__traceback__)}
    if any(file.endswith(_PACKING) for file in files):
        return (
            "packs sequences, whose memory depends on their lengths. Give the recurrent layer"
            " padded sequences, and read the output of each at its own length (`gather`); or train"
            " the model without a plan"
        )
    if any(_NESTING in file for file in files) or "nested_tensor" in str(fault):
        return (
            "makes a nested tensor, whose memory depends on the lengths in it. Use padded tensors"
            " and a mask, or train the model without a plan"
        )
    return ""


def out_of_memory(fault: BaseException) -> OutOfMemory | None:
    """What to tell where memory ran out while a model was built or traced; None for other faults.

    Python's own MemoryError does not say how much was asked for.
    """
    cause = memory_fault(fault)
    if cause is None:
        return None
    # Accelerators have an error of their own.
    device = default_device() if isinstance(cause, torch.OutOfMemoryError) else HOST
    return OutOfMemory(
        f"out of memory while the model was built or traced, at {_users_place(cause)}: it asked for"
        f" {asked_memory(cause)} where {format_bytes(device.free_bytes)} of"
        f" {device.where.type} memory are free. Use a smaller batch, stop other processes, or build"
        " the model's large tensors with torch factory functions, which take no memory while a step"
        " is captured"
    )


def memory_fault(fault: BaseException) -> BaseException | None:
    """The error behind others that says memory ran out; None if there is none."""
    cause: BaseException | None = fault
    while cause is not None and not is_out_of_memory(cause):
        cause = cause.__cause__
    return cause


def asked_memory(fault: BaseException) -> str:
    """How much memory was asked for, in words, when it ran out."""
    asked = _ASKED.search(str(fault))
    return "more" if asked is None else asked[2] or format_bytes(int(asked[1]))


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an error says that memory ran out: torch has three ways to say so, the system one."""
    if isinstance(fault, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(fault, OSError):
        return fault.errno == errno.ENOMEM
    return isinstance(fault, RuntimeError) and _CPU_ALLOCATOR in str(fault)


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


def _users_place(fault: BaseException) -> str:
    """File, line and text of the innermost frame that is the user's, else a library's."""
    frames = traceback.extract_tb(fault.__traceback__)
    for owner in (Owner.USER, Owner.LIBRARY):
        for frame in reversed(frames):
            if owner_of(frame.filename) is owner and frame.lineno is not None:
                text = linecache.getline(frame.filename, frame.lineno).strip()
                return f"{short_path(frame.filename)}:{frame.lineno} (`{text}`)"
    return "a place outside the model's files"
