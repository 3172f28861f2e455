"""What the forward operators of a step weigh, for cutting it by shares of that."""

import torch
from torch import fx

from bayplan.data.program import Program
from bayplan.running.joint import JointStep
from bayplan.running.stages.numbering import Numbering
from bayplan.running.stages.whole import WholeStep

__all__ = ["first_reader", "parameter_bytes", "seconds_with_backward", "sent_bytes"]


def seconds_with_backward(step: JointStep) -> list[float]:
    """For each forward operator its seconds and those of its gradient.

    See `Numbering`. Sums of gradients count as the last operator's: they carry its number.
    """
    program = step.program
    num_forward = program.first_backward - 1  # the loss is the caller's
    seconds = [op.seconds for op in program.ops[:num_forward]]
    numbering = Numbering(
        (node.meta["seq_nr"], at)
        for at, node in enumerate(step.op_nodes[:num_forward])
        if node is not None
    )
    later = zip(step.op_nodes[num_forward:], program.ops[num_forward:], strict=True)
    for node, op in later:
        if node is not None:
            seconds[numbering.of_gradient(node.meta["seq_nr"])] += op.seconds
    return seconds


def parameter_bytes(whole: WholeStep, step: JointStep) -> list[float]:
    """For each forward operator the bytes of the parameters that it is the first to read."""
    num_forward = step.program.first_backward - 1
    weights = [0.0] * num_forward
    at_node = {node: at for at, node in enumerate(step.op_nodes)}
    for node, given in zip(whole.primals, whole.inputs, strict=True):
        if given.needs_gradient:
            value: torch.Tensor = node.meta["val"]
            reader = first_reader(node, at_node)
            if reader is not None and reader < num_forward:
                weights[reader] += value.numel() * value.element_size()
    return weights


def first_reader(node: fx.Node, at_node: dict[fx.Node | None, int]) -> int | None:
    """The first operator that reads a node, itself or through views.

    Args:
        node: which.
        at_node: the numbers of all operators; of backward too, or this would follow all ways there.
    """
    found = [
        at_node[user] if user in at_node else first_reader(user, at_node) for user in node.users
    ]
    return min((at for at in found if at is not None), default=None)


def sent_bytes(program: Program) -> list[int]:
    """For each forward operator, what a cut before it would send: made before, read after."""
    num_forward = program.first_backward - 1
    sent = [0] * num_forward
    for buffer, producer in enumerate(program.producers):
        readers = [at for at in program.readers[buffer] if at < num_forward]
        if 0 <= producer < num_forward and readers:
            for cut in range(producer + 1, readers[-1] + 1):
                sent[cut] += program.buffers[buffer]
    return sent
