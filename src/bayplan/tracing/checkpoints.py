"""`torch.utils.checkpoint` inside a model: refused where plain training has other numbers.

A traced checkpoint is only a hint that a part of the forward may be computed again; the plan
decides what is. Plain training computes it again in any case, and that can be seen from outside:

1. Buffers that the part changes, like the statistics of a BatchNorm, are changed twice.
2. Random numbers are drawn anew with `preserve_rng_state=False`.
3. With `use_reentrant=True` gradients are those of a backward of its own: none at all where no
   input of the part requires one, and added one by one where a parameter is used elsewhere, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.data.errors import CaptureError

__all__ = ["with_checkpoints_checked"]

Partition = Callable[..., Any]
_OR_LEAVE_OUT = "or leave the checkpoint out, because the plan chooses what is computed again"


def with_checkpoints_checked(module: fx.GraphModule, partition: Partition) -> Partition:
    """A partition of a joint graph that refuses checkpoints which would not be plain training's.

    Args:
        module: what the joint graph is traced from.

    Raises:
        CaptureError: at once, where it is the fault of how a checkpoint is called.
    """
    calls = torch_compat.checkpoints_in(module)
    for call in calls:
        if call.kwargs.get("use_reentrant", True) is not False:
            raise CaptureError(
                f"{_place(call)} is a checkpoint with use_reentrant=True, the default, which has"
                " gradients of its own. Say use_reentrant=False, which is what torch recommends,"
                f" {_OR_LEAVE_OUT}"
            )
    if not calls:
        return partition
    draws_anew = any(not call.kwargs.get("preserve_rng_state", True) for call in calls)

    def checked(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        inside = [node for node in joint.graph.nodes if torch_compat.is_checkpointed(node)]
        changed = {*torch_compat.changes_of_inputs(joint.graph)}
        for node in inside:
            if node in changed:
                raise CaptureError(
                    "a checkpointed part of the model changes a buffer, like the statistics of a"
                    " BatchNorm; plain training changes it a second time in backward. Take it out"
                    f" of the checkpoint, {_OR_LEAVE_OUT}. It is at {_place(node)}"
                )
            tags = getattr(node.target, "tags", ())
            if draws_anew and torch.Tag.nondeterministic_seeded in tags:
                raise CaptureError(
                    "a checkpoint with preserve_rng_state=False has random numbers in it, and plain"
                    " training draws others when it computes them again. Leave that argument out,"
                    f" {_OR_LEAVE_OUT}. It is at {_place(node)}"
                )
        return partition(joint, *args, **kwargs)

    return checked


def _place(node: fx.Node) -> str:
    """The file, line and text that a node comes from."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip(" ^~")]
    return ": ".join(lines[-2:]) or "an unknown line"
