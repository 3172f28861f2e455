"""Torch's private names, one by one: what we rely on, so that a new release breaks here first."""

import gc
import logging
import subprocess
import sys
import weakref

import pytest
import torch
from torch import fx, nn
from torch.profiler import record_function

from bayplan import torch_private

# Fake tensors.


def test_fake_tensors_have_shapes_and_storages_but_no_data():
    with torch_private.FakeTensorMode():
        x = torch.ones(3, 4)
        y = x @ x.t()
    assert isinstance(y, torch_private.FakeTensor)
    assert (y.shape, y.dtype, y.device.type) == ((3, 3), torch.float32, "cpu")
    assert y.untyped_storage().nbytes() == 36
    assert y.untyped_storage().device.type == "meta"


def test_fake_mode_accepts_real_tensors_when_asked_to():
    real = torch.ones(2)
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(real + 1, torch_private.FakeTensor)
    with torch_private.FakeTensorMode(), pytest.raises(Exception, match="allow_non_fake_inputs"):
        real + 1


def test_fake_mode_logs_under_the_name_of_its_module(caplog):
    with torch_private.FakeTensorMode(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert {record.name for record in caplog.records} == {torch_private.FakeTensorMode.__module__}


def test_reading_a_value_raises_a_value_dependent_error():
    with torch_private.FakeTensorMode():
        x = torch.ones(2)
        with pytest.raises(torch_private.DataDependentOutputException):
            x.sum().item()
    assert torch_private.DataDependentOutputException in torch_private.VALUE_DEPENDENT_ERRORS


def test_shape_that_depends_on_values_raises_a_value_dependent_error():
    with torch_private.FakeTensorMode():
        x = torch.ones(2)
        with pytest.raises(torch_private.DynamicOutputShapeException):
            x.nonzero()
    assert torch_private.DynamicOutputShapeException in torch_private.VALUE_DEPENDENT_ERRORS


def test_operator_without_a_fake_kernel_raises_unsupported_operator():
    with torch.library._scoped_library("bayplan_private_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x + 1, "CPU")
        with (
            torch_private.FakeTensorMode(),
            pytest.raises(torch_private.UnsupportedOperatorException),
        ):
            torch.ops.bayplan_private_test.mystery(torch.ones(2))


def test_tensor_that_cannot_be_faked_raises_unsupported_fake_tensor():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(torch_private.UnsupportedFakeTensorException):
        torch_private.FakeTensorMode().from_tensor(quantized)


def test_forward_that_logs_is_compiled_as_one_graph():
    torch_private.ignore_logging()
    logger = logging.getLogger("some")

    def forward(x):
        logger.warning("once more")
        return x.sin()

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())


def test_faking_is_noticed_and_left_for_a_while():
    assert not torch_private.is_faking()
    with torch_private.FakeTensorMode():
        assert torch_private.is_faking()
        with torch_private.outside_tracing():
            assert not torch_private.is_faking()
            assert not isinstance(torch.ones(2), torch_private.FakeTensor)
        assert isinstance(torch.ones(2), torch_private.FakeTensor)


def test_mode_behind_fake_tensors_is_found():
    with torch_private.FakeTensorMode() as mode:
        x = torch.ones(2)
    assert torch_private.fake_mode_of([1, x]) is mode


# Dispatch.


class Recording(torch_private.TorchDispatchMode):
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
    with torch_private.FakeTensorMode():
        with torch_private.outside_tracing():
            assert type(torch.ones(2)) is torch.Tensor
        assert isinstance(torch.ones(2), torch_private.FakeTensor)


def test_marks_for_the_profiler_are_bookkeeping_and_operators_are_not():
    with Recording() as mode, record_function("mark"):
        torch.ones(2).add_(1)
    kinds = {str(func): torch_private.is_bookkeeping(func) for func, _, _ in mode.calls}
    assert kinds["aten.add_.Tensor"] is False
    assert {name for name, is_mark in kinds.items() if is_mark} == {
        name for name in kinds if name.startswith("profiler.")
    }
    assert any(kinds.values())


def test_schema_tells_which_arguments_are_written():
    x, y = torch.ones(2), torch.ones(2)
    add_, add_out = torch.ops.aten.add_.Tensor, torch.ops.aten.add.out
    assert torch_private.mutated_arguments(torch.ops.aten.add.Tensor, (x, y), {}) == []
    assert torch_private.mutated_arguments(add_, (x, y), {})[0] is x
    assert torch_private.mutated_arguments(add_out, (x, y), {"out": y})[0] is y
    lists = torch_private.mutated_arguments(torch.ops.aten._foreach_add_.Scalar, ([x, y], 1), {})
    assert lists[0] is not None
    assert len(lists[0]) == 2


# Storages.


def test_storage_key_is_shared_by_views_and_not_by_copies():
    x = torch.ones(4)
    tensors = x, x[1:], x.clone()
    keys = [torch_private.storage_key(tensor.untyped_storage()) for tensor in tensors]
    assert keys[0] == keys[1] != keys[2]


def test_storage_key_works_where_there_is_no_data():
    with torch_private.FakeTensorMode():
        x, y = torch.ones(4), torch.ones(4)
        keys = [torch_private.storage_key(t.untyped_storage()) for t in (x, x.view(2, 2), y)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("is_fake", [False, True])
def test_weak_reference_to_a_storage_lives_as_long_as_its_last_tensor(is_fake):
    # Not a private name, but not written anywhere either: the object outlives its variable.
    released = []
    with torch_private.FakeTensorMode() if is_fake else torch.no_grad():
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
    first = torch_private.next_forward_sequence()
    y = weight.tanh()
    assert torch_private.next_forward_sequence() == first + 1
    assert y.grad_fn._sequence_nr() == first
    with torch.no_grad():
        weight.tanh()
    assert torch_private.next_forward_sequence() == first + 1


def test_number_is_known_in_formulas_and_sums_and_nowhere_else():
    weight = nn.Parameter(torch.ones(2))
    numbers = {}

    class Numbers(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            numbers[str(func)] = torch_private.current_backward_sequence()
            return func(*args, **(kwargs or {}))

    tanh_number = torch_private.next_forward_sequence()
    y = weight.tanh()
    exp_number = torch_private.next_forward_sequence()
    loss = (y * weight.exp()).sum()
    assert torch_private.current_backward_sequence() is None
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
    replayed = operators(torch_private.replayed_views())
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
    assert torch_private.tree_leaves(({"a": 1, "b": [2, (3,)]}, 4)) == [1, 2, 3, 4]


def test_leaves_of_one_type_are_replaced():
    nested = {"a": [1, "x"], "b": (2,)}
    assert torch_private.tree_map_only(int, lambda n: n * 10, nested) == {
        "a": [10, "x"],
        "b": (20,),
    }


# Joint graphs.


def test_joint_graph_is_cut_by_our_partition_and_wrapped_again():
    from functorch.compile import default_partition

    seen = {}

    def partition(joint: fx.GraphModule, inputs, *, num_fwd_outputs, **options):
        seen["outputs"] = num_fwd_outputs
        seen["tangents"] = [n.name for n in joint.graph.nodes if torch_private.is_tangent(n)]
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def backend(module: fx.GraphModule, inputs):
        return torch_private.compile_joint(
            module, inputs, partition=partition, compile_graph=lambda graph, _: graph
        )

    x = torch.ones(2, 3)
    model = nn.Linear(3, 3)
    torch.compile(model, backend=backend)(x).sum().backward()
    assert seen["outputs"] == 1
    assert len(seen["tangents"]) == 1
    assert model.bias.grad.tolist() == [2.0, 2.0, 2.0]


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("fixed", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return self.layer(x) * self.count + self.fixed


def test_inputs_that_forward_changes_are_known_in_the_joint_graph():
    from functorch.compile import default_partition

    seen = []

    def partition(joint: fx.GraphModule, inputs, **options):
        changed = torch_private.changed_inputs(joint.graph)
        seen.append([node.meta["val"].shape for node in changed])
        # Their new values are the forward's first outputs.
        (new, *_), (old,) = joint.graph.output_node().args[0], changed
        seen.append([source for source in new.all_input_nodes if source is old])
        return default_partition(joint, inputs, **options)

    def backend(module: fx.GraphModule, inputs):
        return torch_private.compile_joint(
            module, inputs, partition=partition, compile_graph=lambda graph, _: graph
        )

    model = _Counting()
    torch.compile(model, backend=backend)(torch.ones(2, 3)).sum().backward()
    assert seen[0] == [(3,)]
    assert len(seen[1]) == 1
    assert model.count.tolist() == [1.0, 1.0, 1.0]


def test_graph_that_changes_nothing_has_no_changed_inputs():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert torch_private.changed_inputs(graph) == []


def test_inputs_are_given_in_a_list_that_may_be_emptied():
    """Else torch would hold what the backend has released."""
    seen = []

    def boxed(module: fx.GraphModule, _):
        def run(inputs: list):
            seen.append(type(inputs))
            mine = list(inputs)
            inputs.clear()
            return module(*mine)

        run._boxed_call = True
        return run

    def backend(module: fx.GraphModule, inputs):
        from functorch.compile import default_partition

        return torch_private.compile_joint(
            module, inputs, partition=default_partition, compile_graph=boxed
        )

    model = nn.Linear(3, 3)
    torch.compile(model, backend=backend)(torch.ones(2, 3)).sum().backward()
    assert seen == [list, list]
    assert model.bias.grad.tolist() == [2.0, 2.0, 2.0]


def test_error_of_a_backend_is_unwrapped():
    def backend(module, inputs):
        raise KeyError("ours")

    with pytest.raises(Exception, match="ours") as caught:
        torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    assert isinstance(torch_private.compile_fault(caught.value), KeyError)
    other = ValueError("not wrapped")
    assert torch_private.compile_fault(other) is other


def test_hooks_on_a_gradient_are_seen_until_they_are_removed():
    weight = nn.Parameter(torch.ones(2))
    assert not torch_private.has_gradient_hooks(weight)
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert torch_private.has_gradient_hooks(weight)
        handle.remove()
        assert not torch_private.has_gradient_hooks(weight)


def test_compiled_module_knows_what_it_was_made_from():
    plain = nn.Linear(2, 2)
    assert torch_private.uncompiled(torch.compile(plain)) is plain
    assert torch_private.uncompiled(plain) is plain


def test_compiled_function_runs_as_written_while_asked_to():
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    with torch_private.running_eagerly():
        assert double(torch.ones(1)).item() == 2
    assert compiled == []
    assert double(torch.ones(1)).item() == 2
    assert len(compiled) == 1


def test_running_eagerly_does_not_load_the_compiler():
    code = (
        "import sys; from bayplan import torch_private\n"
        "with torch_private.running_eagerly(): pass\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
