"""Makes operators repeatable: a repeat gives the same bits and leaves no trace.

- Dropout. On a CPU, eager dropout multiplies by a mask that holds 1 / (1 - p), rounded to the
  tensor's dtype. Traced, it is `native_dropout`, which rounds that number later: for about every
  seventh p the last bit differs. `as_eager` computes with eager's number. (On CUDA eager itself
  runs `native_dropout`.)
- Random operators draw the same numbers again. The generator's state right before an operator
  runs becomes one of its arguments. The operator itself draws from the generator, so a step uses
  up the same numbers as plain training. A repeat sets the saved state, draws, and restores the
  generator.
- BatchNorm updates its running statistics once. Training does not compute with them, so it is
  repeated without them (or with others, where they decide what dtype it computes in) or, where that
  gives the same bits, from the saved batch statistics.
- Synchronised BatchNorm talks to other replicas, which would not expect it a second time. It is
  repeated from its saved statistics or not at all, and its gradient never.
- Any other reader of a buffer that forward changes would read the new value, so it never repeats.

BatchNorm in training reads its input three times: for the mean, for the deviation and to
normalise. Mean and inverse deviation are tiny and saved for backward, so a repeat only computes
the normalised values, with the arithmetic of torch's CPU kernel:

    scale = inverse_deviation * weight
    shift = bias - mean * scale              one rounding
    y     = x * scale + shift                one rounding

Nothing promises that a processor and a build of torch round like that. So it is tried on small
tensors, once for every kind of input, and if a bit differs the whole operator is repeated.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat, torch_joint
from bayplan.devices.device import device_of
from bayplan.rewriting.free import call_alone, changed_copy
from bayplan.rewriting.synchronised_norm import (
    normalise,
    synchronised_norm,
    synchronised_norm_backward,
)

__all__ = [
    "CHANGED",
    "PARTLY_ONLY",
    "PartialRepeat",
    "as_drawn",
    "as_eager",
    "batch_norm_again",
    "draw",
    "draw_again",
    "dropout",
    "dropout_by",
    "generator_state",
    "gradient_readers",
    "lstm_layer",
    "make_repeatable",
    "normalise",
    "partial_repeat",
    "repeat_form",
    "runs_once",
]

aten = torch.ops.aten

CHANGED = "bayplan_changed"  # in an input's meta, where forward changes its tensor


def as_eager(graph: fx.Graph) -> None:
    """Give the dropouts of a joint graph eager's numbers, and its LSTM layers eager's reserve."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = lstm_layer
    _restore_layouts(graph)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        values, probability, training = node.args
        if not training or not device_of(values.meta["val"].device).runs_cpu_kernels:
            continue
        node.target = torch.ops.bayplan.dropout.default
        node.args = (values, probability)
        masks = [user for user in node.users if user.args[1] == 1]
        for reader in gradient_readers(masks, aten.native_dropout_backward.default):
            gradient, mask, _ = reader.args
            reader.args = (gradient, mask, _scale(probability, gradient.meta["val"].dtype))


def _restore_layouts(graph: fx.Graph) -> None:
    """Compute in place where plain training does so with other bits: see `IN_PLACE`."""
    changed = [node for node in graph.nodes if torch_joint.IN_PLACE in node.meta]
    for node in changed:
        function, stride = node.meta.pop(torch_joint.IN_PLACE)
        shape = node.args[0].meta["val"].shape
        node.args = (function, _close_gaps(shape, stride), *node.args)
        node.target = changed_copy
    if changed:
        _trace_again(graph)


def _close_gaps(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides with a gap wherever there was one, but of one element.

    Kernels only ask which dimensions follow each other without a gap.

    Example:
        >>> _close_gaps((4, 5, 8), (120, 24, 1)), _close_gaps((4, 5), (30, 3))
        ((45, 9, 1), (11, 2))
    """
    closed, end, closed_end = [1] * len(shape), 1, 1
    for axis in sorted(range(len(shape)), key=lambda axis: stride[axis]):
        if shape[axis] > 1:
            closed[axis] = closed_end + (stride[axis] != end)
            end, closed_end = stride[axis] * shape[axis], closed[axis] * shape[axis]
    return tuple(closed)


def _trace_again(graph: fx.Graph) -> None:
    """Let all values of a graph have the strides that its operators give them now."""
    known = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    with torch_compat.fake_mode_of(list(known.values())):
        for node in graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.meta["val"] = node.target(*args, **kwargs)


def lstm_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """An LSTM layer with what its backward needs.

    The kernel asks the gradient mode whether a backward will come, and keeps nothing otherwise.
    """
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


def _dropout(values: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with eager's numbers, and its mask."""
    if probability == 1:  # eager draws nothing
        mask = torch.zeros_like(values, dtype=torch.bool)
    else:
        mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - probability)
    return dropout_by(mask, values, probability)


# An operator of torch's kind, so that graphs can name it and hand it on.
_RANDOM = (torch.Tag.nondeterministic_seeded,)
dropout = torch.library.custom_op("bayplan::dropout", _dropout, mutates_args=(), tags=_RANDOM)


@dropout.register_fake
def _(values: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def dropout_by(
    mask: torch.Tensor, values: torch.Tensor, probability: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with a mask that was drawn already, and the mask."""
    return values.mul(mask).mul_(_scale(probability, values.dtype)), mask


@cache
def _scale(probability: float, dtype: torch.dtype) -> float:
    """What eager multiplies by, rounded as it is there; exact as a Python number."""
    if probability == 1:
        return 0.0
    with torch_compat.outside_tracing():
        return (torch.ones((), dtype=dtype, device="cpu") / (1 - probability)).item()


def gradient_readers(parts: Iterable[fx.Node], gradient: Any) -> list[Any]:
    """The gradient operators that read some outputs of an operator, directly or detached."""
    waiting, readers = list(parts), dict[fx.Node, None]()
    while waiting:
        for user in waiting.pop().users:
            if user.target is gradient:
                readers[user] = None
            elif user.target is aten.detach.default:
                waiting.append(user)
    return list(readers)


def make_repeatable(graph: fx.Graph) -> None:
    """Give every random operator of a joint graph the state of its generator as an argument.

    Inputs that forward changes are marked, in a way that copies of the graph keep.
    """
    for node in torch_compat.changed_inputs(graph):
        node.meta[CHANGED] = True
    for node in list(graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        output = torch_compat.tensors_in(node.meta["val"])[0]
        device = str(output.device)
        with graph.inserting_before(node):
            state = graph.call_function(generator_state, (device,))
            with torch_compat.fake_mode_of([output]):
                state.meta = {"val": generator_state(device)}
            arguments = (node.target, output.device, state, *node.args)
            drawn = graph.create_node("call_function", draw, arguments, node.kwargs, node.name)
            drawn.meta = dict(node.meta)
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)


def generator_state(device: str) -> torch.Tensor:
    """The state of a device's default generator, as a tensor of bytes."""
    if torch_compat.is_faking():
        return torch.empty(device_of(device).generator_state_bytes, dtype=torch.uint8)
    return device_of(device).generator_state()


@fx.has_side_effect  # also numbers that nobody reads are drawn: those after them depend on it
def draw(
    operator: Callable[..., Any], _: torch.device, __: torch.Tensor, /, *args: Any, **options: Any
) -> Any:
    """Run a random operator for the first time, with numbers of a device's generator."""
    return operator(*args, **options)


def as_drawn(graph: fx.Graph) -> None:
    """Let random operators that run for the first time take no state; unread ones go."""
    for node in graph.find_nodes(op="call_function", target=draw):
        operator, _, _, *arguments = node.args
        # torch takes 30 microseconds to call an operator that is written in Python.
        node.target = _dropout if operator is torch.ops.bayplan.dropout.default else operator
        node.args = tuple(arguments)
    for node in graph.find_nodes(op="call_function", target=generator_state):
        if not node.users:
            graph.erase_node(node)


def draw_again(
    operator: Callable[..., Any],
    device: torch.device,
    state: torch.Tensor,
    /,
    *args: Any,
    **options: Any,
) -> Any:
    """Run a random operator as it ran before; the generator goes on as if it had not."""
    if torch_compat.is_faking():  # where states have no values
        return operator(*args, **options)
    own = device_of(device)
    with own.forked_generators():
        own.set_generator_state(state)
        return operator(*args, **options)


# What may run only once, and what may be repeated only for a part of what it makes.
_ONCE_ONLY = frozenset({generator_state, synchronised_norm_backward})
PARTLY_ONLY = frozenset({synchronised_norm})


def runs_once(node: fx.Node) -> bool:
    """Whether a node may not be repeated at all.

    cuDNN's recurrent layers drop numbers by a state of their own, which goes on with every call.
    """
    if node.target is draw and node.args[0] is aten._cudnn_rnn.default:
        dropout, train = node.args[2 + 11], node.args[2 + 12]
        return bool(train and dropout)
    return node.target in _ONCE_ONLY


def repeat_form(operator: Any, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What to call when an operator is repeated, with which of its arguments."""
    if operator is draw:
        return draw_again, arguments
    if operator is aten._native_batch_norm_legit_functional.default and arguments[5]:
        image, weight, bias, mean, _, training, momentum, epsilon = arguments
        if weight is bias is None:  # the running statistics alone say what dtype it computes in
            return batch_norm_again, (image, mean.meta["val"].dtype, momentum, epsilon)
        form = aten._native_batch_norm_legit.no_stats
        return form, (image, weight, bias, training, momentum, epsilon)
    return operator, arguments


def batch_norm_again(
    image: torch.Tensor, dtype: torch.dtype, momentum: float, epsilon: float
) -> tuple[torch.Tensor, ...]:
    """A BatchNorm without parameters, with running statistics that nobody reads."""
    running = image.new_zeros(2, image.shape[1], dtype=dtype).unbind()
    rest = (True, momentum, epsilon)
    return aten._native_batch_norm_legit.default(image, None, None, *running, *rest)


# Channels or lengths, whatever is innermost, fill vector registers and leave a rest.
_TRIED_CHANNELS, _TRIED_LENGTH = (1, 5, 37), 21
_EPSILON = 1e-5
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions
_OUTPUT, _MEAN, _INVERSE_DEVIATION = range(3)  # among BatchNorm's outputs
# By operator, the position of the argument that says whether it normalises by the batch.
_TRAINING: dict[Any, int] = {
    aten._native_batch_norm_legit_functional.default: 5,
    aten._native_batch_norm_legit.no_stats: 3,
}


@dataclass(frozen=True)
class PartialRepeat:
    """A repeat that makes one output of an operator again, with the help of its others."""

    function: Any
    arguments: tuple[Any, ...]
    output: fx.Node

    def alone(self, name: str) -> fx.Node:
        """The call as a node of a graph of its own, to be priced."""
        value = self.output.meta["val"]
        return call_alone(self.function, self.arguments, value=value, name=name)


def partial_repeat(node: fx.Node) -> PartialRepeat | None:
    """How a node could be repeated for one of its outputs alone, if that gives the same bits."""
    is_synchronised = node.target is synchronised_norm
    position = _TRAINING.get(node.target)
    if not is_synchronised and (position is None or not node.args[position]):
        return None
    parts = [_parts(node, index) for index in (_OUTPUT, _MEAN, _INVERSE_DEVIATION)]
    # A second node of the same output would still show its older copy.
    if len(parts[_OUTPUT]) != 1 or not all(parts):
        return None
    image, weight, bias = node.args[:3]
    arguments = (image, weight, bias, parts[_MEAN][0], parts[_INVERSE_DEVIATION][0])
    if is_synchronised:  # so it was made in the first place
        arguments = (*arguments, node.args[-1])
    elif not _normalises_alike(image, weight, bias, parts[_MEAN][0]):
        return None
    return PartialRepeat(normalise, arguments, parts[_OUTPUT][0])


def _parts(node: fx.Node, index: int) -> list[fx.Node]:
    return [
        user for user in node.users if user.target is operator.getitem and user.args[1] == index
    ]


def _normalises_alike(image: Any, weight: Any, bias: Any, mean: Any) -> bool:
    """Whether `normalise` gives the bits of torch's kernel for such inputs.

    On other devices, with gaps between elements, or with statistics of another dtype than the
    image, torch computes in another way.
    """
    value: torch.Tensor = image.meta["val"]
    if value.dtype != mean.meta["val"].dtype:
        return False
    formats = (torch.contiguous_format, _CHANNELS_LAST.get(value.dim(), torch.contiguous_format))
    memory_format = next((f for f in formats if value.is_contiguous(memory_format=f)), None)
    if memory_format is None or not device_of(value.device).runs_cpu_kernels:
        return False
    dtypes = (None if source is None else source.meta["val"].dtype for source in (weight, bias))
    kind = (value.dim(), memory_format, value.dtype, *dtypes)
    return all(_gives_same_bits(num_channels, *kind) for num_channels in _TRIED_CHANNELS)


@cache
def _gives_same_bits(
    num_channels: int,
    num_dimensions: int,
    memory_format: torch.memory_format,
    image_dtype: torch.dtype,
    *parameter_dtypes: torch.dtype | None,
) -> bool:
    # A generator of its own: the user's must not notice.
    generator = torch.Generator().manual_seed(num_channels)
    lengths = [3] * (num_dimensions - 3) + [_TRIED_LENGTH] * (num_dimensions > 2)

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).add_(0.5)

    with torch_compat.outside_tracing(), torch.no_grad():
        image = draw((4, num_channels, *lengths), image_dtype)
        image = image.contiguous(memory_format=memory_format)
        weight, bias = (
            None if dtype is None else draw((num_channels,), dtype) for dtype in parameter_dtypes
        )
        whole, mean, inverse_deviation = aten._native_batch_norm_legit.no_stats(
            image, weight, bias, True, 0.1, _EPSILON
        )
        again = normalise(image, weight, bias, mean, inverse_deviation)
        is_laid_out_alike = again.dtype == whole.dtype and again.stride() == whole.stride()
        return is_laid_out_alike and again.equal(whole)
