"""Parameter updates inside the backward: the user's optimizer, applied as each gradient completes.

A gradient that backward returns stays to the end of the step, and all of them together are a floor
that no schedule gets below. Here an update takes a gradient's place among the outputs: it reads the
gradient, changes the parameter, and leaves nothing.

The user's own optimizer stays in charge: its groups are read before each update, so schedulers work
as ever, and its state is the one that changes, so `state_dict` is right at any time. A stand-in of
the same class does the arithmetic for a group of a single parameter. The user's later `step()`
finds no gradients and changes nothing; it marks the end of the step.

What needs all gradients at once cannot work this way. Refused are gradients from two backward
passes or from outside the model, hooks on gradients, and optimizers that are not known to treat
each parameter by itself. Between backward and `step()` an updated parameter's `.grad` is an
`AppliedGradient`, which refuses to be computed with: clipping, gradient scalers and logs of
gradients would otherwise find nothing, and go on with that.

NOTE [ Old weights ]

Nothing may read a parameter's old value after its update. Three rules ensure that for every
schedule:
1. Only forward operators may be repeated (`without_backward_repeats`).
2. A repeat serves some reader of a forward value. If it reads a parameter, directly or through
   other repeats, it serves a reader of a value that forward computes from that parameter.
3. So the update stands behind the last reader of the parameter, and of every value that forward
   computes from it. Backward visits layers in reverse, so this delays an update at most by the
   gradient of its own layer's input.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import fx, nn

from bayplan import torch_compat
from bayplan.data.errors import CaptureError, PlanBroken, UsageError
from bayplan.data.program import Cost, Program
from bayplan.rewriting.free import Price, call_alone, is_view, nodes_after_tangents

__all__ = [
    "AppliedGradient",
    "ParameterUpdates",
    "check_old_weights",
    "insert_updates",
    "without_backward_repeats",
]

Update = Callable[..., Any]  # of a parameter's index, its gradient and the parameter

_REMEDY = "turn update_in_backward off"


class AppliedGradient(torch.Tensor):
    """Stands where a gradient was that is applied and gone; whoever computes with it hears that.

    It holds one number, whatever its shape. Its shape, dtype and device may be asked for.
    """

    parameter_name: str

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> "AppliedGradient":
        number = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        gradient = number.expand(parameter.shape).as_subclass(cls)
        gradient.parameter_name = name
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _ASKED_OF_APPLIED:
            _refuse_applied(name, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override] - as torch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What reaches a kernel otherwise: autograd, when it adds a gradient from elsewhere."""
        return _refuse_applied(str(func), args, kwargs)

    def __repr__(self, **_: Any) -> str:
        return f"<gradient of {self.parameter_name}: applied in backward, not kept>"


# Facts without numbers. `__get__` is every attribute; one that makes a tensor reaches a kernel.
_ASKED_OF_APPLIED = {
    "__get__",
    "dim",
    "element_size",
    "is_complex",
    "is_floating_point",
    "numel",
    "size",
    "stride",
    "untyped_storage",
}


def _refuse_applied(what: str, args: Any, kwargs: Any) -> None:
    values = torch_compat.tensors_in((args, kwargs or {}))
    names = [value.parameter_name for value in values if isinstance(value, AppliedGradient)]
    raise PlanBroken(
        f"{what} asks for the gradient of {names[0]}, which update_in_backward has applied already"
        " and did not keep: clipping, scaling, accumulating and logging gradients need them all"
        f" after backward; {_REMEDY}"
    )


@dataclass(frozen=True)
class _Member:
    """A parameter, its place in the model, and the optimizer's group that it is in."""

    name: str
    position: int
    parameter: nn.Parameter = field(repr=False)
    group_index: int


@dataclass(repr=False)  # torch prints its backend in errors
class ParameterUpdates:
    """What updates those parameters of one model that its optimizer holds.

    Attributes:
        optimizer: the user's own.
        members: what it updates; an index counts these.
        index_by_id: how to recognise them among the inputs of a traced graph.
        function: what graphs call to update one: of its index, its gradient and itself.
    """

    optimizer: torch.optim.Optimizer
    members: tuple[_Member, ...]
    index_by_id: Mapping[int, int]
    function: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self._stand_in: torch.optim.Optimizer = copy.copy(self.optimizer)
        self._done: set[int] = set()  # since the user's last `step()`
        self._is_watching = False

        # A function, because fx cannot print a method; a result, because plans count what ops make.
        def update_parameter(
            index: int, gradient: torch.Tensor, parameter: torch.Tensor
        ) -> torch.Tensor | None:
            if type(gradient) is not torch.Tensor:
                return gradient.new_empty(0)  # while tracing
            return self._update(index, gradient, parameter)

        self.function = update_parameter

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any) -> "ParameterUpdates":
        """Take over the updates of a model; nothing changes before its first backward."""
        _check_by_parameter(optimizer)
        groups: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            groups |= {id(parameter): number for parameter in group["params"]}
        members = tuple(
            _Member(name, position, parameter, groups[id(parameter)])
            for position, (name, parameter) in enumerate(model.named_parameters())
            if id(parameter) in groups and parameter.requires_grad
        )
        _check_no_hooks(members, UsageError)
        ids = {id(member.parameter): index for index, member in enumerate(members)}
        return cls(optimizer, members, ids)

    def of_copy(self, model: nn.Module) -> "ParameterUpdates":
        """The same updates, for a copy of the model that is only traced."""
        twins = list(model.parameters())
        ids = {id(twins[member.position]): index for index, member in enumerate(self.members)}
        return replace(self, index_by_id=ids)

    def among(self, inputs: Sequence[Any]) -> dict[int, int]:
        """By position among a graph's inputs, the index of each parameter to update."""
        return {
            position: self.index_by_id[id(value)]
            for position, value in enumerate(inputs)
            if id(value) in self.index_by_id
        }

    def cost_of(self, node: fx.Node, *, price: Price) -> Cost | tuple[float, int]:
        """Price a node; an update by one on a parameter that is made up."""
        if node.target is not self.function:
            return price(node)
        index, gradient, parameter = node.args
        assert isinstance(index, int), "an update names a parameter"
        trial = _Trial(copy.copy(self.optimizer), self._group(index))
        return price(call_alone(trial, (parameter, gradient), value=None))

    def checked(
        self, run: Callable[[list[Any]], Any], graph: fx.Graph
    ) -> Callable[[list[Any]], Any]:
        """A graph's run that refuses before it starts, while no parameter has been touched yet."""
        self._watch_steps()
        updates = graph.find_nodes(op="call_function", target=self.function)
        indices = [int(str(node.args[0])) for node in updates]
        if not indices:
            return run

        def checked_run(arguments: list[Any]) -> Any:
            self._check_can_update(indices)
            return run(arguments)

        return torch_compat.boxed(checked_run)

    def _group(self, index: int) -> dict[str, Any]:
        return self.optimizer.param_groups[self.members[index].group_index]

    def _update(self, index: int, gradient: torch.Tensor, seen: torch.Tensor) -> None:
        member = self.members[index]
        if seen.data_ptr() != member.parameter.data_ptr():
            raise PlanBroken(
                f"{member.name} is another tensor than the one the optimizer was given; plan the"
                " model anew with an optimizer of its parameters"
            )
        self._watch_steps()
        self._done.add(index)
        group, state = self._group(index), self.optimizer.state
        _update_one(self._stand_in, state, group, member.parameter, gradient)
        member.parameter.grad = AppliedGradient.of(member.name, member.parameter)

    def _watch_steps(self) -> None:
        """Hear of the user's `step()`; the compiled step asks before a closure is inside of one."""
        if not self._is_watching:
            self._is_watching = True
            self.optimizer.register_step_pre_hook(self._before_step)
            self.optimizer.register_step_post_hook(lambda *_: self._done.clear())

    def _before_step(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let `step()` find no gradients; a closure makes them inside of it."""
        self._end_updates()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return args, kwargs

        def closure_then_nothing() -> Any:
            loss = closure()
            self._end_updates()
            return loss

        return (args[0], closure_then_nothing), {}

    def _end_updates(self) -> None:
        for index in self._done:
            member = self.members[index]
            if member.parameter.grad is None:
                raise PlanBroken(
                    f"the gradient of {member.name} was cleared between backward and step(), which"
                    f" leaves out an update that was made in backward; {_REMEDY}"
                )
            if not isinstance(member.parameter.grad, AppliedGradient):
                raise PlanBroken(
                    f"{member.name} was updated in backward, but part of its gradient came from"
                    f" outside the planned model; {_REMEDY}"
                )
            member.parameter.grad = None
        self._done.clear()

    def _check_can_update(self, indices: Sequence[int]) -> None:
        if not self._done.isdisjoint(indices):
            raise PlanBroken(
                "a second backward pass without optimizer.step() after the first: gradient"
                f" accumulation needs gradients kept; {_REMEDY}"
            )
        members = [self.members[index] for index in indices]
        for member in members:
            if member.parameter.grad is not None:
                raise PlanBroken(
                    f"{member.name} has a gradient before backward: gradient accumulation needs"
                    f" gradients kept; call zero_grad(set_to_none=True) first, or {_REMEDY}"
                )
        _check_no_hooks(members, PlanBroken)


@dataclass(eq=False)
class _Trial:
    """An update to measure: the first call makes the optimizer's state, later ones find it."""

    stand_in: torch.optim.Optimizer
    group: dict[str, Any]
    state: defaultdict[torch.Tensor, Any] = field(default_factory=lambda: defaultdict(dict))

    __name__ = "update"  # fx names nodes by it

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if type(parameter) is not torch.Tensor:
            parameter = parameter.detach()  # a fake one may belong to a traced graph
        _update_one(self.stand_in, self.state, self.group, parameter, gradient)

    def __str__(self) -> str:
        """What the cost depends on: whether a setting is zero, and not which rate it is."""
        settings = sorted(
            f"{name}={_kind(value)}" for name, value in self.group.items() if name != "params"
        )
        return f"{type(self.stand_in).__qualname__}({','.join(settings)})"


def _update_one(
    optimizer: torch.optim.Optimizer,
    state: defaultdict[torch.Tensor, Any],
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Run an optimizer's arithmetic for one parameter, without the hooks of the user's `step()`."""
    optimizer.state = state
    optimizer.param_groups = [{**group, "params": [parameter]}]
    parameter.grad = _laid_out_like(parameter, gradient)
    try:
        with torch_compat.noting_changes(), torch.no_grad():
            inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        parameter.grad = None


def _laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in its parameter's memory layout, as autograd hands it to an optimizer."""
    strides = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    if all(size < 2 or ours == theirs for size, ours, theirs in strides):
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _kind(value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if isinstance(value, int | float):
        return "some" if value else "none"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_kind, value)) + "]"
    return type(value).__name__


def _check_by_parameter(optimizer: Any) -> None:
    """Refuse optimizers that may look at several gradients at once."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "update_in_backward needs the optimizer that you train with, as optimizer=...; got"
            f" {'none' if optimizer is None else type(optimizer).__name__}"
        )
    name, fault = type(optimizer).__name__, ""
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        fault = " needs all gradients at once, or sparse ones, so it cannot update in backward;"
    elif not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
        fault = (
            " has a step() of its own, which may need all gradients at once; update in backward"
            " with an optimizer of torch.optim, or"
        )
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        fault = (
            "(differentiable=True) records its updates for a later backward, which needs them all"
            " kept;"
        )
    if fault:
        raise UsageError(f"{name}{fault} {_REMEDY}")


def _check_no_hooks(members: Sequence[_Member], error: type[UsageError] | type[PlanBroken]) -> None:
    for member in members:
        if torch_compat.has_gradient_hooks(member.parameter):
            raise error(
                f"{member.name} has a hook on its gradient, which would not run when it is updated"
                f" in backward; remove the hook, or {_REMEDY}"
            )


def insert_updates(
    graph: fx.Graph, *, num_forward_outputs: int, update: Update, index_of_input: Mapping[int, int]
) -> None:
    """Let a joint graph update parameters in place of returning their gradients.

    Args:
        graph: its inputs but the tangents, and its outputs behind the forward's, match one by one.
        index_of_input: by position among the inputs, the index of each parameter to update.
    """
    output = graph.output_node()
    outputs: list[Any] = list(output.args[0])  # pyrefly: ignore[bad-argument-type] - a list
    inputs = [
        node for node in graph.find_nodes(op="placeholder") if not torch_compat.is_tangent(node)
    ]
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
        value = gradient.meta["val"]
        if value.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {inputs[position].name}, of shape {tuple(value.shape)}, is"
                " sparse, which update_in_backward does not take; use sparse=False, or"
                f" {_REMEDY}"
            )
        behind = max(last_reader[inputs[position]], gradient, key=order.__getitem__)
        with graph.inserting_after(behind):
            node = graph.call_function(update, (index, gradient, inputs[position]))
        with torch_compat.fake_mode_of([value]):
            node.meta = {**gradient.meta, "val": value.new_empty(0)}
        if not _is_its_own(gradient, outputs):
            # As autograd does, which gives no parameter a gradient that others hold.
            with graph.inserting_before(node):
                clone = graph.call_function(torch.ops.aten.clone.default, (gradient,))
            with torch_compat.fake_mode_of([value]):
                clone.meta = {**gradient.meta, "val": value.clone()}
            node.replace_input_with(gradient, clone)
        outputs[num_forward_outputs + position] = node
    output.args = (outputs,)


def without_backward_repeats(program: Program) -> Program:
    """The program with forward operators alone allowed to be repeated: rule 1."""
    forward, backward = program.ops[: program.first_backward], program.ops[program.first_backward :]
    once = (msgspec.structs.replace(op, can_repeat=False) for op in backward)
    return msgspec.structs.replace(program, ops=(*forward, *once))


def check_old_weights(
    program: Program, schedule: Sequence[int], changes: Mapping[int, int]
) -> None:
    """Raise ValueError if a schedule reads a parameter after its update.

    Args:
        changes: by the op of each update, the buffer that it changes.
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
    after_tangents = set(nodes_after_tangents(graph.nodes))
    last: dict[fx.Node, fx.Node] = {}
    # From the end, so that a value's readers are settled before the value.
    for node in reversed(list(graph.nodes)):
        last[node] = node
        if node in after_tangents:
            continue  # never repeated, so nobody asks for what it was computed from
        readers = (last[user] for user in node.users if user.op != "output")
        last[node] = max((node, *readers), key=order.__getitem__)
    return last


def _is_its_own(gradient: fx.Node, outputs: list[Any]) -> bool:
    """Whether a gradient's memory is read by nobody but its update, which may overwrite it."""
    node = gradient
    while True:
        num_readers = len(node.users) + max(0, outputs.count(node) - 1)
        # The update is one, and so is the output whose place it takes.
        if num_readers > (2 if node is gradient else 1) or node.op != "call_function":
            return False
        if not is_view(node):
            return True
        node = node.all_input_nodes[0]
