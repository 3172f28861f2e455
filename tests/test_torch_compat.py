"""Torch's private names, one by one: what we rely on, so that a new release breaks here first."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from bayplan import torch_compat, torch_joint


def test_optimizers_update_all_at_once_on_accelerators_only():
    assert "cuda" in torch_compat.foreach_devices()
    assert "cpu" not in torch_compat.foreach_devices()


# Fake tensors.


def test_fake_tensors_have_shapes_and_storages_but_no_data():
    with torch_compat.FakeTensorMode():
        x = torch.ones(3, 4)
        y = x @ x.t()
    assert isinstance(y, torch_compat.FakeTensor)
    assert (y.shape, y.dtype, y.device.type) == ((3, 3), torch.float32, "cpu")
    assert y.untyped_storage().nbytes() == 36
    assert y.untyped_storage().device.type == "meta"


def test_fake_mode_accepts_real_tensors_when_asked_to():
    real = torch.ones(2)
    with torch_compat.FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(real + 1, torch_compat.FakeTensor)
    with torch_compat.FakeTensorMode(), pytest.raises(Exception, match="allow_non_fake_inputs"):
        real + 1


def test_fake_mode_logs_under_the_name_of_its_module(caplog):
    with torch_compat.FakeTensorMode(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert {record.name for record in caplog.records} == {torch_compat.FakeTensorMode.__module__}


def test_reading_a_value_raises_a_value_dependent_error():
    with torch_compat.FakeTensorMode():
        x = torch.ones(2)
        with pytest.raises(torch_compat.DataDependentOutputException):
            x.sum().item()
    assert torch_compat.DataDependentOutputException in torch_compat.VALUE_DEPENDENT_ERRORS


def test_shape_that_depends_on_values_raises_a_value_dependent_error():
    with torch_compat.FakeTensorMode():
        x = torch.ones(2)
        with pytest.raises(torch_compat.DynamicOutputShapeException):
            x.nonzero()
    assert torch_compat.DynamicOutputShapeException in torch_compat.VALUE_DEPENDENT_ERRORS


def test_operator_without_a_fake_kernel_raises_unsupported_operator():
    with torch.library._scoped_library("bayplan_private_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x + 1, "CPU")
        with (
            torch_compat.FakeTensorMode(),
            pytest.raises(torch_compat.UnsupportedOperatorException),
        ):
            torch.ops.bayplan_private_test.mystery(torch.ones(2))


def test_tensor_that_cannot_be_faked_raises_unsupported_fake_tensor():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(torch_compat.UnsupportedFakeTensorException):
        torch_compat.FakeTensorMode().from_tensor(quantized)


def test_faking_is_noticed_and_left_for_a_while():
    assert not torch_compat.is_faking()
    with torch_compat.FakeTensorMode():
        assert torch_compat.is_faking()
        with torch_compat.outside_tracing():
            assert not torch_compat.is_faking()
            assert not isinstance(torch.ones(2), torch_compat.FakeTensor)
        assert isinstance(torch.ones(2), torch_compat.FakeTensor)


def test_mode_behind_fake_tensors_is_found():
    with torch_compat.FakeTensorMode() as mode:
        x = torch.ones(2)
    assert torch_compat.fake_mode_of([1, x]) is mode


# Dispatch.


class Recording(torch_compat.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_operators_of_forward_and_backward():
    weight = nn.Parameter(torch.ones(2, 2))
    with Recording() as mode:
        weight.tanh().sum().backward()
    names = [str(func) for func, _, _ in mode.calls]
    seen = [names.index(f"aten.{name}.default") for name in ("tanh", "sum", "tanh_backward")]
    assert seen == sorted(seen)


def test_modes_can_be_left_from_inside():
    with torch_compat.FakeTensorMode():
        with torch_compat.outside_tracing():
            assert type(torch.ones(2)) is torch.Tensor
        assert isinstance(torch.ones(2), torch_compat.FakeTensor)


def test_watch_runs_operators_and_passes_bookkeeping_by():
    class Watch(torch_compat.OperatorWatch):
        seen = ()

        def run(self, func, /, *args, **kwargs):
            self.seen = (*self.seen, str(func))
            return func(*args, **kwargs)

    with Watch() as watch, record_function("a mark"):
        torch.ops.aten.relu.default(self=torch.ones(2))
    assert watch.seen == ("aten.ones.default", "aten.relu.default")


def test_marks_for_the_profiler_are_bookkeeping_and_operators_are_not():
    with Recording() as mode, record_function("mark"):
        torch.ones(2).add_(1)
    kinds = {str(func): torch_compat.is_bookkeeping(func) for func, _, _ in mode.calls}
    assert kinds["aten.add_.Tensor"] is False
    assert {name for name, is_mark in kinds.items() if is_mark} == {
        name for name in kinds if name.startswith("profiler.")
    }
    assert any(kinds.values())


def test_schema_tells_which_arguments_are_written():
    x, y = torch.ones(2), torch.ones(2)
    add_, add_out = torch.ops.aten.add_.Tensor, torch.ops.aten.add.out
    assert torch_compat.mutated_arguments(torch.ops.aten.add.Tensor, (x, y), {}) == []
    assert torch_compat.mutated_arguments(add_, (x, y), {})[0] is x
    assert torch_compat.mutated_arguments(add_out, (x, y), {"out": y})[0] is y
    lists = torch_compat.mutated_arguments(torch.ops.aten._foreach_add_.Scalar, ([x, y], 1), {})
    assert lists[0] is not None
    assert len(lists[0]) == 2


# Storages.


def test_storage_key_is_shared_by_views_and_not_by_copies():
    x = torch.ones(4)
    tensors = x, x[1:], x.clone()
    keys = [torch_compat.storage_key(tensor.untyped_storage()) for tensor in tensors]
    assert keys[0] == keys[1] != keys[2]


def test_storage_key_works_where_there_is_no_data():
    with torch_compat.FakeTensorMode():
        x, y = torch.ones(4), torch.ones(4)
        keys = [torch_compat.storage_key(t.untyped_storage()) for t in (x, x.view(2, 2), y)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("is_fake", [False, True])
def test_weak_reference_to_a_storage_lives_as_long_as_its_last_tensor(is_fake):
    # Not a private name, but not written anywhere either: the object outlives its variable.
    released = []
    with torch_compat.FakeTensorMode() if is_fake else torch.no_grad():
        x = torch.ones(4)
        reference = weakref.ref(x.untyped_storage(), released.append)
        view = x[1:]
        del x
        gc.collect()
        assert not released
        del view
    assert released == [reference]


# Autograd.


def test_forward_operators_are_numbered_and_their_formulas_carry_the_number():
    weight = nn.Parameter(torch.ones(2))
    first = torch_compat.next_forward_sequence()
    y = weight.tanh()
    assert torch_compat.next_forward_sequence() == first + 1
    assert torch_compat.forward_sequence(y.grad_fn) == first
    with torch.no_grad():
        weight.tanh()
    assert torch_compat.next_forward_sequence() == first + 1


def test_changes_in_place_are_counted_for_all_views():
    tensor = torch.ones(2)
    before = torch_compat.num_changes(tensor)
    tensor[:1].add_(1)
    assert torch_compat.num_changes(tensor) == before + 1


def test_number_is_known_in_formulas_and_sums_and_nowhere_else():
    weight = nn.Parameter(torch.ones(2))
    numbers = {}

    class Numbers(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            numbers[str(func)] = torch_compat.current_backward_sequence()
            return func(*args, **(kwargs or {}))

    tanh_number = torch_compat.next_forward_sequence()
    y = weight.tanh()
    exp_number = torch_compat.next_forward_sequence()
    loss = (y * weight.exp()).sum()
    assert torch_compat.current_backward_sequence() is None
    with Numbers():
        loss.backward()
    assert numbers["aten.ones_like.default"] is None
    assert numbers["aten.tanh_backward.default"] == tanh_number
    # The later of the two formulas is the one after which the gradients are summed.
    assert numbers["aten.add.Tensor"] == min(tanh_number, exp_number)


def test_views_are_replayed_on_real_tensors_when_asked_to():
    def operators(context) -> list[str]:
        weight = nn.Parameter(torch.ones(4))
        with context, Recording() as mode:
            y = weight * 2
            y[1:3].mul_(3)
            y.sum().backward()
        return [str(func) for func, _, _ in mode.calls]

    plain = operators(torch.enable_grad())
    replayed = operators(torch_compat.replayed_views())
    assert "aten.as_strided.default" in plain
    assert "aten.as_strided.default" not in replayed
    assert operators(torch.enable_grad()) == plain


def test_a_mode_keeps_the_engine_from_summing_in_place():
    # Why gradients' sums are rewritten after a capture; if this fails the rewriting can go.
    weight = nn.Parameter(torch.ones(2))
    with Recording() as mode:
        (weight.tanh() * weight.exp()).sum().backward()
    names = [str(func) for func, _, _ in mode.calls]
    assert "aten.add.Tensor" in names
    assert "aten.add_.Tensor" not in names


# Trees.


def test_leaves_of_nested_containers_are_listed_in_order():
    assert torch_compat.tree_leaves(({"a": 1, "b": [2, (3,)]}, 4)) == [1, 2, 3, 4]


def test_leaves_of_one_type_are_replaced():
    nested = {"a": [1, "x"], "b": (2,)}
    assert torch_compat.tree_map_only(int, lambda n: n * 10, nested) == {
        "a": [10, "x"],
        "b": (20,),
    }


# Ranks.


def test_default_store_is_the_one_the_ranks_met_in(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch_compat.default_store().set("key", "value")
        assert torch_compat.default_store().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def test_a_call_after_backward_comes_when_all_gradients_are_there():
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    seen = []

    def ready(parameter):
        if not seen:
            seen.append("first")
            torch_compat.after_backward(
                lambda: seen.append([weight.grad is not None for weight in weights])
            )

    for weight in weights:
        weight.register_post_accumulate_grad_hook(ready)
    (weights[0] * weights[1] * weights[2]).sum().backward()
    assert seen == ["first", [True] * 3]


# Calls of operators.


def test_call_of_an_overload_runs_that_overload():
    overload = torch.ops.aten.add.Tensor
    assert isinstance(overload, torch_compat.OpOverload)
    call = torch_compat.call_of_overload(overload)
    assert torch.equal(call(torch.ones(2), 1, alpha=2), torch.full((2,), 3.0))


def test_below_autograd_nothing_is_recorded_but_changes_are_counted():
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2)
    version = y._version
    with torch_compat.below_autograd():
        assert not (x * 2).requires_grad
        y.add_(1)
    assert y._version == version + 1  # autograd checks what it saved by these
    assert (x * 2).requires_grad


def test_kernels_alone_note_neither_views_nor_changes_until_told_to():
    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(2)
    version = y._version
    with torch_compat.kernels_alone():
        assert not (x * 2).requires_grad
        assert not x.t()._is_view()
        y.add_(1)
        assert y._version == version
        with torch_compat.noting_changes():
            y.add_(1)
            assert not (x * 2).requires_grad
        with torch_compat.above_autograd():
            assert x.t()._is_view()
            assert (x * 2).requires_grad
    assert y._version == version + 1


# Fake kernels.


def test_a_fake_kernel_can_be_replaced_and_calls_torchs_own(monkeypatch):
    from torch._decomp import decomposition_table, meta_table
    from torch._subclasses.fake_impls import op_implementations_dict

    operator = torch.ops.aten.native_group_norm.default
    decomposed = decomposition_table[operator]
    monkeypatch.setitem(meta_table, operator, decomposed)  # both are put back afterwards
    monkeypatch.setitem(op_implementations_dict, operator, decomposed)
    torch_compat.set_fake_kernel(
        operator, lambda otherwise, *args: (otherwise(*args)[0].double(), None, None)
    )
    with torch_compat.FakeTensorMode():
        image = torch.ones(2, 4, 3)
        assert operator(image, None, None, 2, 4, 3, 2, 1e-5)[0].dtype == torch.float64
    assert decomposition_table[operator] is decomposed  # which other compilers use
    monkeypatch.undo()
    torch_compat.FakeTensorMode.cache_clear()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(2, 3, 4, 5), torch.contiguous_format),
        (torch.ones(2, 3, 4, 5).transpose(2, 3), torch.contiguous_format),
        (torch.ones(2, 4, 5, 3).permute(0, 3, 1, 2), torch.channels_last),
        (torch.ones(2, 4, 5, 6, 3).permute(0, 4, 1, 2, 3), torch.channels_last_3d),
    ],
)
def test_memory_format_that_kernels_see(tensor, expected):
    assert torch_compat.suggested_format(tensor) == expected


def test_grouped_product_is_what_the_function_calls():
    called = []

    class Watch(torch_compat.OperatorWatch):
        def run(self, func, /, *args, **kwargs):
            called.append(func)
            return func(*args, **kwargs)

    with Watch():
        torch.nn.functional.grouped_mm(torch.ones(2, 4, 8), torch.ones(2, 8, 4))
    assert called[-1] is torch_compat.GROUPED_PRODUCT


def test_draws_that_nobody_reads_stay_in_a_joint_graph():
    graphs = []

    def partition(joint, _, *, num_fwd_outputs, **__):
        graphs.append(joint.graph)
        raise NotImplementedError

    class Draws(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            torch.rand(3)
            return x * self.weight

    def backend(module, inputs):
        return torch_joint.compile_joint(module, inputs, partition=partition, compile_graph=None)

    with pytest.raises(Exception, match="NotImplementedError"):
        torch.compile(Draws(), backend=backend)(torch.ones(2))
    assert any(node.target is torch.ops.aten.rand.default for node in graphs[0].nodes)


def test_an_operator_without_a_cuda_kernel_can_be_declared_to_have_one():
    operator = torch.ops.aten.silu_backward.default
    torch_compat.declare_cuda_kernel(operator)
    torch_compat.declare_cuda_kernel(operator)  # once is enough, twice does no harm
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CUDA")


def test_fake_tensors_can_be_swapped_only_where_that_is_asked_for():
    with torch_compat.FakeTensorMode():
        module = torch.nn.Linear(2, 2)
        with torch_compat.convertible_fakes():
            module.half()
        assert module.weight.dtype is torch.float16
        with pytest.raises(RuntimeError, match="swap"):
            module.double()
