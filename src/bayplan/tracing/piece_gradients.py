"""How the pieces of a forward take part in a backward with the sums of plain training.

autograd adds the gradients of a tensor one by one, from its last use to its first. A compiled piece
hands out one gradient for each input, so it would add those of its own uses first: other bits, if
others use the tensor as well. And a piece is traced for gradients that torch guesses. So a step is
watched on fake tensors, its pieces as they are written, before they are traced:

1. An input that a piece uses k times, and others too, is given to it k times. It then hands out k
   gradients, which autograd adds one by one, as it does in plain training.
2. Outputs that nobody trains with are traced without a gradient, all others with the layout of the
   gradient that comes.
3. Some pieces stay as they are written: those that change a tensor with a gradient, that hand out a
   view of an input or two views of one tensor, that share something with others that is no input
   (weights that autocast has cast), or whose gradients have gaps or come in several layouts.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from bayplan import torch_compat, torch_joint
from bayplan.data.errors import CaptureError, UsageError
from bayplan.rewriting.repeats import CHANGED
from bayplan.tracing.tangents import OutputGradient, order_of

__all__ = [
    *("GradientWatch", "Inexact", "Operators", "PieceGradients"),
    *("expecting_gradients", "hand_out_one_by_one", "mark_changed", "operators_of"),
    "with_repeated_inputs",
]

Operators = tuple[str, ...]  # of a graph of Dynamo's, whatever their sizes
_PLACE = re.compile(r" at 0x[0-9a-f]+")  # in memory


def operators_of(module: fx.GraphModule) -> Operators:
    calls = (node for node in module.graph.nodes if node.op in ("call_function", "call_method"))
    # With a size left open, torch asks for it in the graph.
    # Torch makes some functions anew for each graph (of `parameter.data = …`): their places differ.
    return tuple(
        _PLACE.sub("", str(node.target)) for node in calls if not torch_compat.is_of_size(node)
    )


class Inexact(CaptureError):
    """A piece whose gradients would not be those of plain training; to be run as written."""

    operators: Operators = ()


@dataclass(frozen=True)
class PieceGradients:
    """What a piece gets and hands out in backward.

    Attributes:
        outputs: those that require a gradient, by position.
        uses: how many gradients of an input it hands out, by position, where more than one.
        changed: inputs that are other ones once backward comes, by position.
    """

    outputs: Mapping[int, OutputGradient]
    uses: Mapping[int, int]
    changed: frozenset[int]

    def joined(self, other: "PieceGradients") -> "PieceGradients | None":
        """Of two runs of a piece; None if one graph cannot be both."""
        if self.outputs.keys() != other.outputs.keys():
            return None
        for position, ours in self.outputs.items():
            theirs = other.outputs[position]
            if ours.is_used != theirs.is_used or not ours.is_laid_out_like(theirs):
                return None
        positions = {*self.uses, *other.uses}
        uses = {each: max(self.uses.get(each, 1), other.uses.get(each, 1)) for each in positions}
        return PieceGradients(self.outputs, uses, self.changed | other.changed)


Edge = tuple[Any, int]  # a node of autograd, and which of its outputs


@dataclass(eq=False)
class _Run:
    """A piece's execution, with its nodes of autograd by their numbers."""

    operators: Operators
    numbers: range
    inputs: dict[int, Edge]
    outputs: dict[int, Edge]
    is_exact: bool
    writes: dict[int, tuple[torch.Tensor, int]]  # inputs, and how often they were written to before
    changed: frozenset[int] = frozenset()
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    counts: Counter[Edge] = field(default_factory=Counter)

    def gradients(self, totals: Counter[Edge], shapes: dict[int, Any]) -> PieceGradients | None:
        outputs = {
            position: OutputGradient(
                shapes[position],
                is_used=totals[edge] > self.counts[edge],
                order=self.orders.get(position),
            )
            for position, edge in self.outputs.items()
        }
        uses = {
            position: self.counts[edge]
            for position, edge in self.inputs.items()
            if totals[edge] > self.counts[edge] > 1
        }
        used = {position for position, gradient in outputs.items() if gradient.is_used}
        is_told_apart = len({*self.inputs.values()}) == len(self.inputs)
        # A hook that computes gradients in the backward, of what the loss does not lead to.
        is_asked_otherwise = any(totals[self.outputs[position]] == 0 for position in self.orders)
        is_known = is_told_apart and not is_asked_otherwise
        if not self.is_exact or not used or not used <= {*self.orders} or not is_known:
            return None
        return PieceGradients(outputs, uses, self.changed)


class GradientWatch:
    """A backend that runs pieces as they are written and sees where gradients go."""

    traces_as_eager: ClassVar[bool] = True  # see `torch_answers.answer_as_eager`

    def __init__(self, num_writes: Callable[[torch.Tensor], int]) -> None:
        self.changed_parameters = frozenset[str]()  # by the forward, by name
        self._num_writes = num_writes
        self._runs: list[_Run] = []
        self._shapes: dict[_Run, dict[int, tuple[int, ...]]] = {}
        self._totals: Counter[Edge] = Counter()

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        operators = operators_of(module)

        def run(*args: Any) -> Any:
            if not torch.is_grad_enabled() or not any(map(_is_trained, args)):
                return module.forward(*args)
            return self._watched(operators, module.forward, args)

        return run

    def _watched(
        self, operators: Operators, forward: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        tensors = torch_compat.tensors_in(args)
        versions = [torch_compat.num_changes(tensor) for tensor in tensors]
        inputs = {position: _edge(each) for position, each in enumerate(args) if _is_trained(each)}
        writes = {
            position: (each, self._num_writes(each))
            for position, each in enumerate(args)
            if isinstance(each, torch.Tensor)
        }
        first = torch_compat.next_forward_sequence()
        outputs = forward(*args)
        numbers = range(first, torch_compat.next_forward_sequence())
        trained = {position: each for position, each in enumerate(outputs) if _is_trained(each)}
        is_changed = any(
            torch_compat.num_changes(tensor) != version and tensor.requires_grad
            for tensor, version in zip(tensors, versions, strict=True)
        )
        given = {_storage(each) for each in tensors}
        made = {_storage(each) for each in trained.values()}
        is_shared = len(made) < len(trained) or not made.isdisjoint(given)
        run = _Run(
            operators,
            numbers,
            inputs,
            {position: _edge(each) for position, each in trained.items()},
            is_exact=not is_changed and not is_shared,
            writes=writes,
        )
        for position, each in trained.items():
            each.register_hook(partial(_note_order, run.orders, position))
        self._shapes[run] = {position: tuple(each.shape) for position, each in trained.items()}
        self._runs.append(run)
        return outputs

    def count_uses(self, loss: torch.Tensor) -> None:
        """Count who hands a gradient to whom, before the backward of a loss.

        Inputs that were written to since a piece read them are noted, too: it must not read them
        again.
        """
        for run in self._runs:
            run.changed = frozenset(
                position
                for position, (tensor, before) in run.writes.items()
                if self._num_writes(tensor) != before
            )
            run.writes.clear()  # they keep inputs alive
        seen: set[Any] = set()
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            run = self._run_of(node)
            for edge in node.next_functions:
                if edge[0] is None:
                    continue
                waiting.append(edge[0])
                self._totals[edge] += 1
                if run is not None:
                    run.counts[edge] += 1
                other = self._run_of(edge[0])
                if run is other:
                    continue
                is_input = run is None or edge in run.inputs.values()
                is_output = other is None or edge in other.outputs.values()
                if not is_input or not is_output:
                    for each in (run, other):
                        if each is not None:
                            each.is_exact = False

    def _run_of(self, node: Any) -> _Run | None:
        number = torch_compat.forward_sequence(node)
        index = bisect_right(self._runs, number, key=lambda run: run.numbers.start) - 1
        return self._runs[index] if index >= 0 and number in self._runs[index].numbers else None

    def found(self) -> tuple[dict[Operators, PieceGradients], frozenset[Operators]]:
        """What each piece gets and hands out, and the pieces that have to stay as written."""
        gradients: dict[Operators, PieceGradients] = {}
        written: set[Operators] = set()
        for run in self._runs:
            new = run.gradients(self._totals, self._shapes[run])
            known = gradients.get(run.operators)
            joined = new if new is None or known is None else known.joined(new)
            if joined is None:
                written.add(run.operators)
            else:
                gradients[run.operators] = joined
        return gradients, frozenset(written)


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _edge(tensor: torch.Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _storage(tensor: torch.Tensor) -> int:
    return torch_compat.storage_key(tensor.untyped_storage())


def _note_order(orders: dict[int, Any], position: int, gradient: torch.Tensor) -> None:
    order = order_of(gradient)
    if order is not None:
        orders[position] = order


def with_repeated_inputs(
    module: fx.GraphModule, uses: Mapping[int, int]
) -> tuple[fx.GraphModule, list[int]]:
    """A graph with an input once more for each use after the first; returns which, in order."""
    again = [position for position, count in sorted(uses.items()) for _ in range(count - 1)]
    if not again:
        return module, again
    graph = fx.Graph()  # Dynamo calls the other with the inputs that it finds in it
    results: Any = graph.graph_copy(module.graph, {})
    places = graph.find_nodes(op="placeholder")
    with graph.inserting_after(places[-1]):
        for number, position in reversed([*enumerate(again)]):
            node = graph.placeholder(f"again_{number}_{places[position].name}")
            node.meta.update(places[position].meta)
    graph.output(results)
    repeated = fx.GraphModule(module, graph)
    repeated.meta.update(module.meta)
    return repeated, again


def mark_changed(joint: fx.GraphModule, num_inputs: int, changed: Iterable[int]) -> None:
    """Let what reads some inputs of a piece never be repeated: they have changed by then."""
    places = joint.graph.find_nodes(op="placeholder")
    primals = [node for node in places if not torch_compat.is_tangent(node)]
    for position in changed:  # what torch adds to the inputs itself comes first
        primals[len(primals) - num_inputs + position].meta[CHANGED] = True


def hand_out_one_by_one(
    joint: fx.GraphModule, num_forward_outputs: int, num_inputs: int, again: Sequence[int]
) -> None:
    """Take the sums of gradients of repeated inputs apart, in place.

    Args:
        num_inputs: of the graph that was traced, with the repeated ones at its end.
        again: the inputs that are repeated.

    Raises:
        Inexact: the joint graph adds up something else than was watched.
    """
    if not again:
        return
    output = joint.graph.output_node()
    results: Any = list(output.args[0])  # pyrefly: ignore[bad-argument-type] - a tuple
    first = len(results) - num_inputs  # what torch adds to the inputs itself comes first
    if first < num_forward_outputs:
        raise Inexact("a piece of the forward has other inputs than its joint graph")
    repeats = range(len(results) - len(again), len(results))
    for position, count in Counter(again).items():
        parts = torch_joint.gradient_parts(results[first + position])
        if len(parts) != count + 1:
            raise Inexact("a piece of the forward adds gradients up in another order when traced")
        results[first + position] = parts[0]
        slots = [slot for slot, each in zip(repeats, again, strict=True) if each == position]
        for slot, part in zip(slots, parts[1:], strict=True):
            results[slot] = part
    output.args = (tuple(results),)
    joint.graph.eliminate_dead_code()
    joint.recompile()


def expecting_gradients(run: Callable[..., Any], gradients: PieceGradients) -> Callable[..., Any]:
    """A compiled piece that refuses a backward in which one of its gradients does not come.

    torch would take zeros for it, and train what plain training leaves alone.
    """
    used = [position for position, each in gradients.outputs.items() if each.is_used]

    def checked(*args: Any) -> Any:
        outputs = run(*args)
        tensors = [outputs[position] for position in used]
        if tensors and tensors[0].grad_fn is not None:
            indices = [tensor.output_nr for tensor in tensors]
            tensors[0].grad_fn.register_prehook(partial(_require, indices))
        return outputs

    return checked


def _require(indices: Iterable[int], gradients: tuple[torch.Tensor | None, ...]) -> None:
    if any(gradients[index] is None for index in indices):
        raise UsageError(
            "a part of a planned model gets no gradient, but it did when the model was planned, so"
            " plain training would leave weights alone that the plan trains. Plan the model with"
            " the loss that you train with: bayplan.fit(model, batch, loss_fn, …)"
        )
