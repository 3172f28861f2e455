"""What a planned model raises: always a `BayplanError`, and still what plain training would raise.

Loops catch errors by type: `torch.OutOfMemoryError` to try a smaller batch, a `ValueError` of their
own to skip a sample. So an error that is not ours becomes one of a class made for it, which is both
a `BayplanError` and the class it had, with its text and attributes; the original is its cause.

What torch raises while it compiles says little of the model. There the plain forward is asked: if
it fails as well, its error is the one to see.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.data.errors import BayplanError, CaptureError, DoesNotFit, PlanBroken, UsageError
from bayplan.data.plan import StepOrder
from bayplan.data.units import format_bytes, limit_text, tighter_limit
from bayplan.devices.device import HOST, Device, device_of
from bayplan.tracing.capture import BufferStates, GeneratorStates, ParameterStates
from bayplan.tracing.explain import asked_memory, is_out_of_memory
from bayplan.tracing.hooks import num_hooks, on_copies, own_generators, refused_hooks
from bayplan.tracing.joint_trace import untraceable
from bayplan.tracing.shared_casts import keeps_casts

__all__ = [
    *("Planned", "also_ours", "explained_call", "explained_run", "once_differentiable"),
    "unchanged",
]

Run = Callable[[list[Any]], Any]
_IN_EAGER = 'under torch.compiler.set_stance("force_eager")'
_UNPLANNED = (
    "Give it copy.deepcopy(model), which is not planned, or call the model"
    f" {_IN_EAGER}, which runs it as without a plan"
)
# What torch says of calls that a compiled model cannot take, and what it means.
_UNSUPPORTED = {
    "implement the jvp function": "the planned model is differentiated in forward mode"
    " (torch.autograd.forward_ad, torch.func.jvp), for which its steps are not planned",
    "torch.jit.trace a dynamo": "the planned model is given to torch.jit.trace, which does not see"
    " into what torch has compiled",
}


class Planned(BaseException):
    """Raised in place of a graph's run where it was only to be planned.

    What Python code of the forward and of hooks does to lists and counters would come after it, and
    is left undone: the step that it belongs to is still to come.
    """


def explained_call(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled call of a model whose errors are ours.

    Without gradients the model runs as it is written: nothing is kept, so there is nothing to plan,
    and torch's own layers compute otherwise there (`nn.TransformerEncoder` with a mask, in `eval`)
    than what can be traced.
    """
    is_fitted = False
    plainly = partial(torch_compat.call_of_module, model)

    def explained(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_fitted
        try:
            if not torch.is_grad_enabled() and not keeps_casts():
                return plainly(*args, **kwargs)
            with torch_compat.silent_fakes():  # they are told here, in the user's terms
                output = call(*args, **kwargs)
            is_fitted = True
            return output
        except Planned:
            is_fitted = True
            raise
        except BayplanError:
            raise
        except Exception as fault:
            inner = torch_compat.compile_fault(fault)
            if not isinstance(inner, BayplanError):
                before = num_hooks(model)
                told = _fault_of_call(fault, model, args, kwargs)
                if num_hooks(model) != before:  # a library installs them in the first forward
                    with suppress(Exception):
                        return call(*args, **kwargs)
                raise told from fault
        if is_fitted and isinstance(inner, DoesNotFit):
            raise DoesNotFit(
                "a batch unlike those before is planned when it comes, within the limit that the"
                f" model was fitted to: {inner}",
                smallest_bytes=inner.smallest_bytes,
            ) from inner
        raise inner.with_traceback(None)  # torch's wrapping of an error of ours says nothing more

    return explained


def _fault_of_call(
    fault: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BayplanError:
    if not torch_compat.is_compile_fault(fault):  # of code that ran
        told = next((told for text, told in _UNSUPPORTED.items() if text in str(fault)), None)
        return also_ours(fault) if told is None else CaptureError(f"{told}. {_UNPLANNED}")
    if refused := refused_hooks(model):
        return refused
    if torch_compat.is_in_functorch():
        return CaptureError(
            "the planned model is called under torch.func (grad, vmap, jacrev or the like), which"
            f" torch's compiled calls do not support. {_UNPLANNED}"
        )
    plain = _plain_fault(model, args, kwargs)
    if plain is not None:
        return also_ours(plain)
    if modes := torch_compat.dispatch_modes():
        return CaptureError(
            f"the planned model is called under {modes[-1]}, which wants to see every operator, so"
            f" torch compiles nothing there. Leave it out, or call the model {_IN_EAGER}, which"
            " runs it as without a plan"
        )
    return untraceable(fault, model)


def _plain_fault(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """The error that the forward raises when it is run as it is written; None if it does not.

    Without gradients first, so that it takes little memory. What a forward did before it failed is
    left as plain training leaves it.
    """
    for gradients, fails_for_real in ((torch.no_grad(), False), (torch.enable_grad(), True)):
        try:
            with (
                unchanged(model, unless_it_fails=fails_for_real) as parameters,
                on_copies(*model.modules()),
                gradients,
                parameters,
            ):
                torch_compat.call_of_module(model, *args, **kwargs)
            return None
        except Exception as fault:  # of tensors without a gradient, perhaps: `register_hook`
            found = fault
    return found


@contextmanager
def unchanged(
    model: nn.Module, changed: Collection[str] = (), *, unless_it_fails: bool = False
) -> Iterator[ParameterStates]:
    """Put a model's buffers, parameters, generators and the random numbers back as they were.

    Args:
        changed: the parameters that a forward changes, unless it runs under the watch that this
            yields.
        unless_it_fails: whether to leave everything as it is after an error.
    """
    states = (GeneratorStates(), BufferStates(model), ParameterStates(model, changed))
    generators = [(each, each.get_state()) for each in own_generators(model.modules())]
    is_left = False
    try:
        yield states[-1]
    except Exception:
        is_left = unless_it_fails
        raise
    finally:
        if not is_left:
            for generator, state in generators:
                generator.set_state(state)
            for each in states:
                each.put_back()


def explained_run(run: Run, order: StepOrder | None = None) -> Run:
    """A compiled graph's run whose errors are ours: of the plan's own kernels, in both phases.

    Args:
        order: what it carries out, whose predictions are told beside what is there.
    """

    def explained(arguments: list[Any]) -> Any:
        # The first one's alone, which no generator keeps: steps of a millisecond have hundreds.
        device = HOST.where
        for each in arguments:
            if isinstance(each, torch.Tensor):
                device = each.device
                break
        each = None
        try:
            return run(arguments)
        except BayplanError:
            raise
        except Exception as fault:
            promise = "" if order is None else _promise(order, device_of(device))
            raise also_ours(fault, promise) from fault

    return torch_compat.boxed(explained)


def once_differentiable(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that refuses a backward which is to be differentiated again.

    Before it, because a second derivative may not come through the graph at all: where the graph
    keeps none of its inputs, torch takes it for zero.
    """

    def watched(*args: Any) -> Any:
        outputs = run(*args)
        for output in torch_compat.tensors_in(outputs):
            # Outputs that are views of others have nodes of torch's own before the graph's.
            if isinstance(output.grad_fn, torch.autograd.function.BackwardCFunction):
                output.grad_fn.register_prehook(_refuse_second_derivative)
                break  # one node of autograd makes them all
        return outputs

    return watched


def _refuse_second_derivative(_: Any) -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            "a second derivative through a planned model (create_graph=True), as gradient penalties"
            " need: its backward was planned to run once, not to be differentiated. Call the model"
            f" {_IN_EAGER} for that part of the loss, which runs it as without a plan"
        )


def also_ours(fault: Exception, promise: str = "") -> BayplanError:
    """An error as a `BayplanError` that is caught by the fault's own class, too.

    Args:
        promise: what was planned and what there is, for the text of one that says memory ran out.
    """
    if isinstance(fault, BayplanError):
        return fault
    kind = PlanBroken if is_out_of_memory(fault) else CaptureError
    joined = _joined_class(kind, type(fault))
    try:
        made = type(fault).__new__(joined, *fault.args)
    except TypeError:  # made in a way of its own
        made = None
    ours = made if isinstance(made, BayplanError) else kind(str(fault))
    ours.args = (_out_of_memory_text(fault, promise),) if kind is PlanBroken else fault.args
    ours.__dict__.update(fault.__dict__)
    if kind is CaptureError:
        ours.add_note("bayplan: raised in a step of a planned model")
    ours.__cause__ = fault
    return ours


@cache
def _joined_class(kind: type[BayplanError], other: type[Exception]) -> type[BayplanError]:
    if issubclass(kind, other):
        return kind
    try:
        return type(f"Planned{other.__name__}", (kind, other), {"__module__": __name__})
    except TypeError:  # a class that cannot be inherited from
        return kind


def _out_of_memory_text(fault: Exception, promise: str) -> str:
    wanted = asked_memory(fault)
    return (
        f"out of memory in a planned step, which asked for {wanted}: the limit of the plan is more"
        f" than the device had free. {promise or 'Fit the model with a lower `memory`'}, use a"
        " smaller batch, or stop other processes"
    )


def _promise(order: StepOrder, device: Device) -> str:
    """What a plan predicted, and what there is now, while all that the step made is alive."""
    reserved = order.reserved_bytes
    planned = order.peak_bytes if reserved is None else reserved
    of_reserved = "" if reserved is None else f" and {format_bytes(reserved)} reserved"
    found = planned
    there = f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} are free"
    if device.has_allocator_bytes:
        live = device.live
        found = live.allocated + device.free_bytes
        there += (
            f", this process has {format_bytes(live.allocated)} allocated and"
            f" {format_bytes(live.reserved)} reserved"
        )
    return (
        f"Predicted: a peak of {format_bytes(order.peak_bytes)}{of_reserved}; on {device.where}"
        f" {there}. Fit the model with memory='{limit_text(tighter_limit(planned, found))}'"
    )
