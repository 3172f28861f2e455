"""A copy of a training step whose tensors have shapes and storages but no memory.

Every tensor becomes a fresh fake one of the same geometry. Tensors that share a storage in the
original (tied weights, views of a flat buffer) share one in the copy, so aliasing stays exact. The
user's model, optimizer and batch are left untouched, and may themselves be real, fake or meta.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bayplan import torch_answers, torch_compat, torch_joint
from bayplan.data.errors import BayplanError, CaptureError, UsageError, did_you_mean
from bayplan.devices.device import GPU, HOST, device_of
from bayplan.step import OPTIMIZERS, TrainingStep
from bayplan.tracing.explain import explained, out_of_memory
from bayplan.tracing.fake_cuda import correct_fake_cuda
from bayplan.tracing.fake_lstm import correct_fake_lstm
from bayplan.tracing.fake_norms import correct_fake_norms
from bayplan.tracing.fake_products import correct_fake_products
from bayplan.tracing.hooks import copied, on_copies
from bayplan.tracing.values import KnownValues, forget, is_small, learn, value_of

__all__ = [
    "OptimizerSource",
    "build_without_memory",
    "correct_fakes",
    "fake_step",
    "optimizer_source",
    "without_memory",
]

OptimizerSource = (
    torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
)
_Thing = TypeVar("_Thing")

aten = torch.ops.aten
_NEEDS_WEIGHTS = 10  # its position among the arguments of `_native_multi_head_attention`


def optimizer_source(optimizer: Any) -> OptimizerSource:
    """An optimizer, or what makes one, by its word, as a class or function, or itself."""
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"no optimizer {optimizer!r}; {did_you_mean(optimizer, OPTIMIZERS)}")
        return OPTIMIZERS[optimizer]
    is_one = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    if not is_one and not callable(optimizer):
        raise UsageError(
            "an optimizer is one of torch's, a function from parameters to one, or one of"
            f" {', '.join(OPTIMIZERS)}; got {optimizer!r}"
        )
    return optimizer


@cache
def correct_fakes() -> None:
    """Let fake kernels that are known to err make what the real ones make, in this process."""
    correct_fake_norms()
    correct_fake_lstm()
    correct_fake_products()
    correct_fake_cuda()
    torch_joint.remember_whole_storages()
    torch_compat.set_fake_kernel(aten._native_multi_head_attention.default, _fused_attention)


def _fused_attention(otherwise: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Weights that nobody asked for are None, where torch's fake kernel has an empty tensor."""
    output, weights = otherwise(*args, **kwargs)
    needs_weights = args[_NEEDS_WEIGHTS] if len(args) > _NEEDS_WEIGHTS else True
    return output, weights if kwargs.get("need_weights", needs_weights) else None


@contextmanager
def without_memory(*, knows_all: bool = False) -> Iterator[KnownValues]:
    """Let tensors take no memory; constants made elsewhere are faked where they are used.

    Small ones know their values, or all of the forward's, for steps that decide by these. Nobody
    but torch notices that they are fake.
    torch logs a traceback for each error inside a fake kernel; ours tell it in the user's terms.
    """
    correct_fakes()
    # What is compiled hides its operators, and cannot run on fake tensors.
    with (
        torch_compat.silent_fakes(),
        torch_compat.convertible_fakes(),
        torch_compat.running_eagerly(),
        torch_answers.unnoticed_fakes(),
        torch_answers.known_arrays(),
        on_copies(),
        KnownValues(knows_all=knows_all) as mode,
    ):
        yield mode


def build_without_memory(
    build: Callable[[], _Thing], on_gpu: Callable[[], AbstractContextManager[None]] = nullcontext
) -> _Thing:
    """Call a model's builder so that its tensors take no memory; for real where that fails.

    Some builders read values while they build (`tensor.item()` in a schedule of drop rates), which
    only real tensors have.

    Args:
        on_gpu: lets a GPU seem to be there, for builders that put their model on it.
    """
    try:
        with on_gpu(), without_memory():
            return build()
    except BayplanError:
        raise
    except Exception:  # whatever it is, a real build either works or tells it better
        with explained():
            return build()


def fake_step(step: TrainingStep, optimizer: OptimizerSource) -> TrainingStep:
    """Copy a step onto fake tensors; to be called inside `without_memory`, and `step.on_gpu`."""
    _check_can_be_captured(step.model)
    mode = torch_compat.current_fake_mode()
    copier = _Copier(
        knows_all=isinstance(mode, KnownValues) and mode.knows_all,
        device=None if step.gpu is None else torch.device(GPU.where.type, 0),
    )
    tensors = [*step.model.parameters(), *step.model.buffers()]
    if isinstance(optimizer, torch.optim.Optimizer):
        state = torch_compat.tensors_in(list(optimizer.state.values()))
        copier.add_counters(state)
        tensors += state
        for group in optimizer.param_groups:
            tensors += group["params"]
    copier.add(tensors)
    model = copier.copy(step.model, "model")
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = copier.copy(optimizer, "optimizer")
    elif optimizer is not None:
        optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
    batch = copier.convert(step.batch)
    loss_fn = step.loss_fn
    if isinstance(loss_fn, nn.Module):  # it may hold tensors, such as class weights
        copier.add([*loss_fn.parameters(), *loss_fn.buffers()])
        loss_fn = copier.copy(loss_fn, "loss")
    if optimizer is not None:
        _check_trains(optimizer, model, loss_fn)
        _update_all_at_once(optimizer)
        if isinstance(mode, KnownValues):
            mode.watch(optimizer)
    return replace(step, model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer)


def _check_can_be_captured(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is scripted ({type(module).__name__}), which hides its"
                " operators; capture the module it was made from"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"the model has lazy parameters with no shape yet ({name}); run it once on a real"
                " batch first"
            )


def _check_trains(optimizer: torch.optim.Optimizer, model: nn.Module, loss_fn: Any) -> None:
    """Refuse an optimizer of another model; one that leaves some parameters out is fine."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"what was given as optimizer made a {type(optimizer).__name__}, which is none; give a"
            " function from parameters to a torch.optim.Optimizer"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{type(optimizer).__name__} runs the step several times for one update, so its memory"
            " is not that of one step. Plan the model without optimizer=, and leave room for what"
            " it keeps; the loop itself may train with it"
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = list(model.parameters())
    if isinstance(loss_fn, nn.Module):
        known += loss_fn.parameters()
    if {*map(id, held)}.isdisjoint(map(id, known)):
        raise UsageError(
            f"the optimizer holds {len(held)} parameters, none of them among the"
            f" {len(known)} of the model, so it would train nothing of it; make it from"
            " model.parameters() of this very model"
        )


def _update_all_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update all parameters in one call on devices where torch's default does.

    torch itself does not choose this form for fake tensors.
    """
    for group in optimizer.param_groups:
        is_open = group.get("foreach", False) is None and not group.get("fused")
        if is_open and all(device_of(each.device).has_foreach for each in group["params"]):
            group["foreach"] = not group.get("differentiable", False)


class _Copier:
    """Makes fake tensors, one storage for one storage, and remembers them for `deepcopy`."""

    def __init__(self, *, knows_all: bool, device: torch.device | None = None) -> None:
        self._knows_all, self._device = knows_all, device
        self.memo: dict[int, Any] = {}
        self._base_of_storage: dict[int, torch.Tensor] = {}
        self._keep: list[torch.Tensor] = []  # ids stay unique only while their owners live

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self.memo:
                self.memo[id(tensor)] = self._twin(tensor)
                self._keep.append(tensor)

    def add_counters(self, state: Iterable[torch.Tensor]) -> None:
        """Make twins that know their value, of the single numbers that an optimizer reads."""
        for tensor in state:
            is_real = not isinstance(tensor, torch_compat.FakeTensor) and HOST.holds(tensor)
            if is_real and tensor.dim() == 0:
                with torch_compat.outside_tracing():
                    value = tensor.item()
                self.memo[id(tensor)] = torch.tensor(value, dtype=tensor.dtype)
                self._keep.append(tensor)

    def convert(self, batch: Any) -> Any:
        """Replace each tensor in a nest of tuples, lists and mappings."""
        if isinstance(batch, torch.Tensor):
            self.add([batch])
            return self.memo[id(batch)]
        if isinstance(batch, Mapping):
            return {key: self.convert(part) for key, part in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.convert(part) for part in batch))
        if isinstance(batch, tuple | list):
            return type(batch)(self.convert(part) for part in batch)
        return batch

    def copy(self, thing: _Thing, name: str) -> _Thing:
        """A deep copy with a fake twin for each tensor, also for those that are in no register."""
        try:
            with _TwinsForCopies(self):
                # `torch.compile` hides a module's operators, so its copy is the one before.
                modules = list(thing.modules()) if isinstance(thing, nn.Module) else []
                for module in reversed(modules):  # inner first: outer ones hold them
                    original = torch_compat.uncompiled(module)
                    if original is not module:
                        self.memo[id(module)] = copied(original, self.memo)
                return copied(thing, self.memo)
        except (TypeError, RuntimeError, NotImplementedError, SystemError) as fault:
            raise out_of_memory(fault) or CaptureError(
                f"the {name} cannot be copied for capture: {fault}; keep open files, locks"
                " and the like out of its attributes"
            ) from fault

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._device or (HOST.where if tensor.is_meta else tensor.device)
        key = torch_compat.storage_key(tensor.untyped_storage())
        if key not in self._base_of_storage:
            numel = tensor.untyped_storage().nbytes() // tensor.element_size()
            base = torch.empty(numel, dtype=tensor.dtype, device=device)
            _learn_storage(base, tensor, knows_all=self._knows_all)
            self._base_of_storage[key] = base
        base = self._base_of_storage[key]
        flat = base if base.dtype == tensor.dtype else base.view(tensor.dtype)
        twin = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        # A plain tensor that needs a gradient is an input of its own, never part of `base`.
        return twin.detach().requires_grad_(tensor.requires_grad)


def _learn_storage(base: torch.Tensor, tensor: torch.Tensor, *, knows_all: bool) -> None:
    """Let the flat twin of a tensor's storage know its values, where they are known and few."""
    with torch_compat.outside_tracing():
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if knows_all:
            is_real = not isinstance(tensor, torch_compat.FakeTensor) and HOST.holds(tensor)
            value = tensor.detach() if is_real else value_of(tensor)
        else:
            value = value_of(tensor) if is_small(base) and not is_trained else None
        if value is None:
            forget(base)  # what lies in memory that nobody has written to
        else:
            storage = value.untyped_storage()
            flat = torch.empty(0, dtype=value.dtype, device=storage.device).set_(storage)
            learn(base, flat.clone(), of_any_size=knows_all)


class _TwinsForCopies(TorchFunctionMode):
    """Answers `deepcopy` of a tensor with its twin."""

    def __init__(self, copier: _Copier) -> None:
        super().__init__()
        self._copier = copier

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._copier.convert(args[0])
        return func(*args, **(kwargs or {}))
