"""Deriving seconds for a device that is not here: operator classes and their roofline.

Names follow rules rather than a full list, because torch adds operators with every release: the
same few words (`conv`, `attention`, `softmax`, `index`) stand in the names of hundreds of them.
A name that no rule knows is elementwise: it reads its inputs once and writes its outputs once.

An operator is bound either by arithmetic or by memory traffic, so the slower of the two decides
(Williams et al., "Roofline", 2009); a fixed launch cost comes on top. What real kernels reach of
either peak is one efficiency per operator class, in the device description.

A device may also say what its float32 convolutions reach by kernel and channels. In half precision
they are priced kernel by kernel (`_half_kernels`), with shares that are the same on all devices.

Left out on purpose: caches (every operand is read from memory once), overlap of kernels, clocks
that drop under load, and waiting for the host. A derived profile is a guess, and says so: origin
`derived`, no repeats, and a spread of `RELATIVE_SPREAD`.
"""

import math
import re
from collections.abc import Iterable
from functools import cache

from bayplan.data.device import ConvolutionKind, DeviceKind, OpClass
from bayplan.data.errors import UsageError
from bayplan.data.graph import Node, StepGraph
from bayplan.data.profile import Origin, Profile

__all__ = [
    "bytes_moved",
    "convolution_rate",
    "derive_profile",
    "kernel_parts",
    "node_parts",
    "op_class",
    "peak_flops_per_s",
    "selects_rows",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Views, and questions to the host: nothing is launched, no byte of a tensor moves.
_VIEWS = _names(
    """
    adjoint alias as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk
    conj _conj detach diagonal dsplit expand expand_as flatten getitem hsplit imag indices lift
    lift_fresh mH mT matrix_H moveaxis movedim narrow _neg_view numpy_T permute positive ravel real
    _reshape_alias reshape reshape_as resize resize_as resolve_conj resolve_neg select set slice
    split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten
    unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze _unsafe_view _values values
    view view_as view_as_complex view_as_real vsplit

    _assert_async _assert_scalar _assert_tensor_metadata dim _efficientzerotensor _fused_sdp_choice
    _has_same_storage_numel item _local_scalar_dense numel record_stream result_type size
    storage_offset stride _version
    """
)

_MATMULS = _names(
    """
    addbmm addmv bilinear chain_matmul dot einsum gru inner linalg_multi_dot lstm mv rnn_relu
    rnn_tanh tensordot _trilinear vdot
    """
)

_REDUCTIONS = _names(
    """
    all amax amin aminmax _aminmax any argmax argmin argsort bincount _cdist_forward count_nonzero
    cummax cummin cumprod cumsum dist histc kl_div kthvalue logcumsumexp _logcumsumexp logsumexp max
    mean median min mode msort nanmean nanmedian nansum prod quantile sort std std_mean sum
    sum_to_size topk trace _unique _unique2 unique_consecutive unique_dim var var_mean
    """
)

# Forward gathers: of their first input they touch only the rows that they return.
_ROW_SELECTIONS = _names(
    """
    embedding _embedding_bag _embedding_bag_forward_only embedding_bag gather index index_select
    nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward take take_along_dim _unsafe_index
    """
)

# The first that matches a whole name decides.
_PATTERNS = (
    # Allocations touch no memory.
    (OpClass.VIEW, re.compile(r"(new_|_)?empty.*|is_.*|sym_.*")),
    # Copies of whole tensors into a window of another, not row by row.
    (OpClass.ELEMENTWISE, re.compile(r"(as_strided|diagonal|select|slice)_scatter")),
    (OpClass.ATTENTION, re.compile(r".*(attention|_transformer_encoder_layer).*")),
    (OpClass.CONVOLUTION, re.compile(r".*conv(?!ert).*")),
    (OpClass.MATMUL, re.compile(r"(.*_)?(addmm|baddbmm|bmm|linear|matmul|mm)(_.*)?")),
    (OpClass.MATMUL, re.compile(r"_?(cudnn|miopen|mkldnn)_rnn.*")),
    (
        OpClass.GATHER,
        re.compile(
            r"_?embedding.*|_?(unsafe_)?(masked_)?index(_.*)?|gather.*|.*scatter.*"
            r"|masked_(select|scatter).*|take.*|_?put.*|nonzero.*|nll_loss.*|searchsorted"
            r"|bucketize|.*grid_sampler.*"
        ),
    ),
    (OpClass.REDUCTION, re.compile(r".*(norm(?!al)|softmax|softmin|pool).*")),
    (OpClass.REDUCTION, re.compile(r".*(_loss|_cross_entropy)(_forward|_with_logits)?")),
)


@cache
def op_class(op: str) -> OpClass:
    """Return the class of an operator such as `aten.convolution_backward.default`.

    In-place operators (`aten.relu_.default`) and `_foreach_` ones belong where the plain one does.
    Allocations count as views: they touch no memory.

    Example:
        >>> str(op_class("aten.addmm.default")), str(op_class("aten.squeeze_.dim"))
        ('matmul', 'view')
    """
    namespace, name = _split(op)
    if namespace in ("prim", "profiler") or name in _VIEWS:
        return OpClass.VIEW
    if name in _MATMULS:
        return OpClass.MATMUL
    if name in _REDUCTIONS:
        return OpClass.REDUCTION
    matching = (kind for kind, pattern in _PATTERNS if pattern.fullmatch(name))
    return next(matching, OpClass.ELEMENTWISE)


@cache
def selects_rows(op: str) -> bool:
    """Whether an operator reads only the part of its first input that it returns.

    An embedding may look up four rows of a table of gigabytes; the table's size says nothing about
    its time.
    """
    return _split(op)[1] in _ROW_SELECTIONS


def _split(op: str) -> tuple[str, str]:
    """Return an operator's namespace and its name, without overload, in-place mark or foreach."""
    words = op.replace("::", ".").split(".")
    namespace, name = (words[0], words[1]) if len(words) > 1 else ("", words[0])
    name = name.removeprefix("_foreach_")
    # Dunder names (`__and__`) are no in-place ones.
    return namespace, name if name.endswith("__") else name.removesuffix("_")


RELATIVE_SPREAD = 0.3
"""Uncertainty of derived seconds, as a share: data-sheet predictions of unseen models were found
up to about 30 % off, so a comparison closer than this is a tie."""

WINOGRAD_SAVING = 2.25
"""Winograd's F(2x2, 3x3) needs 16 products where a direct 3x3 convolution needs 36 (Lavin and Gray,
"Fast Algorithms for Convolutional Neural Networks", 2015)."""

# Of what matrix products and copies reach on a device, convolutions in half precision reach these
# shares, by kind, with channels last or not. Chosen on the models of `benchmarks/gpu_truth` that it
# marks `fitted`, all on one device, and rounded; other models and devices are predicted with them.
_CONVOLUTION_TRAFFIC = 0.65  # windows overlap, gradients of weights are added up in parts
_GROUPED_RATE = {False: 0.4, True: 0.05}  # tiles of tensor cores are wider than a group
_DEPTHWISE_TRAFFIC = {False: 0.3, True: 0.5}  # no tensor cores: each window is read anew
# A copy that changes the order of dimensions does not read or write whole lines.
_REORDERED_TRAFFIC = 0.4
_HALF = ("float16", "bfloat16")
_HALF_BYTES = 2
_MATRIX_CLASSES = frozenset((OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION))
_WINOGRAD_CHANNELS = 16  # with fewer, transforming the tiles costs more than the products saved
_FEW_CHANNELS = 4  # a picture's
_KERNELS: dict[tuple[int, ...], ConvolutionKind] = {
    (1, 1): ConvolutionKind.ONE,
    (3, 3): ConvolutionKind.THREE,
    (5, 5): ConvolutionKind.FIVE,
}
_FLOATING = ("float", "bfloat", "complex")


def derive_profile(
    graph: StepGraph, device: DeviceKind, *, is_channels_last: bool = False
) -> Profile:
    """Price every node of a step on a device that need not be at hand.

    A graph does not say how images lie in memory, so `is_channels_last` does.

    Workspace is 0 throughout: what cuDNN takes for a convolution depends on the algorithm it picks
    at run time, which no description tells. Measure on the device where that memory matters.
    """
    _check_rates(device)
    seconds = tuple(
        sum(map(max, kernel_parts(graph, node, device, is_channels_last=is_channels_last)))
        + device.launch_seconds.value
        if op_class(node.op) is not OpClass.VIEW
        else 0.0
        for node in graph.nodes
    )
    return Profile(
        model=graph.model,
        fingerprint=graph.fingerprint,
        device=device.name,
        origin=Origin.DERIVED,
        repeats=0,
        seconds=seconds,
        spread_seconds=tuple(RELATIVE_SPREAD * figure for figure in seconds),
        workspace_bytes=(0,) * len(seconds),
        # One wrong efficiency is wrong in every node alike, so the nodes' errors add up.
        step_spread_seconds=RELATIVE_SPREAD * math.fsum(seconds),
    )


def bytes_moved(graph: StepGraph, node: Node) -> int:
    """Bytes a node takes from memory and brings back, each value once in each direction.

    Values of one storage together count at most the storage: an expanded view claims more bytes
    than there are, and two views of the same bytes claim them twice. An in-place operator counts
    its tensor twice, read and written. Of an embedding's table only the rows it returns count.
    """
    written = sum(_storage_bytes(graph, node.writes).values())
    read = _storage_bytes(graph, node.reads)
    if node.reads and selects_rows(node.op):
        table = graph.values[node.reads[0]].storage
        read[table] = min(read[table], written)
    return sum(read.values()) + written


def peak_flops_per_s(device: DeviceKind, kind: OpClass, dtype: str) -> float:
    """The device's peak rate for an operator class in a dtype.

    Only matrix work has rates of its own per dtype; a dtype the device does not list falls back to
    float32. Convolutions in float32 use `tf32` where there is one, matrix products do not: these
    are torch's defaults (`cudnn.allow_tf32` is on, `cuda.matmul.allow_tf32` off).
    """
    if kind not in _MATRIX_CLASSES:
        return device.vector_flops_per_s.value
    if kind is OpClass.CONVOLUTION and dtype == "float32" and "tf32" in device.flops_per_s:
        dtype = "tf32"
    return device.flops_per_s[dtype if dtype in device.flops_per_s else "float32"].value


def uses_winograd(graph: StepGraph, node: Node, device: DeviceKind) -> bool:
    """Whether a convolution is of the kind that cuDNN computes with fewer products than it counts.

    That is 3x3 at stride 1 in float32 without tensor cores. Published rates of VGG16 lie above the
    peak of a P100 or V100 and cannot be explained without it.
    """
    if "tf32" in device.flops_per_s or _working_dtype(graph, node) != "float32":
        return False
    image, weight, output = _convolution_shapes(graph, node) or ((), (), ())
    return (
        len(image) == len(output) == len(weight) == 4
        and weight[2:] == (3, 3)
        and weight[1] >= _WINOGRAD_CHANNELS
        # At stride 1 a side changes by at most 2, with any padding; a stride of 2 halves it.
        and abs(image[2] - output[2]) <= 2
        and abs(image[3] - output[3]) <= 2
    )


def convolution_rate(graph: StepGraph, node: Node, device: DeviceKind) -> float:
    """What a convolution reaches of the peak, by its kind and channels; see `ChannelRate`."""
    share = 1.0 if device.convolution_scale is None else device.convolution_scale.value
    if "backward" in node.op and device.convolution_backward is not None:
        share *= device.convolution_backward.value
    shapes = _convolution_shapes(graph, node)
    if shapes is None or min(map(len, shapes)) < 3:  # neither channels nor a kernel are known
        return share * device.convolutions[ConvolutionKind.OTHER].most.value
    image, weight, output = shapes
    kind = _KERNELS.get(weight[2:], ConvolutionKind.OTHER)
    if image[1] <= _FEW_CHANNELS:
        kind = ConvolutionKind.FIRST
    elif image[1] > weight[1] and output[1] == weight[0]:  # a transposed one has it the other way
        kind = ConvolutionKind.GROUPED
    return share * device.convolutions[kind].at(math.sqrt(weight[0] * weight[1]))


def _convolution_shapes(
    graph: StepGraph, node: Node
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Of a convolution or its backward: image, weight and output."""
    shapes = [graph.values[value].shape for value in node.reads]
    # Forward takes (input, weight), backward (gradient of the output, input, weight).
    backward = "backward" in node.op
    if len(shapes) < 2 + backward or not node.writes:
        return None
    output = shapes[0] if backward else graph.values[node.writes[0]].shape
    return shapes[backward], shapes[1 + backward], output


def node_parts(graph: StepGraph, node: Node, device: DeviceKind) -> tuple[float, float]:
    """The seconds of a node's arithmetic and of its memory traffic."""
    arithmetic, traffic = zip(*kernel_parts(graph, node, device), strict=True)
    return sum(arithmetic), sum(traffic)


def kernel_parts(
    graph: StepGraph, node: Node, device: DeviceKind, *, is_channels_last: bool = False
) -> list[tuple[float, float]]:
    """Of each kernel of a node, the seconds of arithmetic and of traffic; the longer one counts."""
    kind = op_class(node.op)
    if kind is OpClass.VIEW:
        return [(0.0, 0.0)]
    dtype = _working_dtype(graph, node)
    if kind is OpClass.CONVOLUTION and dtype in _HALF:
        kernels = _half_kernels(graph, node, device, dtype, is_channels_last=is_channels_last)
        if kernels:
            return kernels
    compute_seconds = _flops(graph, node, kind) / peak_flops_per_s(device, kind, dtype)
    memory_seconds = bytes_moved(graph, node) / device.bandwidth_bytes_per_s.value
    compute_share = memory_share = device.efficiency[kind].value
    if kind is OpClass.CONVOLUTION and device.convolutions and dtype == "float32":
        # What algorithms save of products they do not save of bytes.
        compute_share = convolution_rate(graph, node, device)
        memory_share = device.efficiency[OpClass.ELEMENTWISE].value
    elif kind is OpClass.CONVOLUTION and uses_winograd(graph, node, device):
        compute_seconds /= WINOGRAD_SAVING
    elif node.op == "aten.clone.default":
        memory_share *= _REORDERED_TRAFFIC
    return [(compute_seconds / compute_share, memory_seconds / memory_share)]


def _flops(graph: StepGraph, node: Node, kind: OpClass) -> float:
    """Operations of a node; torch counts a grouped convolution's backward as of one group."""
    shapes = _convolution_shapes(graph, node) if kind is OpClass.CONVOLUTION else None
    if shapes is None or min(map(len, shapes)) < 3:
        return node.flops
    image, weight, output = shapes
    is_grouped = image[1] > weight[1] and output[1] == weight[0]
    counted = 2 * math.prod(output) * math.prod(weight[1:])
    return min(node.flops, counted * (1 + ("backward" in node.op))) if is_grouped else node.flops


def _half_kernels(
    graph: StepGraph, node: Node, device: DeviceKind, dtype: str, *, is_channels_last: bool
) -> list[tuple[float, float]]:
    """The kernels of a convolution in half precision; none where its shapes are not known.

    Backward is one kernel for the gradient of the image and one for that of the weight, each of
    which reads the output's gradient. Tensor cores take channels last: where images lie otherwise,
    each kernel has its image and its output turned, which reads and writes them once more.
    """
    shapes = _convolution_shapes(graph, node)
    if shapes is None or min(map(len, shapes)) < 3:
        return []
    image, weight, output = shapes
    num_kernels = 1
    if "backward" in node.op:
        written = [graph.values[value].shape for value in node.writes]
        num_kernels = (image in written) + (weight in written)
    turned_bytes = _HALF_BYTES * (math.prod(image) + math.prod(output))
    compute_rate = (
        peak_flops_per_s(device, OpClass.CONVOLUTION, dtype)
        * device.efficiency[OpClass.MATMUL].value
    )
    memory_rate = device.bandwidth_bytes_per_s.value * device.efficiency[OpClass.ELEMENTWISE].value
    traffic_seconds = (turned_bytes + _HALF_BYTES * math.prod(weight)) / memory_rate
    is_grouped = image[1] > weight[1] and output[1] == weight[0]
    if is_grouped and weight[1] == 1:
        return [(0.0, traffic_seconds / _DEPTHWISE_TRAFFIC[is_channels_last])] * num_kernels
    flops = _flops(graph, node, OpClass.CONVOLUTION) / max(num_kernels, 1)
    if is_grouped:
        compute_rate *= _GROUPED_RATE[is_channels_last]
    kernel = flops / compute_rate, traffic_seconds / _CONVOLUTION_TRAFFIC
    turns = [] if is_channels_last else [(0.0, 2 * turned_bytes / memory_rate)]
    return [kernel, *turns] * num_kernels


def _working_dtype(graph: StepGraph, node: Node) -> str:
    """The dtype a node computes in: of its first floating output, else its largest such input."""
    for value in node.writes:
        if graph.values[value].dtype.startswith(_FLOATING):
            return graph.values[value].dtype
    inputs = [graph.values[value] for value in node.reads]
    floating = [value for value in inputs if value.dtype.startswith(_FLOATING)]
    return max(floating, key=lambda value: value.size_bytes).dtype if floating else "float32"


def _storage_bytes(graph: StepGraph, values: Iterable[int]) -> dict[int, int]:
    """Bytes that some values touch, by storage, none beyond its storage's size."""
    totals: dict[int, int] = {}
    for index in dict.fromkeys(values):
        value = graph.values[index]
        totals[value.storage] = totals.get(value.storage, 0) + value.size_bytes
    return {
        storage: min(total, graph.storages[storage].size_bytes) for storage, total in totals.items()
    }


def _check_rates(device: DeviceKind) -> None:
    """Refuse figures that no time can be derived from."""
    rates = {
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "vector_flops_per_s": device.vector_flops_per_s,
        **{f"flops_per_s.{dtype}": figure for dtype, figure in device.flops_per_s.items()},
    }
    for field, figure in rates.items():
        if not 0 < figure.value < math.inf:
            raise UsageError(
                f"device {device.name!r}: {field} is {figure.value}, must be above 0 and finite;"
                " correct it in the device's file"
            )
    if not math.isfinite(device.launch_seconds.value):
        raise UsageError(f"device {device.name!r}: launch_seconds is not finite")
