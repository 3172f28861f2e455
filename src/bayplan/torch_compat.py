"""Every use of torch's private names, in one file, so that a new release breaks in one place.

Attributes of torch's objects included. Each has a test of its own in `tests/test_torch_compat*.py`
that says what we rely on.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "VALUE_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "OperatorWatch",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "after_backward",
    "boxed",
    "call_of_module",
    "changed_inputs",
    "compile_fault",
    "compile_joint",
    "compiled_call",
    "current_backward_sequence",
    "default_store",
    "fake_mode_of",
    "has_gradient_hooks",
    "ignore_logging",
    "is_bookkeeping",
    "is_faking",
    "is_tangent",
    "mutated_arguments",
    "next_forward_sequence",
    "outside_tracing",
    "replayed_views",
    "running_eagerly",
    "set_compiled_call",
    "storage_key",
    "tensors_in",
    "tree_leaves",
    "tree_map_only",
    "uncompiled",
]

VALUE_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of the storage itself: unique while it lives, also where it holds no data."""
    return storage._cdata


def next_forward_sequence() -> int:
    """The number that the next operator recorded by autograd in this thread will carry."""
    return torch.autograd._get_sequence_nr()


def current_backward_sequence() -> int | None:
    """The number of the forward operator whose gradient is being computed; None outside backward.

    The engine leaves it in place while it sums gradients after the operator's own formula.
    """
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_bookkeeping(function: Any) -> bool:
    """Whether an operator exists only for tracing or profiling and costs nothing."""
    return function.namespace in ("prim", "profiler")


class OperatorWatch(TorchDispatchMode):
    """Lets `run` do what each operator under it would do; bookkeeping passes by."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_bookkeeping(func):
            return func(*args, **(kwargs or {}))
        return self.run(func, *args, **(kwargs or {}))

    # Positional only: operators have arguments called `self`.
    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def mutated_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, by its schema; also those that return nothing."""
    arguments = function._schema.arguments
    given = {
        argument.name: value for argument, value in zip(arguments, args, strict=False)
    } | kwargs
    written = (each.name for each in arguments if each.alias_info and each.alias_info.is_write)
    return [given[name] for name in written if name in given]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in a nest of tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def fake_mode_of(values: list[Any]) -> FakeTensorMode:
    mode = detect_fake_mode(values)
    assert mode is not None, "a traced graph carries fake tensors"
    return mode


def is_faking() -> bool:
    return detect_fake_mode() is not None


def is_tangent(node: fx.Node) -> bool:
    """Whether a joint graph's input is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether anything is to be called with a parameter's gradient, before or after it is added."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def changed_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint graph whose tensors forward changes: buffers, mostly.

    The graph itself changes nothing; torch writes the new values back when forward is done.
    """
    described = graph.output_node().meta.get("desc", ())
    changed = [output.mutated_input for output in described if hasattr(output, "mutated_input")]
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if node.meta.get("desc") in changed]


def default_store() -> Any:
    """The store that the ranks of the process group met in."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def outside_tracing() -> AbstractContextManager[Any]:
    """Real tensors again, inside a callback that torch makes while it traces."""
    return _disable_current_modes()


def replayed_views() -> AbstractContextManager[Any]:
    """Let autograd redo a view whose base was changed by the view's own operators.

    So it does on fake tensors always; on real ones it otherwise calls `as_strided`, which costs the
    same but is another operator. To be entered at once.
    """
    return torch.autograd._force_original_view_tracking(True)


def compile_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    compile_graph: Any,
) -> Callable[..., Any]:
    """Have torch trace forward and backward together, cut them by `partition`, and wrap the result.

    `partition` gets the joint graph and `num_fwd_outputs`; its inputs are named `primals_*` and
    `tangents_*`. What forward returns beyond its outputs comes to backward as its first inputs.
    Sizes that torch left open are taken as they are now.
    """
    # Here: it takes a second to import, and most commands never trace.
    from torch._functorch.aot_autograd import aot_module_simplified

    return aot_module_simplified(
        module,
        [_with_known_sizes(value) for value in inputs],
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=partition,
    )


def ignore_logging() -> None:
    """Let models that log in their forward be compiled as one graph, which then logs nothing.

    For the process: torch has no setting for one model.
    """
    from torch._dynamo import config

    words = ("critical", "debug", "error", "exception", "info", "log", "warn", "warning")
    methods = (
        method for name, method in vars(logging.Logger).items() if name.startswith(words)
    )  # transformers adds `warning_once`
    config.ignore_logging_functions = {*config.ignore_logging_functions, *methods}


def _with_known_sizes(value: Any) -> Any:
    """An example of a graph's input in which sizes that torch left open have their present values.

    To ask an open size for its value is to promise that it stays: another one is compiled anew.
    """
    if isinstance(value, torch.SymInt):
        return int(value)
    if not isinstance(value, FakeTensor) or not value._has_symbolic_sizes_strides:
        return value
    shape, stride = ([int(size) for size in sizes] for sizes in (value.shape, value.stride()))
    with value.fake_mode:
        example = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return example.requires_grad_(value.requires_grad)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was given; any other is itself."""
    return getattr(module, "_orig_mod", module)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What a module's calls run instead of its forward since `module.compile()`."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a module's calls run something else than its forward; None is its forward again."""
    module._compiled_call_impl = call


def call_of_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's call as it is without compilation: hooks and forward."""
    return module._call_impl(*args, **kwargs)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a compiled graph that takes its inputs in one list, which it may empty."""
    function._boxed_call = True  # pyrefly: ignore[missing-attribute] - torch's mark
    return function


def running_eagerly() -> AbstractContextManager[Any]:
    """Let what `torch.compile` has made run as it was written; to be entered at once.

    Where the compiler was never loaded nothing is compiled, and loading it takes two seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def compile_fault(fault: BaseException) -> BaseException:
    """The error a backend raised, out of the wrapping that torch puts around it."""
    from torch._dynamo.exc import BackendCompilerFailed

    return fault.inner_exception if isinstance(fault, BackendCompilerFailed) else fault


def after_backward(call: Callable[[], None]) -> None:
    """Have something called when the backward that runs now has made all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
