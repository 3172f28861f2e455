"""Torch's private names about compiling: what we rely on, so that releases break here first."""

import logging
import subprocess
import sys

import numpy
import pytest
import torch
from torch import fx, nn
from torch._dynamo import guards

from bayplan import torch_compat, torch_joint


def test_joint_graph_is_cut_by_our_partition_and_wrapped_again():
    from functorch.compile import default_partition

    seen = {}

    def partition(joint: fx.GraphModule, inputs, *, num_fwd_outputs, **options):
        seen["outputs"] = num_fwd_outputs
        seen["tangents"] = [n.name for n in joint.graph.nodes if torch_compat.is_tangent(n)]
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def backend(module: fx.GraphModule, inputs):
        return torch_joint.compile_joint(
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
        changed = torch_compat.changed_inputs(joint.graph)
        seen.append([node.meta["val"].shape for node in changed])
        # Their new values are the forward's first outputs.
        (new, *_), (old,) = joint.graph.output_node().args[0], changed
        seen.append([source for source in new.all_input_nodes if source is old])
        return default_partition(joint, inputs, **options)

    def backend(module: fx.GraphModule, inputs):
        return torch_joint.compile_joint(
            module, inputs, partition=partition, compile_graph=lambda graph, _: graph
        )

    model = _Counting()
    torch.compile(model, backend=backend)(torch.ones(2, 3)).sum().backward()
    assert seen[0] == [(3,)]
    assert len(seen[1]) == 1
    assert model.count.tolist() == [1.0, 1.0, 1.0]


def test_a_forward_that_is_cut_changes_its_inputs_itself():
    from functorch.compile import default_partition

    graphs = []

    def compile_graph(graph, _):
        graphs.append(graph)
        return graph

    def backend(module: fx.GraphModule, inputs):
        return torch_joint.compile_joint(
            module, inputs, partition=default_partition, compile_graph=compile_graph
        )

    model = _Counting()
    run = torch.compile(model, backend=backend)
    version = model.count._version
    for _ in range(2):
        run(torch.ones(2, 3)).sum().backward()
    forward = graphs[0].graph
    (copy,) = forward.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert copy.args[0].op == "placeholder"
    assert model.count.tolist() == [2.0, 2.0, 2.0]
    assert model.count._version > version  # so that autograd notices


def test_graph_that_changes_nothing_has_no_changed_inputs():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert torch_compat.changed_inputs(graph) == []


def test_inputs_are_given_in_a_list_that_may_be_emptied():
    """Else torch would hold what the backend has released."""
    seen = []

    def boxed(module: fx.GraphModule, _):
        def run(inputs: list):
            seen.append(type(inputs))
            mine = list(inputs)
            inputs.clear()
            return module(*mine)

        return torch_compat.boxed(run)

    def backend(module: fx.GraphModule, inputs):
        from functorch.compile import default_partition

        return torch_joint.compile_joint(
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
    assert isinstance(torch_compat.compile_fault(caught.value), KeyError)
    other = ValueError("not wrapped")
    assert torch_compat.compile_fault(other) is other


def test_hooks_on_a_gradient_are_seen_until_they_are_removed():
    weight = nn.Parameter(torch.ones(2))
    assert not torch_compat.has_gradient_hooks(weight)
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert torch_compat.has_gradient_hooks(weight)
        handle.remove()
        assert not torch_compat.has_gradient_hooks(weight)


def test_compiled_module_knows_what_it_was_made_from():
    plain = nn.Linear(2, 2)
    assert torch_compat.uncompiled(torch.compile(plain)) is plain
    assert torch_compat.uncompiled(plain) is plain


def test_compiled_call_of_a_module_is_read_and_replaced():
    model = nn.Linear(2, 2)
    assert torch_compat.compiled_call(model) is None
    torch_compat.set_compiled_call(model, lambda x: x + 1)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    assert torch_compat.compiled_call(model) is not None
    torch_compat.set_compiled_call(model, None)
    assert model(torch.ones(2)).requires_grad


def test_call_without_compilation_runs_hooks_and_forward():
    model, calls = nn.Linear(2, 2), []
    model.register_forward_hook(lambda *_: calls.append(1))
    torch_compat.set_compiled_call(model, lambda x: x)
    assert torch_compat.call_of_module(model, torch.ones(2)).requires_grad
    assert calls == [1]


def test_compiled_function_runs_as_written_while_asked_to():
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    with torch_compat.running_eagerly():
        assert double(torch.ones(1)).item() == 2
    assert compiled == []
    assert double(torch.ones(1)).item() == 2
    assert len(compiled) == 1


def test_running_eagerly_does_not_load_the_compiler():
    code = (
        "import sys; from bayplan import torch_compat\n"
        "with torch_compat.running_eagerly(): pass\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_forward_that_logs_is_compiled_as_one_graph():
    torch_compat.ignore_logging()
    logger = logging.getLogger("some")

    def forward(x):
        logger.warning("once more")
        torch._dynamo.mark_static_address(x)  # transformers does so where nothing is compiled
        return x.sin()

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())


def test_backward_is_traced_without_the_forwards_autocast():
    from functorch.compile import default_partition

    dtypes = []

    def partition(joint: fx.GraphModule, inputs, **options):
        products = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        dtypes.extend(node.meta["val"].dtype for node in products)
        return default_partition(joint, inputs, **options)

    def backend(module: fx.GraphModule, inputs):
        return torch_joint.compile_joint(
            module, inputs, partition=partition, compile_graph=lambda graph, _: graph
        )

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            return gradient.float() @ w.t(), x.t() @ gradient.float()

    weight = nn.Parameter(torch.ones(3, 3))
    call = torch.compile(lambda x: Product.apply(x, weight), backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(torch.ones(2, 3, requires_grad=True))
    output.sum().backward()
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


def test_backward_may_keep_its_graph_after_one_that_did_not():
    from functorch.compile import default_partition

    kept = []

    def compile_graph(graph: fx.GraphModule, _):
        def run(arguments):
            kept.append(torch_compat.is_graph_kept())
            return graph(*arguments)

        return torch_compat.boxed(run)

    def backend(module: fx.GraphModule, inputs):
        return torch_joint.compile_joint(
            module, inputs, partition=default_partition, compile_graph=compile_graph
        )

    model = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.GELU()), backend=backend)
    for retain in (False, True):
        loss = model(torch.ones(2, 3)).sum()
        loss.backward(retain_graph=retain)
    loss.backward()
    assert kept == [False, False, False, True, False]  # forward, backward, and so on


def test_sums_of_autograd_in_a_joint_graph_are_told_from_those_of_formulas():
    from functorch.compile import default_partition

    parts = []

    def partition(joint: fx.GraphModule, inputs, *, num_fwd_outputs, **options):
        results = list(joint.graph.output_node().args[0])
        parts.append(torch_joint.gradient_parts(results[num_fwd_outputs]))
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def backend(module: fx.GraphModule, inputs):
        return torch_joint.compile_joint(
            module, inputs, partition=partition, compile_graph=lambda graph, _: graph
        )

    x = torch.ones(3, requires_grad=True)

    def three_times(x):
        return x.tanh() * x.exp() + x.sin()

    torch.compile(three_times, backend=backend)(x).sum().backward()
    (three,) = parts
    assert len(three) == 3
    # From the last use to the first, as autograd goes.
    assert "sin" in str(three[0].all_input_nodes) or "cos" in str(three[0].all_input_nodes)


def test_numpy_is_traced_for_others_only():
    from bayplan import torch_answers

    torch_answers.answer_as_eager()

    class Backend:
        def __init__(self, is_ours):
            self.traces_as_eager = is_ours
            self.num_graphs = 0

        def __call__(self, module, inputs):
            self.num_graphs += 1
            return module.forward

    def draw(x):
        return (x + 1) * torch.from_numpy(numpy.random.rand(3)) * float(numpy.sqrt(16)) + 1

    numbers = []
    for is_ours in (True, False):
        torch.compiler.reset()
        backend = Backend(is_ours)
        numpy.random.seed(0)
        numbers.append(torch.compile(draw, backend=backend)(torch.ones(3)))
        assert (backend.num_graphs > 1) == is_ours
    numpy.random.seed(0)
    assert torch.equal(draw(torch.ones(3)), numbers[0])


def test_fake_tensor_whose_values_are_known_has_an_array():
    from bayplan import torch_answers
    from bayplan.tracing.values import KnownValues

    with KnownValues(), torch_answers.known_arrays():
        assert torch.arange(3).numpy().tolist() == [0, 1, 2]


def test_faults_of_the_compiler_are_told_from_those_of_what_it_compiled():
    def backend(module: fx.GraphModule, inputs):
        raise KeyError("x")

    with pytest.raises(Exception, match="KeyError") as raised:
        torch.compile(nn.Linear(3, 3), backend=backend)(torch.ones(2, 3))
    assert torch_compat.is_compile_fault(raised.value)
    assert isinstance(torch_compat.compile_fault(raised.value), KeyError)
    assert not torch_compat.is_compile_fault(KeyError("x"))


def test_under_a_mode_nothing_is_compiled_and_its_class_is_known():
    class Seeing(torch_compat.OperatorWatch):
        def run(self, func, /, *args, **kwargs):
            return func(*args, **kwargs)

    compiled = torch.compile(nn.Linear(3, 3), backend="eager", fullgraph=True)
    with Seeing():
        modes = torch_compat.dispatch_modes()
        with pytest.raises(RuntimeError) as raised:
            compiled(torch.ones(2, 3))
    assert modes[-1].endswith("Seeing")
    assert torch_compat.is_compile_fault(raised.value)
    assert torch_compat.dispatch_modes() == []


class _Upsampled(nn.Module):
    def forward(self, image):
        return (nn.functional.interpolate(image, scale_factor=2, mode="bilinear"),)


def test_operators_are_traced_as_the_dispatcher_runs_them_and_not_by_rules_for_tracing():
    from functorch.compile import default_partition

    operators = (torch.ops.aten.upsample_bilinear2d.vec, torch.ops.aten.gru.input)
    before = [dict(operator.py_kernels) for operator in operators]
    assert all(before), "torch has rules of its own for tracing these"
    seen = []

    def partition(joint: fx.GraphModule, inputs, **options):
        seen.extend(node.target for node in joint.graph.nodes if node.op == "call_function")
        return default_partition(joint, inputs, **options)

    run = torch_joint.compile_joint(
        fx.symbolic_trace(_Upsampled()),
        [torch.ones(1, 1, 4, 4, requires_grad=True)],
        partition=partition,
        compile_graph=lambda graph, _: graph,
    )
    assert callable(run)
    assert seen == [
        torch.ops.aten.upsample_bilinear2d.default,
        torch.ops.aten.upsample_bilinear2d_backward.default,
    ]
    assert [dict(operator.py_kernels) for operator in operators] == before


def test_hooks_of_a_module_and_of_all_modules_are_found():
    model = nn.Linear(2, 2)
    assert not any(torch_compat.hooks_of(model))
    assert not any(torch_compat.global_hooks())
    model.register_forward_pre_hook(print)
    model.register_forward_hook(print)
    assert [len(table) for table in torch_compat.hooks_of(model)] == [1, 1, 0, 0]
    assert not torch_compat.has_backward_hooks(model)
    model.register_full_backward_pre_hook(print)
    model.register_full_backward_hook(print)
    assert torch_compat.has_backward_hooks(model)
    home = nn.modules.module
    for number, register in enumerate(
        (
            home.register_module_forward_pre_hook,
            home.register_module_forward_hook,
            home.register_module_full_backward_pre_hook,
            home.register_module_full_backward_hook,
        )
    ):
        handle = register(print)
        assert [len(table) for table in torch_compat.global_hooks()].index(1) == number
        assert torch_compat.has_global_backward_hooks() == (number > 1)
        handle.remove()


def test_module_is_called_with_its_hooks_around_another_forward():
    model, heard = nn.Linear(2, 2), []
    model.register_forward_hook(lambda module, inputs, output: heard.append((module, output)))
    assert torch_compat.call_with_forward(model, lambda x: x + 1, 1) == 2
    assert heard == [(model, 2)]
    assert "forward" not in vars(model)
    model.forward = forward = lambda input: input
    torch_compat.call_with_forward(model, lambda x: x + 1, 1)
    assert model.forward is forward


def test_graph_is_compiled_anew_when_a_hook_comes_or_goes():
    graphs = []

    def backend(module, inputs):
        torch_joint.guard_global_hooks()
        graphs.append(module)
        return module

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x)

    torch_joint.watch_hooks()
    model, inputs = Outer(), torch.ones(1, 2)
    model.compile(backend=backend, fullgraph=True)
    for register in (
        model.inner.register_forward_hook,
        model.inner.register_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ):
        torch.compiler.reset()
        graphs.clear()
        model(inputs)
        handle = register(lambda *_: None)
        model(inputs)
        assert len(graphs) == 2
        handle.remove()
        model(inputs)
        assert len(graphs) == 2


def test_a_module_has_one_guard_of_its_hooks(monkeypatch):
    # Torch makes six, one for each table. They were the most of what is checked before a step: a
    # tenth of the time of a ResNet whose step takes three milliseconds.
    managers = []
    build = guards.CheckFunctionManager.build_guards

    def building(self, *args, **options):
        builder, manager = build(self, *args, **options)
        managers.append(manager)
        return builder, manager

    monkeypatch.setattr(guards.CheckFunctionManager, "build_guards", building)
    torch_joint.watch_hooks()
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(torch.ones(1, 2))
    lines = str(managers[-1]).splitlines()
    assert sum("has no hooks" in line for line in lines) == 3
    assert not [line for line in lines if "DICT_LENGTH" in line and "_hooks" in line]


def test_checkpoints_and_what_is_in_them_are_known():
    seen = []

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False).cos()

    def backend(module, inputs):
        calls = torch_compat.checkpoints_in(module)

        def partition(joint, *_, **__):
            changed = torch_compat.changes_of_inputs(joint.graph)
            inside = [each for each in joint.graph.nodes if torch_compat.is_checkpointed(each)]
            seen.append(([call.kwargs for call in calls], len(changed), {*changed} <= {*inside}))
            assert not any("cos" in each.name for each in inside)
            raise ValueError("seen")

        return torch_joint.compile_joint(module, inputs, partition=partition, compile_graph=None)

    with pytest.raises(Exception, match="seen"):
        torch.compile(Inner(), backend=backend, fullgraph=True)(torch.randn(4, 2))
    assert seen == [([{"use_reentrant": False}], 3, True)]


def test_gradients_are_traced_in_the_strides_that_were_told():
    seen = []

    def partition(joint: fx.GraphModule, inputs, **options):
        from functorch.compile import default_partition

        seen.extend(n.meta["val"].stride() for n in joint.graph.nodes if torch_compat.is_tangent(n))
        return default_partition(joint, inputs, **options)

    class Sine(nn.Module):
        def forward(self, x):
            return (x.sin(),)

    for tangents in ((), [((3, 4), (1, 3))]):
        torch_joint.compile_joint(
            fx.symbolic_trace(Sine()),
            [torch.ones(3, 4, requires_grad=True)],
            partition=partition,
            compile_graph=lambda graph, _: graph,
            tangents=tangents,
        )
    assert seen == [(4, 1), (1, 3)]


def test_views_are_told_from_tensors_of_their_own():
    base = torch.ones(3, requires_grad=True) * 2
    assert torch_compat.is_view(base[1:])
    assert not torch_compat.is_view(base)


def test_setting_of_autocasts_cache_is_kept_while_a_joint_graph_is_traced():
    class Product(nn.Module):
        def forward(self, x):
            settings.append(torch.is_autocast_cache_enabled())
            return (x @ x,)

    def partition(*_, **__):
        raise ValueError("traced")

    x, found = torch.ones(2, 2, requires_grad=True), []
    for is_enabled in (True, False):
        settings = []
        with (
            pytest.raises(ValueError, match="traced"),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=is_enabled),
        ):
            torch_joint.compile_joint(Product(), [x], partition=partition, compile_graph=None)
        found.append(settings[-1])  # the first time is for what it returns
    assert found == [True, False]


def test_a_change_in_place_between_gaps_is_known_in_the_joint_graph():
    from functorch.compile import default_partition

    class Changing(nn.Module):
        def forward(self, x):
            columns = (x * 2).unsafe_chunk(2, 1)[0]
            return (columns.sigmoid_(), (x * 3).sigmoid_())

    seen = []

    def partition(joint: fx.GraphModule, inputs, **options):
        seen.extend(node.meta.get(torch_joint.IN_PLACE) for node in joint.graph.nodes)
        return default_partition(joint, inputs, **options)

    torch_joint.compile_joint(
        fx.symbolic_trace(Changing()),
        [torch.ones(3, 4, requires_grad=True)],
        partition=partition,
        compile_graph=lambda graph, _: graph,
    )
    assert [found for found in seen if found] == [(torch.ops.aten.sigmoid_.default, (4, 1))]


def test_an_operator_is_traced_as_we_say():
    from functorch.compile import default_partition

    class Whole:
        original = torch.ops.aten.sin.default

        @staticmethod
        def call(x):
            return x.cos()

    class Sine(nn.Module):
        def forward(self, x):
            return (x.sin(),)

    x = torch.rand(3, requires_grad=True)
    run = torch_joint.compile_joint(
        fx.symbolic_trace(Sine()),
        [x],
        partition=default_partition,
        compile_graph=lambda graph, _: graph,
        whole=[Whole],
    )
    assert run(x)[0].equal(x.cos())
    assert torch.ops.aten.sin.default(x).equal(x.sin())


def test_a_call_without_rules_is_that_of_plain_training():
    x = torch.rand(3, 4, requires_grad=True)
    linear, sine = torch.ops.aten.linear.default, torch.ops.aten.sin.default
    assert torch_joint.call_without_rules(linear, x, x).equal(x @ x.t())
    assert torch_joint.call_without_rules(sine, x).grad_fn is not None
    assert torch_compat.arguments_in_words(torch.ops.aten.clamp.default) == (
        "Tensor self, Scalar? min=None, Scalar? max=None"
    )


def test_autograd_records_again_above_what_excludes_it():
    x = torch.rand(3, requires_grad=True)
    with torch_compat.below_autograd():
        assert x.sin().grad_fn is None
        with torch_compat.above_autograd():
            assert x.sin().grad_fn is not None
        assert x.sin().grad_fn is None


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(3, 4).t(), True),
        (torch.ones(3, 4)[:, :2], False),
        (torch.ones(3, 1).expand(3, 4), False),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(()), True),
    ],
)
def test_gaps_between_elements(tensor, expected):
    assert torch_compat.is_dense(tensor) is expected


def test_recurrent_layers_are_traced_for_our_backends_only():
    from torch._dynamo.exc import Unsupported

    from bayplan import torch_answers

    def backend(module, inputs):
        return module

    torch_answers.answer_as_eager()
    layer, x = nn.LSTM(4, 4), torch.rand(2, 3, 4)

    def call(x):
        return layer(x)[0]

    with pytest.raises(Unsupported, match="LSTM"):
        torch.compile(call, backend=backend, fullgraph=True)(x)
    backend.traces_as_eager = True
    torch.compiler.reset()
    assert torch.compile(call, backend=backend, fullgraph=True)(x).equal(call(x))


def test_what_a_forward_leaves_in_older_objects_is_told_from_what_it_returns():
    from bayplan import torch_answers

    class Keeping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.seen = None, []

        def forward(self, x):
            self.kept = x * 2
            self.seen.append(x * 3)
            return {"loss": x * 4, "new": [x * 5]}

    told = []

    def backend(module, _):
        outputs = module.graph.output_node().args[0]
        left = torch_answers.left_outside()
        factors = {str(node): node.args[1] for node in outputs}
        told.append(({factors[name] for name in left}, set(factors.values())))
        return module.forward

    torch.compile(Keeping(), backend=backend, fullgraph=True)(torch.ones(2))
    assert told == [({2, 3}, {2, 3, 4, 5})]
    assert torch_answers.left_outside() == set()
