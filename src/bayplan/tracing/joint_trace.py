"""One training step traced for planning, without memory, as a joint graph.

The model is copied onto fake tensors and compiled with a backend that only looks: it takes the
joint graph of forward and backward and stops there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from bayplan import torch_answers, torch_compat, torch_joint
from bayplan.data.errors import BayplanError, CaptureError, NotOneGraph
from bayplan.rewriting.whole_operators import whole_operators
from bayplan.step import TrainingStep, call_model, split_batch
from bayplan.tracing.checkpoints import with_checkpoints_checked
from bayplan.tracing.explain import explained, out_of_memory
from bayplan.tracing.fake import fake_step, without_memory
from bayplan.tracing.hooks import hooked_text, on_copies, refused_hooks
from bayplan.tracing.shared_casts import sharing_casts
from bayplan.tracing.tangents import OutputGradient, compile_with_tangents, matched
from bayplan.tracing.traced_step import MemoryContext, TracedStep

__all__ = ["Joint", "compile_whole", "joint_of", "trace_step", "uncompile", "untraceable"]

_MOST_GRAPHS = 256  # of one model; torch allows no more over all copies of a function


@dataclass(frozen=True)
class Joint:
    """A joint graph as torch hands it over, and the tensors it was traced with."""

    module: fx.GraphModule
    num_forward_outputs: int
    inputs: Sequence[Any]


def trace_step(step: TrainingStep, context: MemoryContext) -> TracedStep:
    """Return the joint graph of a step's model as the backend will see it when it runs."""
    with step.on_gpu(), without_memory() as mode:
        fake = fake_step(step, None)
    if context.updates is not None:
        context = replace(context, updates=context.updates.of_copy(fake.model))
    with step.on_gpu(), mode, fake.precision():
        inputs = split_batch(fake.batch, fake.loss_fn)[0]
        joint = joint_of(fake.model, inputs, context.loss.gradients)
    # Outside: torch has traced it on fake tensors of its own.
    return TracedStep.of(joint.module, joint.num_forward_outputs, context, joint.inputs)


def joint_of(model: nn.Module, inputs: Any, gradients: Sequence[OutputGradient] = ()) -> Joint:
    """Have torch trace a call of a model with its backward, and stop it there.

    `gradients` are those that its outputs get. To be called where tensors take no memory; the model
    must be a copy made there.
    """
    stop = _Stop()

    def backend(module: Any, examples: Any) -> Callable[..., Any]:
        def take(joint: Any, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
            stop.joint = Joint(joint, num_fwd_outputs, examples)
            raise stop

        checked = with_checkpoints_checked(module, take)
        with sharing_casts(module, examples):
            return compile_with_tangents(
                module,
                examples,
                matched(module, gradients),
                partition=checked,
                compile_graph=None,
                whole=whole_operators(),
            )

    backend.traces_as_eager = True  # pyrefly: ignore[missing-attribute] - a mark for torch_compat
    compile_whole(model, backend)

    def trace() -> Exception | None:
        try:
            with on_copies():
                call_model(model, inputs)
        except Exception as fault:
            return None if torch_compat.compile_fault(fault) is stop else fault
        return None

    fault = trace()
    if fault is not None and torch_compat.is_compile_fault(fault):
        # Some models make things in their first call, which torch cannot trace; later ones can be.
        compiled = torch_compat.compiled_call(model)
        torch_compat.set_compiled_call(model, None)
        try:
            with on_copies(), explained(), torch.no_grad():
                call_model(model, inputs)
        except CaptureError as plain:
            if not isinstance(plain.__cause__, torch_compat.VALUE_DEPENDENT_ERRORS):
                raise
            raise untraceable(fault, model) from fault  # a branch on what nobody knows here
        torch_compat.set_compiled_call(model, compiled)
        fault = trace()
    if fault is not None:
        raise untraceable(fault, model) from fault
    assert stop.joint is not None, "a model with parameters to train is traced with its backward"
    stop.__traceback__ = None  # its frames hold the model and all that torch made of it
    return stop.joint


def compile_whole(model: nn.Module, backend: Callable[..., Any], *, fullgraph: bool = True) -> None:
    """Let a module's calls be compiled as one graph each, anew for every batch size and mode.

    Memory is exact or nothing, so no unknown size is allowed, and no break in the graph where the
    backend plans for the graph alone.
    """
    options: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph}
    # Sizes between pieces may depend on values; a backend takes those of its pieces as they are.
    options["dynamic"] = False if fullgraph else None
    # Else the ninth batch size of a class of models, over all its instances, is refused.
    options |= {"recompile_limit": _MOST_GRAPHS, "isolate_recompiles": True}
    torch_compat.ignore_logging()
    torch_joint.watch_hooks()
    torch_answers.answer_as_eager(lambda: torch_joint.eager_kernels(whole_operators()))
    for module in [model] if fullgraph else [*_torchs_own(model), model]:
        _compile_calls(module, options)


def _compile_calls(model: nn.Module, options: dict[str, Any]) -> None:
    """Let a module's calls run its compiled forward, between its hooks."""
    compiled, patched = torch.compile(_forward_of(model), **options), vars(model).get("forward")

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled, patched
        if vars(model).get("forward") is not patched:  # wrapped since, as some libraries do
            compiled, patched = torch.compile(_forward_of(model), **options), model.forward
        if not any((*torch_compat.hooks_of(model), *torch_compat.global_hooks())):
            return compiled(*args, **kwargs)
        # The model's own hooks are around its graph, and run as they are written.
        return torch_compat.call_with_forward(model, compiled, *args, **kwargs)

    torch_compat.set_compiled_call(model, call)


def uncompile(model: nn.Module, call: Callable[..., Any] | None = None) -> None:
    """Take back what `compile_whole` did; a module's own compiled call may be put back."""
    for module in _torchs_own(model):
        torch_compat.set_compiled_call(module, None)
    torch_compat.set_compiled_call(model, call)


def _torchs_own(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of torch that hold others, below a model.

    In frames that torch does not compile, for a break in a loop, each of them is a piece.
    """
    found: list[nn.Module] = []
    for child in model.children():
        # Lists and dicts of modules have no forward of their own, and are called by nobody.
        is_called = type(child).forward is not nn.Module.forward
        has_parts = next(child.children(), None) is not None
        if is_called and has_parts and _is_torchs(type(child).forward):
            found.append(child)
        else:
            found += _torchs_own(child)
    return found


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    # torch passes over frames of its own, `nn.Sequential`'s, and compiles child by child.
    return MethodType(_forward, model) if _is_torchs(model.forward) else model.forward


def _is_torchs(forward: Callable[..., Any]) -> bool:
    return (forward.__module__ or "").startswith("torch.")  # none of what `torch.fx` writes


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The frame of ours that torch begins with; `self` as in a forward, for the modules' paths."""
    return type(self).forward(self, *args, **kwargs)


class _Stop(Exception):
    """Raised inside the compiler once the graph is there."""

    joint: Joint | None = None


def untraceable(fault: Exception, model: nn.Module | None = None) -> BayplanError:
    """What to tell a user whose forward torch could not trace as one graph."""
    inner = torch_compat.compile_fault(fault)
    if isinstance(inner, BayplanError):
        return inner
    told = out_of_memory(inner) or (None if model is None else refused_hooks(model))
    if told is None and "Unsafe side effect" in str(inner):
        told = CaptureError(
            "code that torch traces apart from the forward changes something outside of it, like a"
            " list, a counter or an attribute: a hook on a tensor (`register_hook`), which may only"
            f" compute with its gradient, or a checkpointed function. {inner}"
        )
    if told is not None:
        return told
    # What hooks of submodules do between pieces would be theirs alone to know.
    hooked = "" if model is None else hooked_text(model)
    text = f"torch cannot trace the model's forward as one graph, which planning needs: {inner}"
    if hooked:
        return CaptureError(text + hooked)
    return NotOneGraph(
        f"{text}\nbayplan.fit plans the pieces between such lines together, unless fullgraph=True"
    )
