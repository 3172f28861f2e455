"""A backward that hands every gradient over as soon as it is there.

A plain backward returns the gradients of all parameters at its end, when the first of them have
waited for long. Handed over in the middle, each is added to its sum and released at once, and what
other ranks wait for leaves while the rest is still computed.
"""

from collections.abc import Callable

import torch
from torch import fx

__all__ = ["TakeGradient", "handing_over"]

TakeGradient = Callable[[int, torch.Tensor], None]


def handing_over(module: fx.GraphModule, *, num_gradients: int) -> fx.GraphModule:
    """A copy of a graph that calls whoever comes as one more input with each of its gradients.

    Args:
        module: the graph; it is left as it is.
        num_gradients: how many of its first outputs are handed over, with their number, and not
            returned.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(module.graph, copies)
    assert isinstance(outputs, tuple | list), "a backward graph returns a list"
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    # A half of a backward may have none: where a stage has no gradients of its own.
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        taker = graph.placeholder("take_gradient")
    for number, gradient in enumerate(outputs[:num_gradients]):
        assert isinstance(gradient, fx.Node), "every parameter of a stage has a gradient"
        with graph.inserting_after(taker if gradient.op == "placeholder" else gradient):
            graph.call_function(_hand_over, (taker, number, gradient))
    graph.output(tuple(outputs[num_gradients:]))
    return fx.GraphModule(module, graph)


def _hand_over(take: TakeGradient, number: int, gradient: torch.Tensor) -> None:
    take(number, gradient)
