"""A step for one sample, from the same step for two samples and for three.

torch traces one sample differently: dimensions of size 1 need no copy before a view, so operators
are missing, and a cut among those of two samples means nothing here. What two samples compute is
right for one as well, with sizes that are smaller. Sizes grow evenly with the batch, so those for
one follow from those for two and for three; every shape is then checked on tensors without memory.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from bayplan import torch_private
from bayplan.data.errors import CaptureError
from bayplan.running.stages.whole import WholeStep

__all__ = ["shrink_to_one"]


def shrink_to_one(two: WholeStep, three: WholeStep) -> WholeStep:
    """The step for one sample, with the nodes of `two`, whose graph it takes over.

    Raises:
        CaptureError: something does not grow evenly with the batch.
    """
    two.check_same_nodes(three)
    nodes = two.nodes
    values = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    with torch_private.fake_mode_of(values):
        for node, later in zip(nodes, three.nodes, strict=True):
            _shrink(node, later)
    return replace(two, num_samples=1)


def _shrink(node: fx.Node, later: fx.Node) -> None:
    value, later_value = node.meta.get("val"), later.meta.get("val")
    if node.op == "placeholder":
        node.meta["val"] = _smaller_input(node, value, later_value)
    if node.op != "call_function":
        return
    node.args = _smaller(node, node.args, later.args)
    node.kwargs = _smaller(node, node.kwargs, later.kwargs)
    arguments = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    assert isinstance(arguments, tuple), "as it was given"
    assert callable(node.target), "it is called"
    args, options = arguments
    found = node.meta["val"] = node.target(*args, **options)
    pairs = zip(*map(torch_private.tree_leaves, (value, later_value, found)), strict=True)
    for one, other, made in pairs:
        if isinstance(one, torch.Tensor) and made.shape != _smaller_shape(node, one, other):
            raise _uneven(node, tuple(one.shape), tuple(other.shape))


def _smaller_input(node: fx.Node, value: Any, later: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape == later.shape:
        return value
    return value.new_empty_strided(_smaller_shape(node, value, later), value.stride())


def _smaller_shape(node: fx.Node, value: torch.Tensor, later: torch.Tensor) -> tuple[int, ...]:
    return _smaller(node, tuple(value.shape), tuple(later.shape))


def _smaller(node: fx.Node, two: Any, three: Any) -> Any:
    """What an argument is for one sample."""
    if isinstance(two, fx.Node) or two is three:
        return two
    if isinstance(two, tuple | list) and len(two) == len(three):
        return type(two)(_smaller(node, a, b) for a, b in zip(two, three, strict=True))
    if isinstance(two, dict):
        return {key: _smaller(node, two[key], three[key]) for key in two}
    if two == three:
        return two
    if isinstance(two, int) and isinstance(three, int):
        return two - (three - two)
    raise _uneven(node, two, three)


def _uneven(node: fx.Node, two: Any, three: Any) -> CaptureError:
    return CaptureError(
        f"{node.name} has {two} for 2 samples and {three} for 3, from which it cannot be told for"
        " 1; split the batch into pieces of 2 samples or more"
    )
