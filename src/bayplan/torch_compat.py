"""Torch's private names, in one place, so that a new release breaks in one place.

Attributes of torch's objects included. `torch_answers.py` has those for what code is told while it
is traced. Each has a test of its own in `tests/test_torch_compat*.py` or
`tests/tracing/test_values.py` that says what we rely on.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "GROUPED_PRODUCT",
    "VALUE_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OperatorWatch",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "after_backward",
    "below_autograd",
    "boxed",
    "call_of_module",
    "call_of_overload",
    "changed_inputs",
    "compile_fault",
    "compile_joint",
    "compiled_call",
    "current_backward_sequence",
    "current_fake_mode",
    "default_store",
    "dispatch_modes",
    "fake_mode_of",
    "has_gradient_hooks",
    "ignore_logging",
    "is_bookkeeping",
    "is_compile_fault",
    "is_faking",
    "is_graph_kept",
    "is_of_size",
    "is_tangent",
    "mutated_arguments",
    "next_forward_sequence",
    "outside_tracing",
    "replayed_views",
    "running_eagerly",
    "set_compiled_call",
    "set_fake_kernel",
    "storage_key",
    "suggested_format",
    "tensors_in",
    "tree_leaves",
    "tree_map_only",
    "uncompiled",
]

VALUE_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

# What `torch.nn.functional.grouped_mm` calls.
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


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


def current_fake_mode() -> FakeTensorMode | None:
    """The mode that fakes tensors here, if one does."""
    return detect_fake_mode()


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


def set_fake_kernel(operator: Any, rule: Callable[..., Any]) -> None:
    """Replace what an operator does on fake tensors, for the process.

    `rule` is called with torch's own fake kernel and the operator's arguments.
    """
    from torch._decomp import decomposition_table, meta_table
    from torch._subclasses.fake_impls import op_implementations_dict

    otherwise = decomposition_table.get(operator) or meta_table[operator]

    def run(mode: FakeTensorMode, _: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return rule(otherwise, *args, **kwargs)

    # Operators with an entry here are not decomposed on fake tensors, but looked up in the other
    # table. Decompositions stay what they are for other compilers.
    meta_table.setdefault(operator, otherwise)
    op_implementations_dict[operator] = run
    FakeTensorMode.cache_clear()


def is_of_size(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph computes with sizes or numbers, and no tensor."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that kernels take a tensor's layout for."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)


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
    Sizes that torch left open are taken as they are now. Backward is traced without autocast, as
    loops call it, whatever forward is traced under. Random numbers that nobody reads are drawn all
    the same: later ones hang on that.
    """
    # Here: it takes a second to import, and most commands never trace.
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor import config as inductor_config

    with (
        config.patch(backward_pass_autocast="off"),
        inductor_config.patch(fallback_random=True),
        _nothing_donated(),
    ):
        return aot_module_simplified(
            module,
            [_with_known_sizes(value) for value in inputs],
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            partition_fn=partition,
        )


@contextmanager
def _nothing_donated() -> Iterator[None]:
    """Let torch know that backward overwrites nothing of what forward saved for it.

    Else it refuses `retain_graph=True` in every backward after one without it.
    """
    from torch._functorch._aot_autograd import graph_compile

    def nothing(*_: Any, **__: Any) -> list[int]:
        return []

    collect = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = nothing
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = collect


def is_graph_kept() -> bool:
    """Whether the backward that runs now may be followed by another through the same forward."""
    is_running = torch._C._current_graph_task_id() != -1
    return is_running and torch._C._autograd._get_current_graph_task_keep_graph()


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


def call_of_overload(operator: OpOverload) -> Callable[..., Any]:
    """What calling an overload calls in turn."""
    return operator._op


def below_autograd() -> AbstractContextManager[Any]:
    """Run operators without asking autograd for each whether it records; to be entered at once."""
    return torch._C._AutoDispatchBelowAutograd()


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


def is_compile_fault(fault: BaseException) -> bool:
    """Whether an error was raised while torch compiled, and not by what it compiled."""
    from torch._dynamo.exc import TorchDynamoException

    # The second is a plain RuntimeError, where torch did not even begin.
    return isinstance(fault, TorchDynamoException) or "found no compiled frames" in str(fault)


def dispatch_modes() -> list[str]:
    """The classes of the modes that see every operator here, the innermost last."""
    return [type(mode).__qualname__ for mode in _get_current_dispatch_mode_stack()]


def after_backward(call: Callable[[], None]) -> None:
    """Have something called when the backward that runs now has made all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
