"""From an operator's name to its `OpClass`: which share of a device's speed it may hope for.

Names follow rules rather than a full list, because torch adds operators with every release: the
same few words (`conv`, `attention`, `softmax`, `index`) stand in the names of hundreds of them.
A name that no rule knows is elementwise: it reads its inputs once and writes its outputs once.
"""

import re
from functools import cache

from bayplan.data.device import OpClass

__all__ = ["op_class", "selects_rows"]


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
    for kind, pattern in _PATTERNS:
        if pattern.fullmatch(name):
            return kind
    return OpClass.ELEMENTWISE


@cache
def selects_rows(op: str) -> bool:
    """Whether an operator reads only the part of its first input that it returns.

    An embedding may look up four rows of a table of gigabytes; the table's size says nothing about
    its time.

    Example:
        >>> selects_rows("aten.embedding.default"), selects_rows("aten.mul.Tensor")
        (True, False)
    """
    return _split(op)[1] in _ROW_SELECTIONS


def _split(op: str) -> tuple[str, str]:
    """Return an operator's namespace and its name, without overload, in-place mark or foreach."""
    words = op.replace("::", ".").split(".")
    namespace, name = (words[0], words[1]) if len(words) > 1 else ("", words[0])
    name = name.removeprefix("_foreach_")
    # Dunder names (`__and__`) are no in-place ones.
    return namespace, name if name.endswith("__") else name.removesuffix("_")
