"""What single operators cost: each distinct call is measured once, on tensors of its geometry."""

import time
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from bayplan.costing.operators import OperatorCosts, arguments_of, made_up, signature_of_call
from bayplan.devices.machine import num_threads
from bayplan.devices.meters import open_meter
from bayplan.torch_compat import FakeTensor, FakeTensorMode

aten = torch.ops.aten
MIB = 2**20


def node_of(function, *inputs: torch.Tensor) -> fx.Node:
    """The last operator of a function, traced."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"][-1]


def signature_of(node: fx.Node) -> str:
    return signature_of_call(node.target, *arguments_of(node))


@pytest.fixture
def costs(tmp_path_factory):
    with open_meter(torch.device("cpu"), tmp_path_factory.getbasetemp()) as meter:
        ticks = iter(range(10**6))
        yield OperatorCosts(meter, now=lambda: float(next(ticks)))


def relu(x: torch.Tensor) -> torch.Tensor:
    return aten.relu(x)


def test_equal_calls_have_equal_signatures():
    assert signature_of(node_of(relu, torch.ones(3))) == signature_of(node_of(relu, torch.zeros(3)))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (relu, torch.ones(4)),
        (relu, torch.ones(3, dtype=torch.float64)),
        (relu, torch.ones(6)[::2]),
        (lambda x: aten.neg(x), torch.ones(3)),
        (lambda x: aten.add(x, 1), torch.ones(3)),
    ],
)
def test_what_matters_is_in_the_signature(function, x):
    assert signature_of(node_of(function, x)) != signature_of(node_of(relu, torch.ones(3)))


def test_other_arguments_are_in_the_signature():
    one = node_of(lambda x: aten.sum(x, [0], keepdim=True), torch.ones(3, 3))
    other = node_of(lambda x: aten.sum(x, [1], keepdim=True), torch.ones(3, 3))
    assert signature_of(one) != signature_of(other)


def _ours(x: torch.Tensor) -> torch.Tensor:
    return x


def test_signature_of_our_own_function_says_nothing_of_addresses():
    graph = fx.Graph()
    node = graph.call_function(_ours, (1, _ours))
    text = signature_of(node)
    assert "0x" not in text
    assert text.count("_ours") == 2


def test_each_distinct_call_is_measured_once(costs):
    calls = []

    def operator(x: torch.Tensor) -> torch.Tensor:
        assert not isinstance(x, FakeTensor)
        calls.append(x.shape)
        return x + 1

    with FakeTensorMode():
        small, large = torch.empty(3), torch.empty(5)
    first = costs.price(operator, (small,), {})
    num_calls = len(calls)
    assert costs.price(operator, (small,), {}) == first
    assert len(calls) == num_calls
    costs.price(operator, (large,), {})
    assert calls[-1] == (5,)


def test_fastest_of_some_warm_runs_counts(costs):
    """The clock ticks once at each look, so that a run takes one tick."""
    assert costs(node_of(relu, torch.ones(3)))[0] == 1.0


def test_workspace_is_what_is_gone_when_the_operator_is_done(costs):
    def greedy(x: torch.Tensor) -> torch.Tensor:
        return (x.repeat(8).sum() + x).clone()

    with FakeTensorMode():
        x = torch.empty(MIB // 4)
    workspace_bytes = costs.price(greedy, (x,), {}).workspace_bytes
    # At its peak the result is not there yet, whose own MiB is counted as the result's.
    assert workspace_bytes == pytest.approx(7 * MIB, rel=0.05)
    assert costs.price(aten.relu.default, (x,), {})[1] < MIB / 10


def test_arguments_are_the_fakes_behind_a_nodes_sources():
    args, options = arguments_of(node_of(lambda x: aten.add(x, x, alpha=2), torch.ones(3)))
    assert isinstance(args[0], FakeTensor)
    assert args[0] is args[1]
    assert options == {"alpha": 2}


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4).t(),
        torch.randn(6)[2:4],
        torch.randn(3, 1).expand(3, 5),
        torch.ones(4, dtype=torch.int64),
        torch.ones(4, dtype=torch.bool),
        torch.empty(0, 3),
    ],
)
def test_made_up_tensor_has_the_geometry_and_valid_indices(x):
    tensor = made_up(FakeTensorMode().from_tensor(x))
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (x.shape, x.stride(), x.dtype)
    assert tensor.storage_offset() == x.storage_offset()
    if not x.is_floating_point():
        assert not tensor.any()


def test_random_numbers_go_on_as_before_while_tracing(costs):
    """torch keeps its generators while it compiles, so that measuring draws from nobody."""
    before = torch.get_rng_state()

    def backend(module, inputs):
        costs.price(torch.relu, tuple(inputs), {})
        return module

    torch.compile(lambda x: torch.relu(x), backend=backend)(torch.ones(3))
    assert costs.known
    assert torch.equal(torch.get_rng_state(), before)


def clock_of(*seconds: float):
    """A clock by which calls take so many seconds, one after the other."""
    moments = iter([moment for each in seconds for moment in (0.0, each)])
    return lambda: next(moments)


def test_spread_is_from_the_fastest_to_the_median_run(costs):
    with FakeTensorMode():
        x = torch.empty(4)
    timed = replace(costs, now=clock_of(3.0, 1.0, 1.5), known={})
    cost = timed.price(aten.relu.default, (x,), {})
    assert (cost.seconds, cost.spread_seconds) == (1.0, 0.5)


def test_time_that_a_call_waits_for_its_processor_is_spread(costs):
    def waits(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # as a neighbour would let it
        return x

    with FakeTensorMode():
        x = torch.empty(64, 64)
    with num_threads(1):
        cost = replace(costs, now=time.perf_counter, known={}).price(waits, (x,), {})
    assert cost.spread_seconds > 0.5 * cost.seconds
