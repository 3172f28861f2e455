"""What torch is told, in Python, while a GPU is faked for tensors without memory.

`devices/fake_gpu.cpp` gives the answers that C++ asks for. Once a GPU seems to be there, torch uses
it for what is not faked, and there is none. Private names of torch, as in `torch_compat.py`.

1. `torch.tensor([…], device="cuda")` begins on the host, and stays there as the known value of a
   constant while a graph is traced.
2. An operator that has no rule for fake tensors is run on zeros to see what it makes: on zeros of
   the host.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["answers_of_gpu"]

_HOST = torch.device("cpu")


@contextmanager
def answers_of_gpu(*, capability: int, has_bfloat16: bool) -> Iterator[None]:
    """Let autocast work for `cuda` where there is no GPU, and nothing run on one.

    Models that ask which GPU they are on, or wait for it, get the answers that torch gets. Whether
    there is one is answered as ever, since libraries keep that answer for longer than here.

    For the process, as all of torch's settings that are exchanged here.
    """
    names: Any = proxy_tensor
    fakes: Any = fake_tensor
    mode: Any = FakeTensorMode
    common, home = torch.cuda.amp.common, torch.cuda

    def supports_bfloat16(including_emulation: bool = True) -> bool:
        return has_bfloat16 or including_emulation

    asked: dict[str, Callable[..., Any]] = {
        "is_bf16_supported": supports_bfloat16,
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
    }
    before = common.amp_definitely_not_available, {name: getattr(home, name) for name in asked}
    fakes_before = mode.avoid_device_init, fakes.run_fallback_kernel
    constants = names.unset_fake_temporarily

    @contextmanager
    def constants_on_host() -> Iterator[None]:
        with constants(), _OnHost():
            yield

    common.amp_definitely_not_available = lambda: False
    vars(home).update(asked)
    mode.avoid_device_init = property(lambda _: True)
    fakes.run_fallback_kernel = _run_on_host(fakes.run_fallback_kernel)
    names.unset_fake_temporarily = constants_on_host
    try:
        yield
    finally:
        names.unset_fake_temporarily = constants
        mode.avoid_device_init, fakes.run_fallback_kernel = fakes_before
        common.amp_definitely_not_available = before[0]
        vars(home).update(before[1])


class _OnHost(TorchDispatchMode):
    """Computes on the host what is asked for on another device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_on_host(args), **_on_host(kwargs or {}))


def _on_host(arguments: Any) -> Any:
    return tree_map_only(torch.device, lambda _: _HOST, arguments)


def _run_on_host(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's fallback for operators without a rule run on tensors of the host."""

    def run_on_host(
        mode: FakeTensorMode, func: Any, flat_args: Sequence[Any], form: Any, error: Exception
    ) -> Any:
        places = [each.device for each in flat_args if mode.is_our_fake(each)]
        place = next((place for place in places if place != _HOST), None)
        if place is None:
            return run(mode, func, flat_args, form, error)
        given: dict[int, Any] = {}

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            if not mode.is_our_fake(tensor) or tensor.device == _HOST:
                return tensor
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_HOST
            )
            given[id(made)] = tensor
            return made

        def returned(tensor: torch.Tensor) -> torch.Tensor:
            return (
                given[id(tensor)] if id(tensor) in given else torch.empty_like(tensor, device=place)
            )

        with mode:
            twins = [tree_map_only(torch.Tensor, twin, each) for each in _on_host(list(flat_args))]
        try:
            made = run(mode, func, twins, form, error)
        except NotImplementedError:  # the host has no kernel either
            raise error from None
        with mode:
            return tree_map_only(torch.Tensor, returned, made)

    return run_on_host
