"""One operator as a small training step: plainly, and as plans run it, compared bit by bit.

Around an operator stand two others: its inputs are copies, and its outputs are squared. So what it
makes is read by backward and must be made again by a plan that keeps nothing, and a kernel may
overwrite what it reads. Planned steps are traced as `bayplan.fit` traces them, but without Dynamo,
which would take most of the time.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from bayplan import torch_compat
from bayplan.costing.pricing import free_prices
from bayplan.data.plan import StepOrder
from bayplan.data.program import Program
from bayplan.planning.memory.orders import order_of
from bayplan.running.backend import PlannedBackend
from bayplan.simulating.schedule import plain_schedule
from bayplan.simulating.swaps import Arrangement
from bayplan.tracing.joint_trace import compile_whole
from bayplan.tracing.traced_step import MemoryContext, TracedStep

__all__ = ["PLANS", "Case", "Outcome", "compare"]

_SEED = 3


@dataclass(frozen=True)
class Outcome:
    """What came of a comparison.

    Attributes:
        status: `same`; `wrong`, other bits; `refused` before it ran; `crash`, it failed when it
            ran; `none`, the plain step has no gradient, fails or is not the same twice.
        why: the first plan that is not the same, and how.
    """

    status: str
    why: str = ""


@dataclass
class Case:
    """A call to compare.

    Attributes:
        call: from the tensors to the outputs. A module is called through Dynamo, as users do.
        tensors: all that the call reads and that may have gradients.
    """

    name: str
    call: Callable[..., Any]
    tensors: Sequence[torch.Tensor]
    module: nn.Module | None = field(default=None, repr=False)


class _Step(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.call = case.call
        if case.module is not None:
            self.module = case.module

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        copies = [each.clone() if _is_differentiable(each) else each for each in tensors]
        outputs = torch_compat.tensors_in(self.call(*copies))
        return [each * each if _is_differentiable(each) else each for each in outputs]


def compare(case: Case, plans: Sequence[str] = ("kept", "repeated", "packed")) -> Outcome:
    """Run a case plainly and by some plans."""
    step = _Step(case)
    state = {name: tensor.clone() for name, tensor in step.state_dict().items()}
    try:
        plain, again = _run(step, step, case.tensors, state), _run(step, step, case.tensors, state)
    except Exception as fault:
        return Outcome("none", _said(fault))
    if plain is None or plain != again:
        return Outcome("none", "no gradient" if plain is None else "not the same twice")
    for plan in plans:
        backend = PlannedBackend(partial(_decide, plan), MemoryContext(prices=free_prices))
        try:
            run = _compiled(step, backend, case)
        except _NothingToPack:
            continue
        except Exception as fault:
            return Outcome("refused", f"{plan}: {_said(fault)}")
        try:
            planned = _run(step, run, case.tensors, state)
        except Exception as fault:
            inner = torch_compat.compile_fault(fault)
            if isinstance(inner, _NothingToPack):
                continue
            status = "crash" if backend.orders else "refused"
            return Outcome(status, f"{plan}: {_said(inner)}")
        finally:
            torch_compat.set_compiled_call(step, None)
        if planned != plain:
            names = [name for name in plain if plain[name] != (planned or {}).get(name)]
            return Outcome("wrong", f"{plan}: {', '.join(names)}")
    return Outcome("same")


def _compiled(step: _Step, backend: PlannedBackend, case: Case) -> Callable[..., Any]:
    if case.module is not None:
        torch.compiler.reset()
        compile_whole(step, backend)
        return step
    with torch.random.fork_rng(devices=[]):
        return backend(_graph_of(step, len(case.tensors)), _fresh(case.tensors))


def _graph_of(step: _Step, num_inputs: int) -> fx.GraphModule:
    """A graph that calls a step: what Dynamo would make of it, without its time."""
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"input_{index}") for index in range(num_inputs))
    graph.output(graph.call_module("step", inputs))
    return fx.GraphModule({"step": step}, graph)


def _run(
    step: _Step,
    run: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    state: dict[str, torch.Tensor],
) -> dict[str, Any] | None:
    """Digests of all numbers that a step leaves behind; None if it has no gradient."""
    step.load_state_dict(state)
    step.zero_grad()
    torch.manual_seed(_SEED)
    given = _fresh(tensors)
    outputs = run(*given)
    found = {f"output {index}": _digest(each) for index, each in enumerate(outputs)}
    trained = [each for each in outputs if each.requires_grad]
    del outputs
    if not trained:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    torch.autograd.backward(trained, [_gradient_for(each, generator) for each in trained])
    found |= {f"gradient {index}": _digest(each.grad) for index, each in enumerate(given)}
    for name, parameter in step.named_parameters():
        found[f"gradient of {name}"] = _digest(parameter.grad)
    for name, buffer in step.named_buffers():
        found[f"buffer {name}"] = _digest(buffer)
    return {**found, "random state": _digest(torch.get_rng_state())}


def _gradient_for(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    # Laid out as the output is: torch assumes so when it traces.
    return torch.empty_like(output, requires_grad=False).copy_(drawn)


def _fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.detach().clone().requires_grad_(each.requires_grad) for each in tensors]


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _digest(tensor: torch.Tensor | None) -> Any:
    """All bits of a tensor; what is not a number has no sign and no payload."""
    if tensor is None:
        return None
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().flatten())
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    if flat.is_floating_point():
        flat.masked_fill_(flat.isnan(), float("nan"))
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(data, digest_size=12).digest()


def _said(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:200]}"


class _NothingToPack(Exception):
    """Raised where a step has nothing that could be packed."""


def _decide(plan: str, traced: TracedStep) -> StepOrder:
    packs = tuple(pack.name for pack in traced.packs) if plan == "packed" else ()
    if plan == "packed" and not packs:
        raise _NothingToPack
    program = traced.with_packs(packs).program
    return order_of(
        program,
        PLANS[plan](program),
        strategy=plan,
        packs=packs,
        plain_peak_bytes=0,
        plain_seconds=program.plain_seconds,
    )


def _keep(program: Program) -> Arrangement:
    """Nothing is made twice, and operators overwrite what they may."""
    return Arrangement(plain_schedule(program))


def _repeat(program: Program) -> Arrangement:
    """Before every backward op, all of forward that leads to what it reads, each time anew."""
    schedule = list(range(program.first_backward))
    for index in range(program.first_backward, len(program.ops)):
        needed, waiting = set[int](), [index]
        while waiting:
            for buffer in program.ops[waiting.pop()].reads:
                maker = program.producers[buffer]
                is_forwards = 0 <= maker < program.first_backward
                if is_forwards and program.ops[maker].can_repeat and maker not in needed:
                    needed.add(maker)
                    waiting.append(maker)
        schedule += [*sorted(needed), index]
    return Arrangement(tuple(schedule))


PLANS: dict[str, Callable[[Program], Arrangement]] = {
    "kept": _keep,
    "repeated": _repeat,
    "packed": _keep,
}
