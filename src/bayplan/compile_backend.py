"""`torch.compile(model, backend="bayplan", options={"memory": "8GiB"})`.

torch finds this function by its entry point and hands it the options as keyword arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from bayplan.data.errors import UsageError
from bayplan.data.limit import Limit
from bayplan.devices.machine import cache_directory
from bayplan.planned import PlannedBackend, within

__all__ = ["bayplan"]


def bayplan(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    memory: str | int | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Plan and compile one graph under a memory limit.

    Args:
        module: the traced forward.
        inputs: examples of its inputs.
        memory: the limit for parameters, gradients and activations, like `8GiB` or `40%`.
        **unknown: refused, so that a misspelt option is not lost.
    """
    if unknown or memory is None:
        raise UsageError(
            "backend 'bayplan' takes options={'memory': '8GiB'}, in bytes or as a share like '40%';"
            f" got {sorted(unknown) or 'none'}"
        )
    cache = cache_directory()
    return PlannedBackend(within(Limit.parse(memory), cache=cache), cache)(module, inputs)
