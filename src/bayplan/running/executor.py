"""Running a graph as plain calls of torch's own kernels, releasing every value after its last use.

The graph is written once as a straight Python function: one line for each operator, its values in
local variables, and `del` right after the last line that reads one. Many kernels take microseconds,
and walking a list of operators would take as long again. Inputs arrive in a list that is emptied at
once, so that nobody else holds them. The parts of a tuple are taken out as soon as it is made,
because the tuple would keep all of them alive.

Values and constants are numbered in the text, and it quotes nothing: no string of a user's is ever
run.
"""

import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.rewriting.free import in_place_call, positions_to_overwrite
from bayplan.rewriting.repeats import as_drawn
from bayplan.running.direct_calls import direct_call
from bayplan.tracing.joint import OVERWRITES, RUNS, SWAPPER

__all__ = ["compile_graph"]

aten = torch.ops.aten

_COPY = aten.copy_.default
_NORM = aten._native_batch_norm_legit_functional.default
_NORM_IN_PLACE = aten._native_batch_norm_legit.default
_SET = aten.set_.source_Tensor
_VIEWS = (aten.detach.default, aten.t.default, aten.transpose.int)
_STATISTICS = (3, 4)  # positions of mean and variance, among arguments and outputs


def compile_graph(
    module: fx.GraphModule, mark: Callable[[tuple[int, ...]], None] | None = None
) -> Callable[[list[Any]], list[Any]]:
    """Return a function from a list of inputs, which it empties, to a list of outputs.

    A node's meta may name an argument for its result to overwrite (`OVERWRITES`).

    Args:
        mark: is called after each operator of the program, with its `RUNS`.
    """
    as_drawn(module.graph)
    _look_no_further(module.graph)
    _change_inputs_in_place(module.graph)
    writer = _Writer(module, mark)
    text = "\n".join(writer.lines())
    exec(compile(text, "<bayplan step>", "exec"), writer.names)  # noqa: S102 - see above
    return torch_compat.boxed(writer.names["run"])


def _change_inputs_in_place(graph: fx.Graph) -> None:
    """Compute new values of inputs in their own memory, where nobody needs the old ones.

    A graph copies them there at its end: counters, and running statistics of BatchNorm.
    """
    copies = {node.args[0]: node for node in graph.find_nodes(op="call_function", target=_COPY)}
    for norm in graph.find_nodes(op="call_function", target=_NORM):
        parts = {user.args[1]: user for user in norm.users}
        pairs: list[Any] = [(norm.args[place], parts.get(place)) for place in _STATISTICS]
        if all(_is_only_change(copies, old, new, norm) for old, new in pairs):
            norm.target = _NORM_IN_PLACE
            for old, new in pairs:
                graph.erase_node(copies.pop(old))
                graph.erase_node(new)
    for old, copy in copies.items():
        new: Any = copy.args[1]
        is_first = 0 in positions_to_overwrite(new) and new.args[0] is old
        if is_first and _is_only_change(copies, old, new, new):
            new.meta[OVERWRITES] = 0
            graph.erase_node(copy)


def _look_no_further(graph: fx.Graph) -> None:
    """Leave out views that show just what there is: each takes as long as a small kernel.

    Traced backwards are full of them: `detach`, and the transposed of a transposed weight. Below
    autograd a tensor itself does as well. What a graph returns stays a tensor of its own, unlike
    its inputs and other outputs, and an input whose memory is replaced shows other values then.
    """
    outputs = {*graph.output_node().all_input_nodes}
    for node in list(graph.nodes):
        shown = _shown_anew(node)
        if shown is None or any(user.target is _SET for user in shown.users):
            continue
        if node in outputs and (shown.op != "call_function" or shown in outputs):
            continue
        node.replace_all_uses_with(shown)
        outputs = {*graph.output_node().all_input_nodes}
    for node in reversed(list(graph.nodes)):
        if node.target in _VIEWS and not node.users:
            graph.erase_node(node)


def _shown_anew(node: fx.Node) -> Any:
    """The earlier node whose tensor a view shows unchanged; None if there is none."""
    if node.op != "call_function" or node.target not in _VIEWS:
        return None
    source: Any = node.args[0]
    if node.target is aten.detach.default:
        return source
    is_undone = source.target is node.target and source.args[1:] == node.args[1:]
    return source.args[0] if is_undone else None


def _is_only_change(copies: dict[Any, fx.Node], old: Any, new: Any, maker: fx.Node) -> bool:
    """Whether an input is read by the maker of its new value alone, and that by nobody."""
    copy = copies.get(old)
    if copy is None or copy.args[1] is not new or {*old.users} != {maker, copy}:
        return False
    before, after = old.meta["val"], new.meta["val"]
    return [*new.users] == [copy] and before.dtype == after.dtype and before.shape == after.shape


class _Writer:
    """Writes a graph as a function; `names` is what its text refers to."""

    def __init__(self, module: fx.GraphModule, mark: Callable[..., None] | None = None) -> None:
        self.names: dict[str, Any] = {"kernels_alone": torch_compat.kernels_alone, "mark": mark}
        self._is_marked = mark is not None
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._name_of = {node: f"v{index}" for index, node in enumerate(self._nodes)}
        self._constants: dict[int, str] = {}  # by identity; `names` keeps them alive

    def lines(self) -> Iterator[str]:
        inputs = [self._name_of[node] for node in self._nodes if node.op == "placeholder"]
        yield "def run(arguments):"
        yield f"  [{', '.join(inputs)}] = arguments"
        yield "  arguments.clear()"
        yield "  with kernels_alone():"
        released, unpacked = _releases(self._nodes), set[fx.Node]()
        for node in self._nodes:
            if node.op == "placeholder":
                yield from self._released([value for value in released[node] if value is node])
            elif node.op == "get_attr":
                self._name_of[node] = self._constant(getattr(self._module, str(node.target)))
            elif node.op == "call_function" and node not in unpacked:
                takers = [user for user in node.users if user.target is operator.getitem]
                gone = list(released[node])
                yield f"    {self._name_of[node]} = {self._call(node)}"
                if takers and len(takers) == len(node.users):
                    unpacked.update(takers)
                    for user in takers:
                        yield f"    {self._name_of[user]} = {self._name_of[node]}[{user.args[1]}]"
                        gone += [value for value in released[user] if value is not node]
                    gone.append(node)
                yield from self._released(gone)
                if self._is_marked and RUNS in node.meta:
                    yield f"    mark({node.meta[RUNS]!r})"
            elif node.op == "output":
                outputs = list(node.args[0])
                yield f"    return [{', '.join(map(self._written, outputs))}]"

    def _released(self, nodes: list[fx.Node]) -> Iterator[str]:
        names = [self._name_of[node] for node in nodes if node.op != "get_attr"]
        if names:
            yield f"    del {', '.join(dict.fromkeys(names))}"

    def _call(self, node: fx.Node) -> str:
        function: Any = node.target
        args, kwargs = node.args, node.kwargs
        overwritten = node.meta.get(OVERWRITES)
        if overwritten is not None:
            function, args, kwargs = in_place_call(node, overwritten)
        if SWAPPER in node.meta:
            function = partial(function, node.meta[SWAPPER])
        function = direct_call(function, args, kwargs)
        arguments = [self._written(value) for value in args]
        arguments += [f"{name}={self._written(value)}" for name, value in kwargs.items()]
        return f"{self._constant(function)}({', '.join(arguments)})"

    def _written(self, thing: Any) -> str:
        """An argument as text; lists of plain numbers are made once."""
        if isinstance(thing, fx.Node):
            return self._name_of[thing]
        if isinstance(thing, list | tuple) and _has_nodes(thing):
            parts = "".join(f"{self._written(part)}, " for part in thing)
            return f"({parts})" if isinstance(thing, tuple) else f"[{parts}]"
        if isinstance(thing, dict) and _has_nodes(thing):
            pairs = (
                f"{self._written(key)}: {self._written(value)}" for key, value in thing.items()
            )
            return f"{{{', '.join(pairs)}}}"
        is_finite = type(thing) is float and math.isfinite(thing)
        if thing is None or is_finite or type(thing) in (bool, int):
            return repr(thing)
        return self._constant(_plain(thing))

    def _constant(self, thing: Any) -> str:
        if id(thing) not in self._constants:
            name = f"c{len(self._constants)}"
            self._constants[id(thing)] = name
            self.names[name] = thing
        return self._constants[id(thing)]


def _has_nodes(thing: Any) -> bool:
    if isinstance(thing, list | tuple):
        return any(map(_has_nodes, thing))
    if isinstance(thing, dict):
        return any(map(_has_nodes, thing.values()))
    return isinstance(thing, fx.Node)


def _plain(thing: Any) -> Any:
    """The same with lists of Python's own: fx has a kind of its own, which kernels do not take."""
    if isinstance(thing, list):
        return [_plain(part) for part in thing]
    if isinstance(thing, tuple):
        return tuple(map(_plain, thing))
    if isinstance(thing, dict):
        return {key: _plain(part) for key, part in thing.items()}
    return thing


def _releases(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody reads after it (itself, if nobody reads it at all)."""
    last_reader = {value: node for node in nodes for value in (node, *node.all_input_nodes)}
    released: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for value, node in last_reader.items():
        if node.op != "output":
            released[node].append(value)
    return released
