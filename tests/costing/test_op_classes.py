"""Which class an operator belongs to, for the names that capture meets."""

import subprocess
import sys

import pytest

from bayplan.costing.roofline import op_class, selects_rows
from bayplan.data.device import OpClass

EXPECTED = {
    OpClass.MATMUL: """
        addmm.default mm.default bmm.default baddbmm.default mv.default linear.default
        linear_backward.default _scaled_mm.default _scaled_mm_v2.default _grouped_mm.default
        _addmm_activation.default addmm_.default matmul.default _cudnn_rnn_backward.default
        mkldnn_rnn_layer.default mkldnn_linear_backward.default dot.default
    """,
    OpClass.CONVOLUTION: """
        convolution.default convolution_backward.default cudnn_convolution.default
        mkldnn_convolution.default _conv_depthwise2d.default conv_transpose2d.input
        slow_conv3d_forward.default
    """,
    OpClass.ATTENTION: """
        _scaled_dot_product_flash_attention_for_cpu.default
        _scaled_dot_product_flash_attention_for_cpu_backward.default
        _scaled_dot_product_efficient_attention_backward.default
        _scaled_dot_product_cudnn_attention.default _flash_attention_forward.default
    """,
    OpClass.REDUCTION: """
        native_batch_norm.default native_batch_norm_backward.default cudnn_batch_norm.default
        _native_batch_norm_legit.default native_layer_norm_backward.default
        native_group_norm.default _fused_rms_norm.default _softmax.default
        _log_softmax_backward_data.default max_pool2d_with_indices.default
        max_pool2d_with_indices_backward.default _adaptive_avg_pool2d.default
        avg_pool2d_backward.default sum.dim_IntList mean.dim var_mean.correction amax.default
        max.dim argmax.default cumsum.default topk.default sort.default logsumexp.default
        linalg_vector_norm.default _foreach_norm.Scalar mse_loss.default any.default
        binary_cross_entropy_with_logits.default
    """,
    OpClass.GATHER: """
        embedding.default embedding_dense_backward.default _embedding_bag.default index.Tensor
        index_select.default index_put.default index_put_.default index_add_.default
        _unsafe_index.Tensor gather.default scatter.value scatter_add_.default
        nll_loss_forward.default nll_loss_backward.default masked_select.default nonzero.default
    """,
    OpClass.VIEW: """
        view.default t.default expand.default detach.default slice.Tensor select.int transpose.int
        permute.default unsqueeze.default squeeze.dim squeeze_.dim as_strided.default split.Tensor
        split_with_sizes.default unbind.int _unsafe_view.default alias.default view.dtype
        _reshape_alias.default diagonal.default unfold.default view_as_real.default
        lift_fresh.default
        empty.memory_format empty_like.default empty_strided.default new_empty.default
        new_empty_strided.default empty_permuted.default sym_size.int is_same_size.default
        _local_scalar_dense.default resize_.default set_.source_Tensor
    """,
    OpClass.ELEMENTWISE: """
        add.Tensor add_.Tensor mul.Scalar relu.default relu_.default threshold_backward.default
        gelu_backward.default silu.default sigmoid.default tanh_backward.default
        native_dropout.default
        bernoulli_.float normal_.default copy_.default _to_copy.default clone.default cat.default
        stack.default zeros.default zero_.default full_like.default where.self masked_fill.Scalar
        slice_backward.default select_scatter.default slice_scatter.default constant_pad_nd.default
        upsample_nearest2d.default upsample_bilinear2d.vec maximum.default __and__.Tensor
        _foreach_add_.List _foreach_mul_.Scalar _foreach_addcdiv_.ScalarList _fused_adamw_.default
        mse_loss_backward.default _convert_indices_from_coo_to_csr.default
    """,
}
CASES = [(name, kind) for kind, names in EXPECTED.items() for name in names.split()]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_aten_operators(name, kind):
    assert op_class(f"aten.{name}") is kind


@pytest.mark.parametrize(
    "op", ["profiler._record_function_enter_new.default", "prim.device.default"]
)
def test_operators_of_the_host_cost_a_device_nothing(op):
    assert op_class(op) is OpClass.VIEW


@pytest.mark.parametrize("op", ["mylib.fused_thing.default", "thing", "aten.not_yet_invented", ""])
def test_unknown_operators_are_elementwise(op):
    assert op_class(op) is OpClass.ELEMENTWISE


def test_other_ways_to_write_a_name():
    assert op_class("aten::mm") is OpClass.MATMUL
    assert op_class("mm") is OpClass.MATMUL
    assert op_class("getitem") is OpClass.VIEW
    assert op_class("mkldnn._convolution_pointwise.default") is OpClass.CONVOLUTION
    assert op_class("mkldnn._linear_pointwise.default") is OpClass.MATMUL


def test_only_forward_gathers_select_rows():
    assert selects_rows("aten.embedding.default")
    assert selects_rows("aten.index.Tensor")
    assert selects_rows("aten.nll_loss_forward.default")
    assert not selects_rows("aten.embedding_dense_backward.default")
    assert not selects_rows("aten.index_put_.default")


def test_no_torch_is_imported():
    check = (
        "import sys, bayplan.costing.roofline, bayplan.costing.catalogue,"
        " bayplan.costing.roofline; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
