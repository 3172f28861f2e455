"""What code hears while it is traced: the answers of plain training. Private names of torch.

A forward may ask whether it is being compiled, whether its tensors are fake, or whether a mask is
all ones. Told the truth about tracing, it would take another branch than plain training takes.

1. `torch.compiler.is_compiling()` and its relatives are False for all code but torch's own.
2. No tensor is fake for code that is not torch's.
3. A branch on values of the batch (`if mask.all()`) goes the way of the batch that is there. That
   is guarded: a batch that decides otherwise is traced anew. The guard computes what plain training
   computes to decide, and the graph no longer does.

4. A branch on a random number of `torch.rand` that every such number decides alike goes that way.
5. `nn.LSTM`, `nn.GRU` and `nn.RNN` are traced, where Dynamo refuses them for others.
6. numpy's random numbers, and what it computes from tensors, are not traced. Dynamo would draw from
   torch's generator, and compute by torch's kernels.

All other branches on values stay Dynamo's business, also those on random numbers. Rules 1 and 3 to
6 hold for backends that carry the mark `traces_as_eager`, and nobody else's.
"""

import dis
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "KNOWN",
    "answer_as_eager",
    "break_after",
    "breaks_in_loops",
    "known_arrays",
    "last_line",
    "left_outside",
    "resumed_line",
    "unnoticed_fakes",
    "written_numbers",
]

_TORCH_FILES = os.path.dirname(torch.__file__) + os.sep


Rules = Callable[[], AbstractContextManager[Any]]
_rules: list[Rules] = [nullcontext]  # for the process, as Dynamo's answers are


class _NoTensorIsFake:
    """What code that is not torch's finds under the name FakeTensor while a step is captured."""


@contextmanager
def unnoticed_fakes() -> Iterator[None]:
    """Let libraries that ask whether a tensor is fake hear no, as they do in plain training.

    transformers skips its checks of masks for fake tensors, and then computes something else. It
    asks for the class as `torch._subclasses.FakeTensor`, so that name leads elsewhere meanwhile,
    except for torch's own files.
    """
    home = torch._subclasses
    if "FakeTensor" not in vars(home):  # hidden already, by whoever captures around us
        yield
        return

    def found(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module {home.__name__!r} has no attribute {name!r}")
        is_torchs = sys._getframe(1).f_code.co_filename.startswith(_TORCH_FILES)
        return FakeTensor if is_torchs else _NoTensorIsFake

    del home.FakeTensor
    home.__getattr__ = found  # pyrefly: ignore[missing-attribute] - Python asks it for what is gone
    try:
        with written_numbers():
            yield
    finally:
        del home.__getattr__  # pyrefly: ignore[missing-attribute]
        home.FakeTensor = FakeTensor


@contextmanager
def written_numbers() -> Iterator[None]:
    """Let a single number that is a fake tensor stand in an f-string as plain tensors do."""

    def written(tensor: torch.Tensor, form: str) -> str:
        return format(tensor.item() if tensor.dim() == 0 else repr(tensor), form)

    FakeTensor.__format__ = written  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        del FakeTensor.__format__


@contextmanager
def known_arrays() -> Iterator[None]:
    """Let `numpy()` of a fake tensor return the values that are known of it."""

    def array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        known = None if tensor.requires_grad else getattr(tensor, KNOWN, None)
        with _disable_current_modes():
            return torch.Tensor.numpy(tensor if known is None else known.value, *args, **kwargs)

    before = vars(FakeTensor).get("numpy")
    FakeTensor.numpy = array
    try:
        yield
    finally:
        del FakeTensor.numpy
        if before is not None:
            FakeTensor.numpy = before


def answer_as_eager(rules: Rules | None = None) -> None:
    """Let code that our backends trace hear that nothing is compiled, as in plain training.

    Dynamo answers `torch.compiler.is_compiling()` and its relatives with True wherever they are
    asked, so a forward that asks would take another branch than in plain training. A backend of
    ours carries the mark `traces_as_eager`; for all others, and for torch's own files, which need
    to know, the answer stays. For the process, once: Dynamo has one table of answers.

    What a stream captures is asked along with it; Dynamo fails on that where there is no GPU.

    Args:
        rules: a context in which operators are traced as our backends trace them, for those that
            Dynamo fails on. The last that was given counts.
    """
    from torch._dynamo import utils
    from torch._dynamo.symbolic_convert import (
        InliningInstructionTranslator,
        InstructionTranslator,
        InstructionTranslatorBase,
    )
    from torch._dynamo.variables import NumpyNdarrayVariable, NumpyVariable, TensorVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    if rules is not None:
        _rules[:] = [rules]
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for name in (
        *("torch._utils.is_compiling", "torch._dynamo.external_utils.is_compiling"),
        *("torch.compiler.is_compiling", "torch.compiler.is_dynamo_compiling"),
        "torch.cuda.is_current_stream_capturing",
        _FUSED_ATTENTION_ASKS,
    ):
        home, _, attribute = name.rpartition(".")
        asked = getattr(sys.modules[home], attribute)
        handler = handlers.get(asked)
        if not hasattr(handler, "bayplan_answer"):
            handlers[asked] = _answering_as_eager(handler)
    if not hasattr(TensorVariable.bool_impl, "bayplan_answer"):
        torch.compiler.substitute_in_graph(torch.xpu.is_current_stream_capturing)(_not_capturing)
        TensorVariable.bool_impl = _told_truth(TensorVariable.bool_impl)
        TensorVariable.method_item = _told_truth(TensorVariable.method_item)
        TensorVariable.method_numpy = _by_numpy(TensorVariable.method_numpy, "numpy")
        NumpyNdarrayVariable.call_method = _by_numpy(NumpyNdarrayVariable.call_method, "method")
        NumpyVariable.call_function = _by_numpy(NumpyVariable.call_function, "function")
        VariableBuilder.wrap_module = _with_recurrence(VariableBuilder.wrap_module)
        utils._get_fake_value_impl = _by_rules(utils._get_fake_value_impl)
        InstructionTranslatorBase.raise_loop_graph_break = staticmethod(
            _noting_line(InstructionTranslatorBase.raise_loop_graph_break)
        )
        for translator in (InstructionTranslator, InliningInstructionTranslator):
            for name, code in dis.opmap.items():
                if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE")):
                    jump = translator.dispatch_table[code]
                    translator.dispatch_table[code] = _jumping_by_values(jump)


def break_after(module: fx.GraphModule) -> str:
    """Where Dynamo ended a graph that it could not go on with, and why; empty where it did not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    text = str(reason.reason).strip().split("\n", 1)[0]
    if not reason.user_stack:
        return text
    frame = reason.user_stack[-1]
    return f"{frame.filename}:{frame.lineno} (`{frame.line}`): {text}"


_line_in_loop: dict[CodeType, str] = {}  # of a break, by the frame that Dynamo does not compile


def _noting_line(give_up: Callable[..., Any]) -> Callable[..., Any]:
    def noting(code: CodeType, fault: Any) -> Any:
        if stack := getattr(fault, "real_stack", None):
            _line_in_loop[code] = f"{stack[-1].filename}:{stack[-1].lineno} (`{stack[-1].line}`)"
        give_up(code, fault)

    return noting


def breaks_in_loops(model: nn.Module) -> tuple[str, ...]:
    """Lines in loops of a model's forwards that Dynamo met and could not trace."""
    codes = (getattr(type(each).forward, "__code__", None) for each in model.modules())
    return tuple(dict.fromkeys(_line_in_loop[code] for code in codes if code in _line_in_loop))


def last_line(module: fx.GraphModule) -> str:
    """The line of a forward behind the last operator of a graph of Dynamo's; empty if none."""
    traces = (node.meta.get("stack_trace") for node in reversed(module.graph.nodes))
    trace = next(filter(None, traces), "")
    places = re.findall(r'File "(.+?)", line (\d+)', trace)
    return "{}:{}".format(*places[-1]) if places else ""


def resumed_line() -> str:
    """The line after a break where the graph that Dynamo compiles now begins; empty if none."""
    translator = _translator()
    if translator is None:
        return ""
    code: CodeType = translator.f_code
    is_resumed = code.co_name.startswith("torch_dynamo_resume_in")
    return f"{code.co_filename}:{code.co_name.rpartition('_')[2]}" if is_resumed else ""


def left_outside() -> set[str]:
    """Nodes of the graph that Dynamo compiles now whose values a forward leaves in older objects.

    Such as an attribute of a module, or a list that it holds. They are outputs of the graph beside
    what the forward returns.
    """
    from torch._dynamo.variables.base import ValueMutationExisting, VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    translator = _translator()
    if translator is None:
        return set()
    effects, left, seen = translator.output.side_effects, [], []
    for variable in effects.id_to_variable.values():
        if variable.source is not None and effects.is_modified(variable):
            left.append(effects.store_attr_mutations.get(variable, {}))
            if isinstance(variable.mutation_type, ValueMutationExisting):  # a list or a dict
                left.append(variable)
    VariableTracker.visit(seen.append, left)
    # By the type: to ask `isinstance` makes Dynamo look into what it has left alone, and then such
    # a tensor is one more input of the graph.
    return {each.proxy.node.name for each in seen if issubclass(type(each), TensorVariable)}


def _translator() -> Any:
    """Dynamo's own of the frame that it compiles now, of which a backend hears nothing."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        translator = getattr(frame.f_locals.get("self"), "root_tx", None)
        if translator is not None:
            return translator
        frame = frame.f_back
    return None


def _not_capturing() -> bool:
    return False


# `nn.MultiheadAttention` takes its fused kernel unless it is traced, which Dynamo says it is.
_FUSED_ATTENTION_ASKS = "torch.nn.modules.activation._is_make_fx_tracing"
# Functions that ask only because Dynamo cannot trace what they do otherwise, which comes to the
# same: transformers keeps the outputs it collects in a context variable.
_ASK_TO_BE_TRACEABLE = {"CompileableContextVar.set"}


def _answering_as_eager(handler: Callable[..., Any] | None) -> Callable[..., Any]:
    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        codes = [frame.f_code for frame in (tx, getattr(tx, "parent", None)) if frame is not None]
        is_torchs = codes[0].co_filename.startswith(_TORCH_FILES)
        is_harmless = not _ASK_TO_BE_TRACEABLE.isdisjoint(code.co_qualname for code in codes)
        is_torchs &= self.value is not torch.nn.modules.activation._is_make_fx_tracing
        if is_torchs or is_harmless or not _traces_as_eager(tx.output.compiler_fn):
            # None is Dynamo's for the rest of its rules.
            return None if handler is None else handler(self, tx, *args, **kwargs)
        from torch._dynamo.variables import ConstantVariable

        return ConstantVariable.create(False)

    answer.bayplan_answer = True  # pyrefly: ignore[missing-attribute] - so that it is put in once
    return answer


def _traces_as_eager(backend: Any) -> bool:
    """Whether a backend is ours, under the wrapping that torch puts around it."""
    while backend is not None:
        if getattr(backend, "traces_as_eager", False):
            return True
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(
            backend, "compiler_fn", None
        )
        backend = inner if inner is not backend else None
    return False


def _with_recurrence(wrap_module: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo trace `nn.LSTM`, `nn.GRU` and `nn.RNN`.

    It refuses them because of the rules that other compilers take them apart by, which we do not.
    """

    def wrap(self: Any, value: nn.Module) -> Any:
        if not _traces_as_eager(self.tx.output.compiler_fn):
            return wrap_module(self, value)
        from torch._dynamo import config

        with config.patch(allow_rnn=True):
            return wrap_module(self, value)

    return wrap


def _by_numpy(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`tensor.numpy()`, or a function or a method of numpy's, which Dynamo would trace as torch's.

    What numpy makes of constants alone is the same number, and is traced.
    """

    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.exc import unimplemented
        from torch._dynamo.variables import BaseListVariable, TensorVariable

        if _traces_as_eager(tx.output.compiler_fn):
            given = [*args[0], *args[1].values()] if name == "function" else []
            for each in given:
                given += each.items if isinstance(each, BaseListVariable) else ()
            # Arrays are tensors here.
            if name != "function" or any(isinstance(each, TensorVariable) for each in given):
                unimplemented(
                    gb_type="a call of numpy",
                    context=f"{self} {args} {kwargs}",
                    explanation="Its numbers are numpy's own, so it runs between graphs.",
                    hints=[],
                )
            with config.patch(use_numpy_random_stream=True):
                return method(self, tx, *args, **kwargs)
        return method(self, tx, *args, **kwargs)

    return answer


def _by_rules(fake_value: Callable[..., Any]) -> Callable[..., Any]:
    """What an operator makes of fake tensors: as Dynamo finds it or, if it fails, by our rules."""

    def answer(node: fx.Node, tx: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import Unsupported

        try:
            return fake_value(node, tx, *args, **kwargs)
        except Unsupported:
            if not _traces_as_eager(tx.output.compiler_fn):
                raise
            with _rules[-1]():
                return fake_value(node, tx, *args, **kwargs)

    return answer


def _told_truth(method: Callable[..., Any]) -> Callable[..., Any]:
    """`bool(tensor)` and `tensor.item()` of a truth value that is known."""

    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.variables import ConstantVariable

        is_truth = method.__name__ == "bool_impl" or self.dtype is torch.bool
        truth = _known_truth(tx, self) if is_truth else None
        return (
            method(self, tx, *args, **kwargs) if truth is None else ConstantVariable.create(truth)
        )

    answer.bayplan_answer = True  # pyrefly: ignore[missing-attribute]
    return answer


def _jumping_by_values(jump: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: Any, instruction: Any) -> Any:
        from torch._dynamo.variables import ConstantVariable, TensorVariable

        condition = self.stack[-1].realize()
        if isinstance(condition, TensorVariable):
            truth = _known_truth(self, condition)
            if truth is not None:
                self.stack[-1] = ConstantVariable.create(truth)
        return jump(self, instruction)

    return answer


def _known_truth(tx: Any, condition: Any) -> bool | None:
    """Which way a branch goes that Dynamo is about to trace; None where it is not ours to say."""
    node = condition.as_proxy().node
    if not _traces_as_eager(tx.output.compiler_fn) or node.graph is not tx.output.graph:
        return None
    truth = _truth_of_range(node)
    return _truth_of_batch(node) if truth is None else truth


# Of a number in [0, 1): which constants decide a comparison with it, and how.
_BELOW = {"lt", "__lt__", "le", "__le__"}
_ABOVE = {"gt", "__gt__", "ge", "__ge__"}
_WITH_EQUAL = {"le", "__le__", "ge", "__ge__"}


def _truth_of_range(node: fx.Node) -> bool | None:
    """A comparison of `torch.rand` with a constant that all or none of its numbers fulfil.

    So layers that are dropped with probability 0 decide. The number stays in the graph: plain
    training draws it, and later ones depend on it.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or name not in _BELOW | _ABOVE:
        return None
    is_random = [isinstance(each, fx.Node) and each.target is torch.rand for each in node.args]
    if is_random not in ([True, False], [False, True]):
        return None
    constant = node.args[is_random.index(False)]
    if not isinstance(constant, int | float):
        return None
    is_below = (name in _BELOW) == is_random[0]  # `rand < constant`, or the other way round
    if constant >= 1:
        return is_below
    if constant < 0 or (constant == 0 and is_below != (name in _WITH_EQUAL)):
        return not is_below
    return None


_MOST_NODES = 64  # of a decision; more is a part of the model and not a check of its batch


def _truth_of_batch(node: fx.Node) -> bool | None:
    """The outcome of a branch that depends on the batch alone, guarded for the batches to come."""
    needed = _ancestors(node)
    inputs = [each for each in needed if each.op == "placeholder"]
    if len(needed) > _MOST_NODES or not all(map(_is_of_batch, inputs)):
        return None
    if any(each.op not in ("placeholder", "call_function", "call_method") for each in needed):
        return None
    for other in node.graph.nodes:
        if _writes(other) and not needed.isdisjoint(_ancestors(other)):
            return None
    graphargs = [each.meta["grapharg"] for each in inputs]
    known = [each.example for each in graphargs if hasattr(each.example, KNOWN)]
    check = _cut_out(node, needed, home=_value_of(known[0]).device if known else None)
    with _disable_current_modes():
        truth = _evaluate(check, [each.example for each in graphargs])
    if truth is not None and inputs:  # what depends on constants alone needs no guard
        _guard([each.source for each in graphargs], check, truth)
    return truth


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _is_of_batch(node: fx.Node) -> bool:
    argument = node.meta.get("grapharg")
    if argument is None or not argument.is_tensor or argument.source is None:
        return False
    is_models = isinstance(argument.example, nn.Parameter) or "L['self']" in argument.source.name
    # After a break in the graph, what was computed before it comes as an input, too.
    is_computed = isinstance(argument.example, torch.Tensor) and argument.example.requires_grad
    return isinstance(argument.example, torch.Tensor) and not is_models and not is_computed


def _writes(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph changes a tensor, by the names that torch gives to these."""
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_operator = name in ("setitem", "__setitem__") or name.startswith("__i")
    if getattr(target, "__module__", "") == "_operator":
        # `iadd` and `ior` write; `invert`, `is_not` and, named so for the keyword, `or_` do not.
        other = name.removeprefix("i")
        is_augmented = other != name and any(
            hasattr(operator, each) for each in (other, f"{other}_")
        )
        return is_operator or is_augmented
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or is_operator or "out" in node.kwargs


def _cut_out(node: fx.Node, needed: set[fx.Node], home: torch.device | None) -> fx.GraphModule:
    """What a node is computed from, as a graph; on the device of values that are known, if any."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def at_home(argument: Any) -> Any:
        return home if isinstance(argument, torch.device) and home is not None else argument

    for each in node.graph.nodes:
        if each in needed:
            copy = copies[each] = graph.node_copy(each, copies.__getitem__)
            copy.args, copy.kwargs = fx.node.map_aggregate((copy.args, copy.kwargs), at_home)
            copy.meta.clear()  # which holds fake tensors
    graph.output(copies[node])
    return fx.GraphModule(nn.Module(), graph)


class _Pure(TorchDispatchMode):
    """Stops at what may not be computed a second time: random numbers and changes in place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(f"{func} is not the same twice")
        return func(*args, **(kwargs or {}))


def _evaluate(check: fx.GraphModule, values: Sequence[Any]) -> bool | None:
    values = [_value_of(value) for value in values]
    try:
        with torch.no_grad(), _Pure():
            return bool(check(*values))
    except Exception:  # whatever it is, plain training meets it where it belongs
        return None


KNOWN = "bayplan_known"  # the attribute of a fake tensor that has its values, as `value`


def _value_of(tensor: Any) -> Any:
    known = getattr(tensor, KNOWN, None)
    return tensor if known is None else known.value


def _guard(sources: Sequence[Any], check: fx.GraphModule, truth: bool) -> None:
    from torch._dynamo.guards import _get_closure_vars, install_guard

    names = [source.name for source in sources]
    codes: list[CodeType] = [compile(name, "<guard>", "eval") for name in names]

    def BRANCH_ON_VALUES(builder: Any, guard: Any) -> None:
        scope = {**_get_closure_vars(), "G": builder.scope["G"]}

        def holds(local_names: dict[str, Any]) -> bool:
            values = [eval(code, {**scope, "L": local_names}) for code in codes]
            return _evaluate(check, values) is truth

        text = f"a branch on {', '.join(names)} goes the way of {truth}"
        builder.guard_manager.root.add_epilogue_lambda_guard(holds, [text], None)

    install_guard(sources[0].make_guard(BRANCH_ON_VALUES))
