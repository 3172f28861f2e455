"""Torch's private names, in one place, so that a new release breaks in one place.

Attributes of torch's objects included. `torch_joint.py` has those for tracing a joint graph,
`torch_answers.py` and `torch_gpu.py` those for what code is told while it is traced. Each has a
test in `tests/test_torch_compat*.py` or `tests/tracing/test_values.py` that says what we rely on.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._C import DispatchKey
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
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

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
    "above_autograd",
    "after_backward",
    "arguments_in_words",
    "below_autograd",
    "boxed",
    "call_of_module",
    "call_of_overload",
    "call_with_forward",
    "changed_inputs",
    "changes_of_inputs",
    "checkpoints_in",
    "compile_fault",
    "compiled_call",
    "convertible_fakes",
    "current_backward_sequence",
    "current_fake_mode",
    "declare_cuda_kernel",
    "default_store",
    "dispatch_modes",
    "fake_mode_of",
    "foreach_devices",
    "forward_sequence",
    "global_hooks",
    "has_backward_hooks",
    "has_global_backward_hooks",
    "has_gradient_hooks",
    "hooks_of",
    "ignore_logging",
    "is_bookkeeping",
    "is_checkpointed",
    "is_compile_fault",
    "is_dense",
    "is_faking",
    "is_graph_kept",
    "is_in_functorch",
    "is_of_size",
    "is_tangent",
    "is_view",
    "kernels_alone",
    "mutated_arguments",
    "next_forward_sequence",
    "noting_changes",
    "num_changes",
    "outside_tracing",
    "overlaps",
    "replayed_views",
    "running_eagerly",
    "set_compiled_call",
    "set_fake_kernel",
    "silent_fakes",
    "storage_key",
    "suggested_format",
    "tensors_in",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "uncompiled",
    "uncompiled_name",
]

VALUE_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

# What `torch.nn.functional.grouped_mm` calls.
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


def foreach_devices() -> list[str]:
    """The types of devices on which optimizers update all parameters in one call by default."""
    return _get_foreach_kernels_supported_devices()


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of the storage itself: unique while it lives, also where it holds no data."""
    return storage._cdata


def next_forward_sequence() -> int:
    """The number that the next operator recorded by autograd in this thread will carry."""
    return torch.autograd._get_sequence_nr()


def forward_sequence(node: Any) -> int:
    """The number of the forward operator that a node of autograd was recorded for."""
    return node._sequence_nr()


def num_changes(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to in place."""
    return tensor._version


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


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The tables of the hooks that a module's calls run, by the ids of their handles."""
    forward = module._forward_pre_hooks, module._forward_hooks
    return *forward, module._backward_pre_hooks, module._backward_hooks


def global_hooks() -> tuple[dict[int, Any], ...]:
    """The same of the hooks that calls of all modules run."""
    home = nn.modules.module
    forward = home._global_forward_pre_hooks, home._global_forward_hooks
    return *forward, home._global_backward_pre_hooks, home._global_backward_hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether something is to be called when backward passes a module."""
    return any(hooks_of(module)[2:])


def has_global_backward_hooks() -> bool:
    return any(global_hooks()[2:])


def changed_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint graph whose tensors forward changes: buffers, mostly.

    The graph itself changes nothing; a forward that is cut out of it does.
    """
    described = graph.output_node().meta.get("desc", ())
    changed = [output.mutated_input for output in described if hasattr(output, "mutated_input")]
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if node.meta.get("desc") in changed]


def changes_of_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a joint graph that compute what its changed inputs are changed to."""
    end = graph.output_node()
    outputs: Any = end.args[0]
    described = zip(outputs, end.meta.get("desc", ()), strict=False)
    return [node for node, output in described if hasattr(output, "mutated_input")]


def checkpoints_in(module: fx.GraphModule) -> list[fx.Node]:
    """The calls of `torch.utils.checkpoint` in what Dynamo traced, nested ones included."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes if node.op == "call_function")
    return [node for node in nodes if str(node.target) == "tag_activation_checkpoint"]


def is_checkpointed(node: fx.Node) -> bool:
    """Whether a node of a joint graph was traced inside a checkpoint."""
    return "recompute" in node.meta


def default_store() -> Any:
    """The store that the ranks of the process group met in."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Real tensors again, inside a callback that torch makes while it traces."""
    # The second are rules in Python, of which ours would call themselves.
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def replayed_views() -> AbstractContextManager[Any]:
    """Let autograd redo a view whose base was changed by the view's own operators.

    So it does on fake tensors always; on real ones it otherwise calls `as_strided`, which costs the
    same but is another operator. To be entered at once.
    """
    return torch.autograd._force_original_view_tracking(True)


def set_fake_kernel(operator: Any, rule: Callable[..., Any]) -> None:
    """Replace what an operator does on fake tensors, for the process.

    `rule` is called with torch's own fake kernel (None where it has none) and the operator's
    arguments.
    """
    from torch._decomp import decomposition_table, meta_table
    from torch._subclasses.fake_impls import op_implementations_dict

    otherwise = decomposition_table.get(operator) or meta_table.get(operator)

    def run(mode: FakeTensorMode, _: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return rule(otherwise, *args, **kwargs)

    # Operators with an entry here are not decomposed on fake tensors, but looked up in the other
    # table. Decompositions stay what they are for other compilers.
    if otherwise is not None:
        meta_table.setdefault(operator, otherwise)
    op_implementations_dict[operator] = run
    FakeTensorMode.cache_clear()


def declare_cuda_kernel(operator: Any) -> None:
    """Let torch take an operator to have a kernel for CUDA, for fake tensors, for the process."""
    name = operator.name()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
        _cuda_kernels().impl(name.removeprefix("aten::"), _no_kernel, "CUDA")


@cache
def _cuda_kernels() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")


def _no_kernel(*_: Any) -> Any:
    raise RuntimeError("torch was built without CUDA's kernels")


def is_of_size(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph computes with sizes or numbers, and no tensor."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that kernels take a tensor's layout for."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._is_view()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether there are neither gaps between a tensor's elements nor two in one place."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != span:
                return False
            span *= size
    return True


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may be in one place, as those of an unfolded one are."""
    end = 0  # of what the smaller strides reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


class ChangesInPlace:
    """Tells whether a tensor has been changed in place, and does not keep its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self._before = tuple(tensor.shape), tensor._version
        self.sharing = tensor.detach()  # one counter of changes for both
        self.sharing.data = tensor.new_empty(0)

    def were_made(self) -> bool:
        return self.sharing._version != self._before


def is_graph_kept() -> bool:
    """Whether the backward that runs now may be followed by another through the same forward."""
    is_running = torch._C._current_graph_task_id() != -1
    return is_running and torch._C._autograd._get_current_graph_task_keep_graph()


def ignore_logging() -> None:
    """Let models that log in their forward be compiled as one graph, which then logs nothing.

    Advice to compilers that stands in a forward (`mark_static_address`) is passed over as well. For
    the process: torch has no setting for one model.
    """
    from torch._dynamo import config, decorators

    words = ("critical", "debug", "error", "exception", "info", "log", "warn", "warning")
    methods = (
        method for name, method in vars(logging.Logger).items() if name.startswith(words)
    )  # transformers adds `warning_once`
    advice = [each for name, each in vars(decorators).items() if name.startswith(_ADVICE)]
    for each in advice:
        each._dynamo_forbidden = False
    config.ignore_logging_functions = {*config.ignore_logging_functions, *methods, *advice}


_ADVICE = ("mark_dynamic", "mark_static", "mark_unbacked", "maybe_mark_dynamic")


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was given; any other is itself."""
    return getattr(module, "_orig_mod", module)


def uncompiled_name(name: str) -> str:
    """A parameter's name as if `torch.compile` had been given no part of its model."""
    return name.replace("_orig_mod.", "")


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What a module's calls run instead of its forward since `module.compile()`."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a module's calls run something else than its forward; None is its forward again."""
    module._compiled_call_impl = call


def call_of_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's call as it is without compilation: hooks and forward."""
    return module._call_impl(*args, **kwargs)


def call_with_forward(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A module's call with its hooks, around another forward."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


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


def kernels_alone() -> AbstractContextManager[Any]:
    """As `below_autograd`, and changes and views are not noted; to be entered at once.

    A view is then 220 bytes instead of 510, and does not hold the tensor that it was made from.
    """
    return torch._C._AutoDispatchBelowADInplaceOrView()


def above_autograd() -> AbstractContextManager[Any]:
    """Let autograd record again, inside of the two before; to be entered at once."""
    return _not_excluding(
        DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.ADInplaceOrView
    )


def noting_changes() -> AbstractContextManager[Any]:
    """Count changes of tensors again, inside of `kernels_alone`; to be entered at once.

    Autograd refuses a backward that would read a changed tensor by this count.
    """
    return _not_excluding(DispatchKey.ADInplaceOrView)


def _not_excluding(*keys: DispatchKey) -> AbstractContextManager[Any]:
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def arguments_in_words(operator: OpOverload) -> str:
    """An operator's arguments as its schema writes them."""
    return str(operator._schema).partition("(")[2].rpartition(") ->")[0]


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
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    # The last is a plain RuntimeError, where torch did not even begin.
    kinds = (TorchDynamoException, GuardOnDataDependentSymNode)
    return isinstance(fault, kinds) or "found no compiled frames" in str(fault)


def is_in_functorch() -> bool:
    """Whether `torch.func.grad`, `vmap` or the like is at work here."""
    return torch._C._functorch.maybe_current_level() is not None


@contextmanager
def silent_fakes() -> Iterator[None]:
    """Keep torch from logging a traceback for each error inside a fake kernel."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def convertible_fakes() -> Iterator[None]:
    """Let modules of fake tensors be converted, as by `module.half()`.

    torch swaps each parameter with its converted one, unless it finds a weak reference. The fake
    mode's own memory of what it has faked has one.
    """
    home: Any = torch.utils
    swap = home.swap_tensors

    def forget_and_swap(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                memory: Any = tensor.fake_mode.fake_tensor_converter.tensor_memo
                keys = [getattr(each, "key", None) for each in weakref.getweakrefs(tensor)]
                for key in keys:
                    if memory.get(key) is tensor:
                        del memory[key]
        swap(*tensors)

    home.swap_tensors = forget_and_swap
    try:
        yield
    finally:
        home.swap_tensors = swap


def dispatch_modes() -> list[str]:
    """The classes of the modes that see every operator here, the innermost last."""
    return [type(mode).__qualname__ for mode in _get_current_dispatch_mode_stack()]


def after_backward(call: Callable[[], None]) -> None:
    """Have something called when the backward that runs now has made all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
