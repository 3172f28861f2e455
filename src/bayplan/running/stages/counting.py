"""What the forward operators of a step count, as OneFlow counts them.

Shares of operators are there so that published runs of OneFlow's staged pipeline can be repeated,
and a cut is the same only if everything counts as it does in OneFlow's graph. There, a step has
operators that torch has inside others, or not at all:

1. A parameter, a buffer and a tensor of the batch are each an operator, which goes with the first
   one that reads it.
2. A bias is added by an operator of its own, a dropout mask is drawn by one, and a mean is a sum
   and a product.
3. A reshape of activations is an operator; the transpose of a weight is not, for it is an option
   of the product.
4. A training function also returns something. OneFlow's benchmarks return the loss, the labels and
   the predictions, which take a softmax: four operators, after the loss.

What is only kept for the next step, like the number of batches that BatchNorm has seen, is not
there at all.
"""

import operator
from collections.abc import Iterator

import torch
from torch import fx

from bayplan.running.joint import JointStep
from bayplan.running.stages.weighing import first_reader
from bayplan.running.stages.whole import WholeStep

__all__ = ["operator_counts"]

_aten = torch.ops.aten
_NUM_RETURNED = 4  # see 4 above
_MEAN = 1  # torch's number for the reduction of a loss
_NOT_THERE = (operator.getitem, _aten.detach.default, _aten.alias.default)


def operator_counts(whole: WholeStep, step: JointStep) -> list[int]:
    """For each forward operator of a step, how many it counts as; see above."""
    nodes = step.op_nodes[: step.program.first_backward - 1]
    needed = _ancestors(whole.loss)
    at_node = {node: at for at, node in enumerate(step.op_nodes)}
    counts = [1 + _inside(node) if node in needed else 0 for node in nodes]
    counted = [node for node in whole.primals if node in needed]
    counted += [node for node in _reshapes(whole, at_node) if node in needed]
    for node in counted:
        reader = first_reader(node, at_node)
        if reader is not None and reader < len(nodes):
            counts[reader] += 1
    counts[-1] += _NUM_RETURNED
    return counts


def _ancestors(last: fx.Node) -> set[fx.Node]:
    """A node and all that it needs."""
    found = {last}
    waiting = [last]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _inside(node: fx.Node | None) -> int:
    """How many of OneFlow's operators one of torch's holds beside the one it is named after."""
    if node is None:
        return 0
    if node.target is _aten.convolution.default:
        return int(node.args[2] is not None)
    if node.target is _aten.nll_loss_forward.default:
        return int(node.args[3] == _MEAN)
    return int(
        node.target in (_aten.addmm.default, _aten.native_dropout.default, _aten.mean.default)
    )


def _reshapes(whole: WholeStep, at_node: dict[fx.Node | None, int]) -> Iterator[fx.Node]:
    """Other views of what operators made."""
    made: set[fx.Node] = set()
    for node in whole.nodes:
        if node in at_node:
            made.add(node)
        elif any(source in made for source in node.all_input_nodes):
            made.add(node)
            if node.op == "call_function" and node.target not in _NOT_THERE:
                yield node
