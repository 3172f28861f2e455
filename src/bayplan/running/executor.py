"""Running a graph as plain calls of torch's own kernels, releasing every value after its last use.

The graph is turned into a list of calls once; a run walks the list. Values live in numbered
slots, and a slot is emptied right after the last call that reads it, inputs included: they arrive
in a list that is emptied at once, so that nobody else holds them. The parts of a tuple are taken
out as soon as it is made, because the tuple would keep all of them alive.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from bayplan import torch_compat
from bayplan.rewriting.free import in_place_form
from bayplan.tracing.joint import OVERWRITES, SWAPPER

__all__ = ["compile_graph"]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a value in the arguments of a call."""

    index: int


class _Call(NamedTuple):
    """A call, laid out so that little is left to do at its turn: many kernels take microseconds."""

    function: Callable[..., Any]
    constants: list[Any]  # all arguments, with gaps where values go
    gaps: tuple[tuple[int, int], ...]  # position and slot of each value
    nested: tuple[tuple[int, Any], ...]  # position and argument where values lie inside of lists
    options: dict[str, Any]
    has_values: bool  # among the options
    target: int  # the slot of a plain result
    parts: tuple[tuple[int, int], ...] | None  # position and slot of each part of a tuple
    released: tuple[int, ...]  # slots to empty afterwards


def compile_graph(module: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """Return a function from a list of inputs, which it empties, to a list of outputs.

    A node's meta may name an argument for its result to overwrite (`OVERWRITES`).
    """
    calls, inputs, outputs, constant_slots = _calls_of(module)

    def run(arguments: list[Any]) -> list[Any]:
        slots = constant_slots.copy()
        for slot, argument in zip(inputs, arguments, strict=True):
            slots[slot] = argument
        argument = None
        arguments.clear()
        for (
            function,
            constants,
            gaps,
            nested,
            options,
            has_values,
            target,
            parts,
            released,
        ) in calls:
            values = constants.copy()
            for position, slot in gaps:
                values[position] = slots[slot]
            for position, thing in nested:
                values[position] = _filled(thing, slots)
            result = function(*values, **(_filled(options, slots) if has_values else options))
            del values
            if parts is None:
                slots[target] = result
            else:
                for position, slot in parts:
                    slots[slot] = result[position]
            del result
            for slot in released:
                slots[slot] = None
        return [_filled(output, slots) for output in outputs]

    return torch_compat.boxed(run)


def _filled(thing: Any, slots: list[Any]) -> Any:
    if type(thing) is _Slot:
        return slots[thing.index]
    if type(thing) is list or type(thing) is tuple:
        return type(thing)(_filled(part, slots) for part in thing)
    if type(thing) is dict:
        return {key: _filled(part, slots) for key, part in thing.items()}
    return thing


def _has_slot(thing: Any) -> bool:
    if isinstance(thing, list | tuple):
        return any(map(_has_slot, thing))
    if isinstance(thing, dict):
        return any(map(_has_slot, thing.values()))
    return isinstance(thing, _Slot)


def _calls_of(module: fx.GraphModule) -> tuple[list[_Call], list[int], list[Any], list[Any]]:
    """Calls, the slots of inputs, outputs, and all slots with the constants in theirs."""
    nodes = list(module.graph.nodes)
    slots: list[Any] = [None] * len(nodes)
    slot_of = {node: index for index, node in enumerate(nodes)}
    released = _releases(nodes)
    inputs = [slot_of[node] for node in nodes if node.op == "placeholder"]
    calls, outputs, unpacked = [], [], set()
    for node in nodes:
        if node.op == "output":
            outputs = _with_slots(list(node.args[0]), slot_of)
        elif node.op == "get_attr":
            slots[slot_of[node]] = getattr(module, str(node.target))
        elif node.op == "call_function" and node not in unpacked:
            takers = [user for user in node.users if user.target is operator.getitem]
            parts = None
            gone = list(released[node])
            if takers and len(takers) == len(node.users):
                unpacked.update(takers)
                parts = tuple((user.args[1], slot_of[user]) for user in takers)
                gone += [later for user in takers for later in released[user] if later is not node]
            calls.append(_call(node, parts, gone, slot_of))
    return calls, inputs, outputs, slots


def _call(
    node: fx.Node,
    parts: tuple[tuple[int, int], ...] | None,
    gone: list[fx.Node],
    slot_of: dict[fx.Node, int],
) -> _Call:
    function: Any = node.target
    overwritten = node.meta.get(OVERWRITES)
    if overwritten is not None:
        function = in_place_form(node.target, overwritten)
    if SWAPPER in node.meta:
        function = partial(function, node.meta[SWAPPER])
    arguments = _with_slots(list(node.args), slot_of)
    options = _with_slots(dict(node.kwargs), slot_of)
    holding = [(index, value) for index, value in enumerate(arguments) if _has_slot(value)]
    return _Call(
        function=function,
        constants=[None if _has_slot(value) else value for value in arguments],
        gaps=tuple((index, slot.index) for index, slot in holding if isinstance(slot, _Slot)),
        nested=tuple((index, value) for index, value in holding if not isinstance(value, _Slot)),
        options=options,
        has_values=_has_slot(options),
        target=slot_of[node],
        parts=parts,
        released=tuple(slot_of[other] for other in gone),
    )


def _releases(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody reads after it (itself, if nobody reads it at all)."""
    last_reader = {value: node for node in nodes for value in (node, *node.all_input_nodes)}
    released: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for value, node in last_reader.items():
        if node.op != "output":
            released[node].append(value)
    return released


def _with_slots(thing: Any, slot_of: dict[fx.Node, int]) -> Any:
    if isinstance(thing, fx.Node):
        return _Slot(slot_of[thing])
    if isinstance(thing, list):  # fx has lists of its own kind, which kernels do not take
        return [_with_slots(part, slot_of) for part in thing]
    if isinstance(thing, tuple):
        return tuple(_with_slots(part, slot_of) for part in thing)
    if isinstance(thing, dict):
        return {key: _with_slots(part, slot_of) for key, part in thing.items()}
    return thing
