"""Updates of parameters as operators of a joint graph, each where its gradient is complete.

A gradient that backward returns stays to the end of the step, and all of them together are a floor
that no schedule gets below. Here an update takes a gradient's place among the outputs: it reads the
gradient, changes the parameter, and leaves nothing.

NOTE [ Old weights ]

Once a parameter is changed nothing may read its old value. That is so for every schedule:
1. Only forward operators may be repeated; `without_backward_repeats` sees to it.
2. A repeat is made for some reader of a forward value. One that reads a parameter, directly or
   through repeats of what comes before it, is made for a reader of a value that forward computes
   from that parameter.
3. So the update stands behind the last reader of the parameter, and of every value that forward
   computes from it.
As backward passes the layers in reverse, those readers come before the gradient is complete, or
right after: the rule delays an update by the gradient of its own layer's input, if at all.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import fx

from bayplan import torch_private
from bayplan.data.errors import CaptureError, UsageError
from bayplan.data.program import Program
from bayplan.running.joint import JointStep

__all__ = [
    "check_old_weights",
    "insert_updates",
    "parameters_of_updates",
    "updates_in",
    "without_backward_repeats",
]

Update = Callable[..., Any]  # of a parameter's index, its gradient and the parameter

_INDEX, _GRADIENT, _PARAMETER = range(3)  # among an update's arguments


def insert_updates(
    graph: fx.Graph, *, num_forward_outputs: int, update: Update, index_of_input: Mapping[int, int]
) -> None:
    """Let a joint graph update parameters in place of returning their gradients.

    Args:
        graph: its inputs but the tangents, and its outputs behind the forward's, match one by one.
        num_forward_outputs: how many of its outputs are the forward's.
        update: what to call, with a parameter's index, its gradient and the parameter.
        index_of_input: by position among the inputs, the index of each parameter to update.
    """
    output = graph.output_node()
    outputs: list[Any] = list(output.args[0])  # pyrefly: ignore[bad-argument-type] - a list
    inputs = [node for node in graph.find_nodes(op="placeholder") if not _is_tangent(node)]
    if len(outputs) != num_forward_outputs + len(inputs):
        raise CaptureError(
            f"torch traced {len(inputs)} inputs but {len(outputs) - num_forward_outputs} gradients,"
            " so it cannot be told which parameter is which; turn update_in_backward off"
        )
    order = {node: place for place, node in enumerate(graph.nodes)}
    last_reader = _last_readers(graph, order)
    for position, index in index_of_input.items():
        gradient = outputs[num_forward_outputs + position]
        if not isinstance(gradient, fx.Node):  # the loss does not depend on it
            continue
        _check_dense(gradient, inputs[position])
        behind = max(last_reader[inputs[position]], gradient, key=order.__getitem__)
        with graph.inserting_after(behind):
            arguments = (index, gradient, inputs[position])
            node = graph.call_function(update, arguments)
        node.meta = {**gradient.meta, "val": _token_like(gradient)}
        if not _is_its_own(gradient, outputs):
            _read_a_copy(graph, node)
        outputs[num_forward_outputs + position] = node
    output.args = (outputs,)


def updates_in(graph: fx.Graph, update: Update) -> list[int]:
    """The indices of the parameters that a graph updates, in its order."""
    nodes = graph.find_nodes(op="call_function", target=update, sort=True)
    return [int(str(node.args[_INDEX])) for node in nodes]


def without_backward_repeats(step: JointStep) -> JointStep:
    """The step with forward operators alone allowed to be repeated: rule 1."""
    first = step.program.first_backward
    ops = tuple(
        op if index < first else msgspec.structs.replace(op, can_repeat=False)
        for index, op in enumerate(step.program.ops)
    )
    return replace(step, program=msgspec.structs.replace(step.program, ops=ops))


def parameters_of_updates(step: JointStep, update: Update) -> dict[int, int]:
    """By the op of each update, the buffer that it changes."""
    found = {}
    for index, node in enumerate(step.op_nodes):
        if node is not None and node.target is update:
            parameter = node.args[_PARAMETER]
            assert isinstance(parameter, fx.Node), "an update is of an input"
            (found[index],) = step.buffers_of[parameter]
    return found


def check_old_weights(
    program: Program, schedule: Sequence[int], changes: Mapping[int, int]
) -> None:
    """Raise ValueError if a schedule reads a parameter after its update.

    Args:
        program: the step.
        schedule: its ops in some order, with repeats.
        changes: by the op of each update, the buffer that it changes.

    Example:
        >>> from bayplan.data.program import Op
        >>> ops = (Op(name="f", reads=(0,), writes=(1,), seconds=1.0),
        ...        Op(name="update", reads=(0, 1), writes=(2,), seconds=1.0))
        >>> program = Program(buffers=(4, 8, 0), ops=ops, first_backward=1, inputs=frozenset({0}))
        >>> check_old_weights(program, (0, 1), {1: 0})
        >>> check_old_weights(program, (0, 1, 0), {1: 0})
        Traceback (most recent call last):
        ValueError: step 2 (f) reads buffer 0, which update has changed at step 1
    """
    changed_at: dict[int, int] = {}
    for step, (index, op) in enumerate(zip(schedule, program.executions(schedule), strict=True)):
        for buffer in op.reads:
            if buffer in changed_at:
                changer = program.ops[schedule[changed_at[buffer]]].name
                raise ValueError(
                    f"step {step} ({op.name}) reads buffer {buffer}, which"
                    f" {changer} has changed at step {changed_at[buffer]}"
                )
        if index in changes:
            changed_at[changes[index]] = step


def _last_readers(graph: fx.Graph, order: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """For each value, the last node that reads it or what forward computes from it: rule 3."""
    after_tangents: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_tangent(node) or not after_tangents.isdisjoint(node.all_input_nodes):
            after_tangents.add(node)
    found: dict[fx.Node, fx.Node] = {}
    # From the end, so that a value's readers are settled before the value.
    for node in reversed(list(graph.nodes)):
        found[node] = node
        if node in after_tangents:
            continue  # never repeated, so nobody asks for what it was computed from
        readers = (found[user] for user in node.users if user.op != "output")
        found[node] = max((node, *readers), key=order.__getitem__)
    return found


def _is_tangent(node: fx.Node) -> bool:
    return torch_private.is_tangent(node)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return bool(getattr(node.target, "is_view", False))


def _is_its_own(gradient: fx.Node, outputs: list[Any]) -> bool:
    """Whether a gradient's memory is read by nobody but its update, which may overwrite it."""
    node = gradient
    while True:
        num_readers = len(node.users) + max(0, outputs.count(node) - 1)
        # The update is one, and so is the output whose place it takes.
        if num_readers > (2 if node is gradient else 1) or node.op != "call_function":
            return False
        if not _is_view(node):
            return True
        node = node.all_input_nodes[0]


def _read_a_copy(graph: fx.Graph, update: fx.Node) -> None:
    """As autograd does, which gives no parameter a gradient that others hold."""
    gradient = update.args[_GRADIENT]
    assert isinstance(gradient, fx.Node), "an update reads a gradient"
    with graph.inserting_before(update):
        copy = graph.call_function(torch.ops.aten.clone.default, (gradient,))
    with torch_private.fake_mode_of([gradient.meta["val"]]):
        copy.meta = {**gradient.meta, "val": gradient.meta["val"].clone()}
    update.update_arg(_GRADIENT, copy)


def _token_like(gradient: fx.Node) -> torch.Tensor:
    with torch_private.fake_mode_of([gradient.meta["val"]]):
        return gradient.meta["val"].new_empty(0)


def _check_dense(gradient: fx.Node, parameter: fx.Node) -> None:
    value = gradient.meta["val"]
    if value.layout is not torch.strided:
        raise UsageError(
            f"the gradient of {parameter.name}, of shape {tuple(value.shape)}, is sparse, which"
            " update_in_backward does not take; use sparse=False, or turn update_in_backward off"
        )
