"""Having torch trace the joint graph of forward and backward that plain training would run.

Left to itself torch traces something else here and there: rules of its own for some operators,
functions without changes in place, gradients laid out as it guesses. Each context manager undoes
one of these while `compile_joint` traces. What is traced holds for modules without hooks, or with
these: `watch_hooks`. Private names of torch, as in `torch_compat.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from itertools import cycle
from typing import Any

import torch
from torch import fx, nn
from torch._C import DispatchKey
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import GRADIENT_ACC_SPECIAL_STACK

from bayplan import torch_compat

__all__ = [
    *("IN_PLACE", "call_without_rules", "compile_joint", "eager_kernels", "gradient_parts"),
    *("guard_global_hooks", "remember_whole_storages", "watch_hooks"),
]

# How a traced forward ends: it changes an input's values, or (`parameter.data = …`) its memory.
_CHANGES = (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)


def compile_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    compile_graph: Any,
    whole: Iterable[Any] = (),
    tangents: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None]] = (),
) -> Callable[..., Any]:
    """Have torch trace forward and backward together, cut them by `partition`, and wrap the result.

    `partition` gets the joint graph and `num_fwd_outputs`; its inputs are named `primals_*` and
    `tangents_*`. What forward returns beyond its outputs comes to backward as its first inputs.
    Sizes that torch left open are taken as they are now. Backward is traced without autocast, as
    loops call it, whatever forward is traced under. Operators of `whole` (each with its `original`)
    are traced as their `call` says, all others as the dispatcher runs them in plain training.
    Random numbers that nobody reads are drawn all the same: later ones depend on it. `tangents` are
    shapes and strides of the gradients that will come; without strides, and where there are none,
    torch guesses.
    """
    # Here: it takes a second to import, and most commands never trace.
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor import config as inductor_config

    with (
        config.patch(backward_pass_autocast="off"),
        inductor_config.patch(fallback_random=True),
        _nothing_donated(),
        _cached_casts(),
        _as_in_eager(whole),
        _told_tangents(tangents),
    ):
        return aot_module_simplified(
            module,
            [_with_known_sizes(value) for value in inputs],
            fw_compiler=compile_graph,
            bw_compiler=compile_graph,
            partition_fn=partial(_cut, partition),
            keep_inference_input_mutations=True,
        )


def _cut(
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    joint: fx.GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph that changes nothing, and let the forward change inputs when it is cut.

    Torch ends a joint graph by copying the new values of buffers into them, or by handing them the
    new values' memory. Until it is cut these values are outputs, in front of all others.
    """
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    end = joint.graph.output_node()
    places = list(joint.graph.find_nodes(op="placeholder"))
    changes: dict[int, tuple[Any, Any]] = {}  # by position of the input, its new value and how
    for change in _CHANGES:
        for node in joint.graph.find_nodes(op="call_function", target=change):
            if node.meta.get("partitioner_tag") == "must_be_in_forward":
                changes[places.index(node.args[0])] = node.args[1], change
                joint.graph.erase_node(node)
    described = (InputMutationAOTOutput(places[index].meta["desc"]) for index in changes)
    end.args = ((*(value for value, _ in changes.values()), *_outputs(joint)),)
    end.meta["desc"] = (*described, *end.meta["desc"])
    num_outputs = num_fwd_outputs + len(changes)
    forward, backward = partition(joint, inputs, num_fwd_outputs=num_outputs, **options)
    end, outputs = forward.graph.output_node(), _outputs(forward)
    places = list(forward.graph.find_nodes(op="placeholder"))
    with forward.graph.inserting_before(end):
        for (index, (_, change)), value in zip(changes.items(), outputs, strict=False):
            forward.graph.call_function(change, (places[index], value))
    end.args = (tuple(outputs[len(changes) :]),)
    forward.recompile()
    return forward, backward


def _outputs(module: fx.GraphModule) -> Any:
    return module.graph.output_node().args[0]


def gradient_parts(gradient: Any) -> list[Any]:
    """What autograd adds up to a gradient of a joint graph, in the order in which it does.

    torch marks the sums that are autograd's own, and not a formula's.
    """
    parts: list[Any] = []
    while (
        isinstance(gradient, fx.Node)
        and gradient.target is torch.ops.aten.add.Tensor
        and GRADIENT_ACC_SPECIAL_STACK in (gradient.stack_trace or "")
    ):
        gradient, newest = gradient.args
        parts.insert(0, newest)
    return [gradient, *parts]


@contextmanager
def _told_tangents(
    tangents: Sequence[tuple[tuple[int, ...], tuple[int, ...] | None]],
) -> Iterator[None]:
    """Let torch trace with gradients of these strides, instead of those of the outputs.

    Those of outputs that overlap themselves are never taken: a gradient has a number for each
    element, and torch would copy them over each other.
    """
    from torch._functorch._aot_autograd import collect_metadata_analysis

    guess = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format
    waiting = cycle(tangents)

    def told(x: torch.Tensor) -> Any:
        shape, stride = next(waiting, ((), None))
        if stride is not None and isinstance(x, torch.Tensor) and x.shape == shape:
            x = x.new_empty_strided(shape, stride)
        is_strided = isinstance(x, torch.Tensor) and x.layout is torch.strided
        if is_strided and torch_compat.overlaps(x):
            x = x.new_empty(x.shape)
        return guess(x)

    collect_metadata_analysis.coerce_tangent_and_suggest_memory_format = told
    try:
        yield
    finally:
        collect_metadata_analysis.coerce_tangent_and_suggest_memory_format = guess


@contextmanager
def _as_in_eager(whole: Iterable[Any]) -> Iterator[None]:
    """Trace what plain training runs, where tracing would otherwise compute something else."""
    with eager_kernels(whole), _layouts_of_changes():
        yield


IN_PLACE = "bayplan_in_place"  # in a node's meta: what plain training calls, and in which strides


@contextmanager
def _layouts_of_changes() -> Iterator[None]:
    """Note where a change in place has other bits, or another layout, than what is traced for it.

    A traced graph changes nothing in place: it has the operator that returns its result instead.
    Kernels round differently there where a tensor has gaps between its elements, which a result has
    not, and they take whole vectors across what were gaps; or where numbers are complex: kernels
    take no vectors where they read what they write. And some operators (`masked_fill`) lay out
    their result in another way, in which sums that follow go in another order.
    """
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    dispatch = FunctionalTensorMode.__torch_dispatch__

    def noting(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
        if (
            mode is None
            or not isinstance(first, FunctionalTensor)
            or not func._schema.is_mutable
            or torch.Tag.inplace_view in func.tags
        ):
            return dispatch(self, func, types, args, kwargs)
        graph = mode.tracer.graph
        last = next(iter(reversed(graph.nodes)))
        stride, is_dense = tuple(first.stride()), torch_compat.is_dense(first)
        rounds = torch.Tag.pointwise in func.tags and (not is_dense or first.is_complex())
        result = dispatch(self, func, types, args, kwargs)
        out_of_place = func.overloadpacket.__name__.removesuffix("_")
        node = last.next
        while node.op != "root":
            packet = getattr(node.target, "overloadpacket", None)
            is_same = packet is not None and packet.__name__ == out_of_place
            if is_same and (rounds or (is_dense and _has_other_layout(node.meta["val"], stride))):
                node.meta[IN_PLACE] = func, stride
            node = node.next
        return result

    FunctionalTensorMode.__torch_dispatch__ = noting
    try:
        yield
    finally:
        FunctionalTensorMode.__torch_dispatch__ = dispatch


def _has_other_layout(value: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether strides differ where it matters: a dimension of one element may have any."""
    layouts = zip(value.shape, value.stride(), stride, strict=True)
    return any(size > 1 and own != other for size, own, other in layouts)


# Where torch's own C++ reads values to decide, so that tracing needs the Python rule; and the two
# that our rewrites start from (`as_eager`, `repeat_form`), which know how to have eager's bits.
_TRACED_BY_PYTHON = {
    "aten::dropout",
    "aten::native_batch_norm",
    "aten::one_hot",
    "aten::tensor_split.tensor_indices_or_sections",
}


@contextmanager
def eager_kernels(whole: Iterable[Any]) -> Iterator[None]:
    """Trace operators as the dispatcher runs them in plain training; those of `whole` as they say.

    torch has second implementations of some operators in Python, made of others, that only tracing
    uses: of upsampling, recurrent layers and some losses. Their bits are not those of the kernels.
    """
    own = {each.original: each.call for each in whole}
    before = []
    for operator in {*_overloads(torch.ops.aten), *own}:
        kernels = dict(operator.py_kernels)
        if operator.name() not in _TRACED_BY_PYTHON:
            kernels = {key: rule for key, rule in kernels.items() if key not in _TRACING_KEYS}
        if operator in own:
            kernels[_key_of_rules(operator)] = own[operator]
        if kernels != operator.py_kernels:
            before.append((operator, operator.py_kernels))
            operator.py_kernels = kernels
            operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in before:
            operator.py_kernels = kernels
            operator._dispatch_cache.clear()


_TRACING_KEYS = {DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd}


def _key_of_rules(operator: OpOverload) -> DispatchKey:
    """Where the dispatcher looks first for what autograd sees of an operator."""
    key = DispatchKey.CompositeImplicitAutograd
    is_made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    return key if is_made_of_others else DispatchKey.Autograd


def _overloads(namespace: Any) -> Iterator[OpOverload]:
    """The operators of a namespace that somebody has asked for; others have nothing in Python."""
    for packet in list(vars(namespace).values()):
        if isinstance(packet, OpOverloadPacket):
            for overload in list(vars(packet).values()):
                if isinstance(overload, OpOverload):
                    yield overload


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


def remember_whole_storages() -> None:
    """Let fake tensors forget results that lie in more memory than their elements take.

    What torch remembers of an operator's result is its shape and strides; asked again, it makes
    memory for these alone. `slice_scatter` of a part of a tensor copies all of that tensor's
    memory, so the same graph would take other memory, and be another program, the second time.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache

    validate = FakeTensorMode._validate_output_for_cache_entry

    def validate_whole(
        self: Any, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        validate(self, state, key, func, args, kwargs, output)
        if not isinstance(output, torch.Tensor) or getattr(func, "is_view", False):
            return
        sizes = [*zip(output.shape, output.stride(), strict=True)]
        if any(not isinstance(number, int) for pair in sizes for number in pair):
            return  # a question would be a guard
        last = sum((size - 1) * stride for size, stride in sizes)
        if output.untyped_storage().nbytes() > (last + 1) * output.element_size():
            raise _BypassDispatchCache("memory beyond the elements")

    FakeTensorMode._validate_output_for_cache_entry = validate_whole
    FakeTensorMode.cache_clear()


@contextmanager
def _cached_casts() -> Iterator[None]:
    """Leave the setting of autocast's cache of casts as it is, for `tracing/shared_casts.py`.

    torch switches it off where it traces, because it could hold tensors from outside.
    """
    from torch.fx.experimental import proxy_tensor

    names: Any = proxy_tensor
    disable, names.disable_autocast_cache = names.disable_autocast_cache, nullcontext
    try:
        yield
    finally:
        names.disable_autocast_cache = disable


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


def call_without_rules(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as torch's C++ has it, where a rule in Python stands before it."""
    # By the alias that it is registered under: by a device's own key, torch finds a kernel that has
    # no gradient.
    return operator._op_dk(_key_of_rules(operator), *args, **kwargs)


def watch_hooks() -> None:
    """Let a compiled module be compiled anew when one of its modules gets or loses a hook.

    For the process: torch has no setting for one model. Elsewhere it only adds to what is checked.
    Torch has one guard for each empty table, of which a module has six: most of all that it checks
    before a step. One guard asks for all tables of a module here.
    """
    from torch._dynamo import config
    from torch._dynamo.guards import GuardBuilder

    config.skip_nnmodule_hook_guards = False
    install: Any = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
    if install is not _no_hooks:
        update_wrapper(_no_hooks, install)
        GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT = _no_hooks


def _no_hooks(builder: Any, guard: Any) -> None:
    """In place of torch's guard of one empty table: the first of a module is that of all."""
    source = guard.originating_source
    asked: dict[str, list[str]] = vars(builder).setdefault("bayplan_tables_without_hooks", {})
    if source.base.name in asked:
        asked[source.base.name].append(source.member)
        return
    asked[source.base.name] = tables = [source.member]
    builder.get_guard_manager_from_source(source.base).add_lambda_guard(
        lambda module: not any(map(module.__dict__.get, tables)),
        [f"{source.base.name} has no hooks"],
        None,
    )


def guard_global_hooks() -> None:
    """Let the graph that is compiled now be compiled anew when a hook of all modules comes or goes.

    Torch guards what is in the tables, but not that they are empty.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        home = InstructionTranslator.current_tx().import_source(nn.modules.module.__name__)
    except AttributeError:  # nothing is being compiled: the graph is somebody's own
        return
    for name in ("forward_pre", "forward", "backward_pre", "backward"):
        table = AttrSource(home, f"_global_{name}_hooks")
        install_guard(table.make_guard(GuardBuilder.SEQUENCE_LENGTH))
