"""`torch.compile(model, backend="bayplan", options={"memory": "8GiB"})`.

torch finds this function by its entry point. The limit is for what the graph holds: parameters,
gradients and activations. What lies outside (the optimizer's state, the loss) `bayplan.fit` counts
too, so prefer that where the limit is the device's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from bayplan.api import granularity_of
from bayplan.choosing import Within
from bayplan.data.errors import UsageError
from bayplan.data.limit import Limit
from bayplan.devices.machine import cache_directory
from bayplan.planned import Circumstances, PlannedBackend
from bayplan.pricing import measured_prices

__all__ = ["bayplan"]


def bayplan(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Callable[..., Any]:
    """Plan and compile one graph under a memory limit.

    Args:
        module: the traced forward.
        inputs: examples of its inputs.
        options: `memory`, a limit like `8GiB` or `40%`.
        **more: the same as keywords; unknown ones are refused, so that a misspelt one is not lost.
    """
    given = {**(options or {}), **more}
    memory = given.pop("memory", None)
    if given or memory is None:
        raise UsageError(
            "backend 'bayplan' takes options={'memory': '8GiB'}, in bytes or as a share like '40%';"
            f" got {sorted(given) or 'none'}"
        )
    cache = cache_directory()
    tensors = (value for value in inputs if hasattr(value, "device"))
    device_type = next((tensor.device.type for tensor in tensors), "cpu")
    around = Circumstances(
        prices=partial(measured_prices, cache=cache),
        granularity_bytes=granularity_of(device_type),
    )
    return PlannedBackend(Within(Limit.parse(memory), cache=cache), around)(module, inputs)
