"""Operators that take care to be repeated: a repeat gives the same bits and leaves no trace.

- Random operators draw the same numbers again. The generator's state is taken right before one
  runs and becomes one of its arguments; the operator itself draws from the generator as ever, so
  that a step uses up the same numbers as plain training. A repeat sets the saved state, draws, and
  puts the generator back.
- BatchNorm has updated its running statistics once and for all. They have no part in what it
  computes in training, so it is repeated without them, or, where that gives the same bits, from the
  statistics of the batch that it has saved (`normalising.py`).
- BatchNorm over several replicas talks to them, who would not expect it a second time. It is
  repeated from its saved statistics or not at all, and its gradient never.
- What else reads a buffer that forward changes would find its new value, and is never repeated.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from bayplan import torch_private
from bayplan.running.synchronised_norm import synchronised_norm, synchronised_norm_backward

__all__ = [
    "CHANGED",
    "ONCE_ONLY",
    "PARTLY_ONLY",
    "draw",
    "draw_again",
    "generator_state",
    "make_repeatable",
    "repeat_form",
]

aten = torch.ops.aten

CHANGED = "bayplan_changed"  # in an input's meta, where forward changes its tensor

_CPU_STATE_BYTES, _CUDA_STATE_BYTES = 5056, 16


def make_repeatable(graph: fx.Graph) -> None:
    """Give every random operator of a joint graph the state of its generator as an argument.

    Inputs that forward changes are marked, in a way that copies of the graph keep.
    """
    for node in torch_private.changed_inputs(graph):
        node.meta[CHANGED] = True
    for node in list(graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        device = _device_of(node.meta["val"])
        with graph.inserting_before(node):
            state = graph.call_function(generator_state, (device,))
            with torch_private.fake_mode_of([_first_tensor(node.meta["val"])]):
                state.meta = {"val": generator_state(device)}
            arguments = (node.target, state, *node.args)
            drawn = graph.create_node("call_function", draw, arguments, node.kwargs, node.name)
            drawn.meta = dict(node.meta)
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)


def generator_state(device: str) -> torch.Tensor:
    """The state of a device's default generator, as a tensor of bytes."""
    if torch_private.is_faking():
        size_bytes = _CPU_STATE_BYTES if device == "cpu" else _CUDA_STATE_BYTES
        return torch.empty(size_bytes, dtype=torch.uint8)
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def draw(operator: Callable[..., Any], _: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Run a random operator for the first time."""
    return operator(*args, **options)


def draw_again(
    operator: Callable[..., Any], state: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Run a random operator as it ran before; the generator goes on as if it had not."""
    output = next(part for part in (*args, state) if isinstance(part, torch.Tensor))
    devices = [output.device] if output.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if devices:
            torch.cuda.set_rng_state(state, output.device)
        else:
            torch.set_rng_state(state)
        return operator(*args, **options)


# What may run only once, and what may be repeated only for a part of what it makes.
ONCE_ONLY = frozenset({generator_state, synchronised_norm_backward})
PARTLY_ONLY = frozenset({synchronised_norm})


def repeat_form(operator: Any, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What to call when an operator is repeated, with which of its arguments."""
    if operator is draw:
        return draw_again, arguments
    if operator is aten._native_batch_norm_legit_functional.default and arguments[5]:
        image, weight, bias, _, _, training, momentum, epsilon = arguments
        form = aten._native_batch_norm_legit.no_stats
        return form, (image, weight, bias, training, momentum, epsilon)
    return operator, arguments


def _first_tensor(value: Any) -> torch.Tensor:
    return next(leaf for leaf in torch_private.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _device_of(value: Any) -> str:
    return str(_first_tensor(value).device)
