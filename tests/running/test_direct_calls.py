"""Direct calls: never another operator, and torch's own function wherever it is the same."""

import pytest
import torch
from torch import fx

from bayplan import torch_compat
from bayplan.running.direct_calls import direct_call

aten = torch.ops.aten


def node_of(function, *args, **kwargs) -> fx.Node:
    """A call in a graph; tensors among its arguments become traced values."""
    graph, mode = fx.Graph(), torch_compat.FakeTensorMode()

    def traced(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = mode.from_tensor(tensor)
        return node

    args, kwargs = torch_compat.tree_map_only(torch.Tensor, traced, (args, kwargs))
    return graph.call_function(function, args, kwargs)


def chosen(function, *args, **kwargs):
    node = node_of(function, *args, **kwargs)
    return direct_call(node.target, node.args, node.kwargs)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (aten.add.Tensor, (X, X), torch.add),
        (aten.mul.Tensor, (X, 2.0), torch.mul),
        (aten.add_.Tensor, (X, X), torch.Tensor.add_),
        (aten.view.default, (X, [3, 2]), torch.Tensor.view),
        (aten.sum.dim_IntList, (X, [0], True), torch.sum),
        (aten.gelu.default, (X,), torch.nn.functional.gelu),
        (aten.addmm.default, (X[0], X, torch.ones(3, 3)), torch.addmm),
    ],
)
def test_torchs_own_function_where_it_is_the_same_operator(function, args, expected):
    assert chosen(function, *args) is expected


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.add.Scalar, (X, 2.0)),  # `torch.add` makes a tensor of the number
        (aten.pow.Scalar, (2.0, X)),
        (aten.threshold_backward.default, (X, X, 0)),
        (aten.where.ScalarOther, (X > 0, X, 1.0)),
        (aten.detach.default, (X,)),
        (aten.div.Tensor_mode, (X, X)),
        (aten.select.int, (X, 0, 1)),
    ],
)
def test_what_is_called_gives_the_dispatcher_the_same_operator(function, args):
    kwargs = {"rounding_mode": "floor"} if function is aten.div.Tensor_mode else {}

    class Seen(torch_compat.OperatorWatch):
        def run(self, func, /, *args, **kwargs):
            calls.append((func, len(args), kwargs))
            return func(*args, **kwargs)

    calls: list = []
    with torch.no_grad(), Seen():
        function(*args, **kwargs)
        wanted, calls = calls, []
        chosen_call = chosen(function, *args, **kwargs)
        calls = []
        chosen_call(*args, **kwargs)
    assert calls == wanted


def test_kinds_of_arguments_are_tried_apart():
    assert chosen(aten.sum.dim_IntList, X, [0]) is torch.sum
    assert chosen(aten.sum.default, X) is torch.sum
    exponent = torch.tensor(2.0)
    call = chosen(aten.pow.Tensor_Scalar, X, 2)
    assert torch.equal(call(X * 3, 2), torch.full((2, 3), 9.0))
    call = chosen(aten.pow.Tensor_Tensor, X, exponent)
    assert torch.equal(call(X * 3, exponent), torch.full((2, 3), 9.0))


def test_functions_and_untraced_arguments_stay_as_they_are():
    def ours(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert chosen(ours, X) is ours
    graph = fx.Graph()
    node = graph.call_function(aten.add.Tensor, (graph.placeholder("x"), 1))
    call = direct_call(node.target, node.args, node.kwargs)
    assert torch.equal(call(X, 1), X + 1)
    # Nothing tells where to try a call without tensors, and a default device would change it.
    node = graph.call_function(aten.full.default, ([2], 1.0), {"device": torch.device("cpu")})
    assert direct_call(node.target, node.args, node.kwargs) is not torch.full
