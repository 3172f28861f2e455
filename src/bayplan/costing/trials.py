"""Trying a kernel in a child process first, which dies in our place.

A kernel that takes indices, lengths or bytes of its own making may read memory by them without
looking, and made-up ones could end the process. So such a call is made once in a forked child.
"""

import faulthandler
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from bayplan import torch_compat
from bayplan.devices.device import device_of

__all__ = ["can_try", "has_whole_numbers", "may_crash", "survives"]

aten = torch.ops.aten

_PATIENCE_SECONDS = 10.0
# Kernels that take indices, for which 0 is one always: to be tried by nobody.
_INDEXED = {
    aten.embedding,
    aten.embedding_dense_backward,
    aten.gather,
    aten.index,
    aten.index_add,
    aten.index_put,
    aten.index_select,
    aten.max_pool2d_with_indices_backward,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.scatter,
    aten.scatter_add,
}


def may_crash(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call reads memory by the values of its arguments, for all we know.

    Functions of ours are as harmless as the operator that they are given to call.
    """
    if not isinstance(operator, torch_compat.OpOverload):
        is_given = bool(args) and isinstance(args[0], torch_compat.OpOverload)
        return is_given and may_crash(args[0], args[1:], kwargs)
    # Pointwise operators compute with integers and read nothing by them.
    is_harmless = operator.is_view or torch.Tag.pointwise in operator.tags
    is_harmless = is_harmless or operator.overloadpacket in _INDEXED
    return not is_harmless and has_whole_numbers((args, kwargs))


def has_whole_numbers(arguments: Any) -> bool:
    return any(
        not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        for tensor in torch_compat.tensors_in(arguments)
    )


def can_try(arguments: Any) -> bool:
    """Whether a call can be tried in a child: devices other than the CPU do not survive a fork."""
    leaves = torch_compat.tree_leaves(arguments)
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    devices |= {leaf for leaf in leaves if isinstance(leaf, torch.device)}
    return hasattr(os, "fork") and all(device_of(device).runs_cpu_kernels for device in devices)


def survives(call: Callable[[], Any]) -> bool:
    """Whether a process that makes a call comes back from it, with or without an error."""
    with warnings.catch_warnings(action="ignore"):  # Python's, of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # nobody wants to read how it died
            torch.set_num_threads(1)  # the threads of our parent are not with us
            call()
        except BaseException:
            os._exit(0)
        os._exit(0)
    limit = time.monotonic() + _PATIENCE_SECONDS
    pause = 0.0005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
