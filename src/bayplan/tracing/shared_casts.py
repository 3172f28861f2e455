"""Autocast casts a parameter once for all that read it; a traced step is made to do the same.

In plain training the gradients of all readers are then summed in the lower precision, and cast back
once. Traced parameters are no leaves, so autocast would cast them for each reader, and sums would
be made in float32: other bits. So the readers of a parameter are traced with the casts of an own
cache, which follows the rules of autocast's: for float32 leaves that require a gradient, where the
cache is enabled, until the outermost autocast ends.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from operator import methodcaller
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bayplan import torch_compat
from bayplan.data.errors import UsageError
from bayplan.devices.device import device_of

__all__ = ["OnePerAutocast", "SharedCasts", "keeps_casts", "sharing_casts"]

# What autocast runs in the lower precision, by the names of torch's functions and operators; on
# CUDA some more, but none that reads a parameter as it is.
_LOWER = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "prelu", "vecdot", "linalg_vecdot"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
    # Made of `linear` where no mode sees it, which reads every weight once a step of the sequence.
    *("gru", "gru_cell", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell"),
}
_LOWER_ON_CUDA = {"addmv", "addr", "mv", "chain_matmul", "multi_dot", "linalg_multi_dot"}
_ATTENTION = F.multi_head_attention_forward  # calls `linear` where no mode sees it
_ATTENTION_NAMES = tuple(signature(_ATTENTION).parameters)


@contextmanager
def sharing_casts(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator["SharedCasts"]:
    """Have parameters cast once while a graph of Dynamo's is traced further; yields the cache.

    Args:
        module: will be changed in place: what reads parameters in it goes by the cache.
        inputs: that the module is traced with.
    """
    casts = SharedCasts()
    places = module.graph.find_nodes(op="placeholder")
    leaves = [node for node, value in zip(places, inputs, strict=True) if _is_cached(value)]
    if not leaves:
        yield casts
        return
    with module.graph.inserting_after(places[-1]):
        module.graph.call_function(casts.begin, tuple(leaves))
    _redirect(module, {*leaves}, casts)
    module.recompile()
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        casts.made.clear()
        clear()

    torch.clear_autocast_cache = cleared
    try:
        yield casts
    finally:
        torch.clear_autocast_cache = clear


def _is_cached(value: Any) -> bool:
    is_leaf = isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    return is_leaf and value.dtype == torch.float32 and not torch_compat.is_view(value)


def _redirect(module: fx.GraphModule, leaves: set[fx.Node], casts: "SharedCasts") -> None:
    """Let all nodes that read some leaves go by the cache; also those in checkpoints."""
    bodies = {call: call.args[0] for call in torch_compat.checkpoints_in(module)}
    for node in module.graph.nodes:
        if leaves.isdisjoint(node.all_input_nodes) or node.target == casts.begin:
            continue
        body = bodies.get(node)
        if node.op == "call_method":
            node.op, node.target = "call_function", casts.going_by(str(node.target))
        elif node.op == "call_function" and body is None:
            node.target = casts.going_by(node.target)
        elif isinstance(body, fx.Node):
            inner = getattr(module, str(body.target))
            places = inner.graph.find_nodes(op="placeholder")
            pairs = zip(places, node.args[1:], strict=False)
            _redirect(inner, {place for place, value in pairs if value in leaves}, casts)
            inner.recompile()


class SharedCasts(TorchFunctionMode):
    """The cache: by leaf and dtype, for one tracing at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[int, torch.Tensor] = {}
        self.made: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.are_used = False

    def begin(self, *leaves: torch.Tensor) -> None:
        self.leaves = {id(leaf): leaf for leaf in leaves}
        self.made.clear()

    def going_by(self, function: Any) -> Callable[..., Any]:
        """A function, or a method by its name, that takes its casts from here."""
        if isinstance(function, str):
            name = function

            def function(value: Any, *args: Any, **kwargs: Any) -> Any:
                return methodcaller(name, *args, **kwargs)(value)

        @wraps(function)
        def cached(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cached

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LOWER or name in _LOWER_ON_CUDA:
            args, kwargs = torch_compat.tree_map_only(
                torch.Tensor, lambda value: self._cast(value, name in _LOWER), (args, kwargs)
            )
        elif name == "lstm" and (num_gated := _gates_of_projected(*args)):
            args = (*args[:2], [self._cast_gates(each, num_gated) for each in args[2]], *args[3:])
        elif func is _ATTENTION:
            named = zip(_ATTENTION_NAMES, args, strict=False)
            args, kwargs = (), self._of_attention({**dict(named), **kwargs})
        return func(*args, **kwargs)

    def _cast_gates(self, weight: torch.Tensor, num_gated: int) -> torch.Tensor:
        # The projection is read transposed, as a view, and casts of views are not kept.
        return self._cast(weight, True) if weight.shape[0] == num_gated else weight

    def _of_attention(self, given: dict[str, Any]) -> dict[str, Any]:
        names = ["out_proj_weight", "out_proj_bias"]
        names += ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        if given["query"] is given["key"] and given["key"] is given["value"]:
            names += ["in_proj_weight", "in_proj_bias"]  # otherwise parts of them, which are views
        cast = {name: given[name] for name in names if given.get(name) is not None}
        return given | {name: self._cast(value, True) for name, value in cast.items()}

    def _cast(self, value: torch.Tensor, is_lower_everywhere: bool) -> torch.Tensor:
        device = value.device.type
        is_lower = is_lower_everywhere or device_of(value.device).has_wide_autocast
        is_cached = torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()
        if id(value) not in self.leaves or not is_lower or not is_cached:
            return value
        dtype = torch.get_autocast_dtype(device)
        key = id(value), dtype
        if key not in self.made:
            self.made[key] = value.to(dtype)
            self.are_used = True
        return self.made[key]


def _gates_of_projected(_: Any, state: Any, *rest: Any) -> int:
    """The rows of a weight of gates in an LSTM with projections; others are one kernel a layer: 0.

    Packed sequences, which are refused, have other arguments.
    """
    if not isinstance(state, tuple | list) or state[0].shape[-1] == state[1].shape[-1]:
        return 0
    return 4 * int(state[1].shape[-1])


def keeps_casts() -> bool:
    """Whether what is cast now is kept for later, until an autocast ends."""
    torch.autocast_increment_nesting()
    is_within = torch.autocast_decrement_nesting() > 0
    return is_within and torch.is_autocast_cache_enabled()


class OnePerAutocast:
    """Refuses a second call of a model under one autocast.

    Plain training takes the casts of the first call for the second one, too, and sums the gradients
    of both in the lower precision. Each planned call has its own.
    """

    def __init__(self) -> None:
        self._probe: torch.Tensor | None = None
        self._last: Any = None  # what autograd would do for the cast that is in the cache

    def check(self, device: torch.device) -> None:
        """To be called by each call of a model that casts parameters."""
        if not torch.is_autocast_cache_enabled():
            return
        if not torch.is_autocast_enabled(device.type):  # the model enters autocast itself
            torch.autocast_increment_nesting()
            if torch.autocast_decrement_nesting() > 0 and torch.is_grad_enabled():
                raise UsageError(
                    "a planned model that enters autocast itself is called under another one with"
                    " enabled=False. Plain training would keep the weights that it has cast until"
                    " the outer one ends. Call the model outside of it"
                )
            return
        if self._probe is None:
            self._probe = torch.ones(1, 1, device=device, requires_grad=True)
        with torch.enable_grad():
            product: Any = torch.mm(self._probe, self._probe.detach())
        cast = product.grad_fn.next_functions[0][0]
        before, self._last = self._last, cast
        if cast is before and torch.is_grad_enabled():
            raise UsageError(
                "a planned model is called a second time under one autocast. Plain training would"
                " use the weights that it has cast for the first call, and sum the gradients of"
                " both calls in the lower precision. Enter autocast anew for each call, or say"
                " autocast(..., cache_enabled=False); then both have the same numbers"
            )
