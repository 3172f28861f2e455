"""Every node knows its module and the user's line, backward ones those of their forward."""

from pathlib import Path

import pytest
import torch
from torch import nn

import bayplan
from bayplan.data.graph import Phase, StepGraph
from bayplan.data.source import short_path
from bayplan.models import resnet

THIS_FILE = short_path(__file__)


def line_of(text: str) -> str:
    """The place of the one line here that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return f"{THIS_FILE}:{found}"


def places(graph: StepGraph, op: str, phase: Phase) -> list[tuple[str, str]]:
    return [
        (node.module, node.source)
        for node in graph.nodes
        if node.op.split(".")[1] == op and node.phase is phase
    ]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, x):
        scores = self.query(x) @ x.t()  # scores
        return torch.tanh(scores) @ x  # mix


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.feed_forward = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 4))

    def forward(self, x):
        x = x + self.attention(x)
        return x.exp() * self.feed_forward(x)  # feed


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output):
    return output.square().sum()  # loss


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return bayplan.capture(Model(), torch.randn(4, 4), loss_of, optimizer=torch.optim.Adam)


def test_forward_node_knows_its_module_and_line(graph):
    assert places(graph, "tanh", Phase.FORWARD) == [
        ("blocks.0.attention", line_of("mix")),
        ("blocks.1.attention", line_of("mix")),
    ]


def test_backward_node_has_the_place_of_its_forward(graph):
    assert places(graph, "tanh_backward", Phase.BACKWARD) == [
        ("blocks.1.attention", line_of("mix")),
        ("blocks.0.attention", line_of("mix")),
    ]


def test_operator_inside_a_torch_module_has_the_line_that_calls_it(graph):
    assert places(graph, "sigmoid", Phase.FORWARD)[0] == (
        "blocks.0.feed_forward.1",
        line_of("feed"),
    )
    assert places(graph, "sigmoid_backward", Phase.BACKWARD)[1] == (
        "blocks.0.feed_forward.1",
        line_of("feed"),
    )


def test_loss_belongs_to_no_module(graph):
    assert places(graph, "pow", Phase.FORWARD) == [("", line_of("loss"))]
    assert places(graph, "pow", Phase.BACKWARD) == [("", line_of("loss"))]


def test_update_nodes_are_named_by_their_parameter(graph):
    modules = [module for module, _ in places(graph, "addcdiv_", Phase.UPDATE)]
    assert modules == [name for name, _ in Model().named_parameters()]


def test_all_places_are_the_users_or_none(graph):
    sources = {node.source.rsplit(":")[0] for node in graph.nodes}
    assert sources == {THIS_FILE, ""}
    assert all(node.source for node in graph.nodes if node.phase is Phase.FORWARD)


def test_only_the_first_and_the_handing_over_of_gradients_have_no_place(graph):
    unlocated = {
        node.op.split(".")[1]
        for node in graph.nodes
        if node.phase is Phase.BACKWARD and not node.source
    }
    assert unlocated == {"ones_like", "detach"}


def test_in_place_operator_on_a_view_in_backward_too():
    class InPlace(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y[:, 1:3].mul_(3)  # in place
            z = y.exp()
            return z

    graph = bayplan.capture(InPlace(4, 4), torch.randn(3, 4), loss_of)
    scaled = [
        node.source
        for node in graph.nodes
        if node.phase is Phase.BACKWARD and node.op == "aten.mul.Tensor" and ", 3" in node.arguments
    ]
    assert scaled == [line_of("in place")]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.ceil()  # own forward

    @staticmethod
    def backward(ctx, gradient):
        return gradient.floor()


def test_custom_function_has_the_place_of_its_forward():
    class Custom(nn.Linear):
        def forward(self, x):
            return Doubling.apply(super().forward(x))

    graph = bayplan.capture(nn.Sequential(Custom(4, 4)), torch.randn(3, 4), loss_of)
    assert places(graph, "ceil", Phase.FORWARD) == [("0", line_of("own forward"))]
    assert places(graph, "floor", Phase.BACKWARD) == [("0", line_of("own forward"))]


def test_module_under_two_names_goes_by_the_first():
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    graph = bayplan.capture(model, torch.randn(3, 4), loss_of)
    assert [module for module, _ in places(graph, "addmm", Phase.FORWARD)] == ["0", "0"]


def test_model_of_torch_modules_alone_has_no_lines_but_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    graph = bayplan.capture(model, torch.randn(3, 4), loss_of)
    assert places(graph, "tanh", Phase.FORWARD) == [("1", "")]
    assert places(graph, "tanh_backward", Phase.BACKWARD) == [("1", "")]


def test_reference_models_are_user_code():
    model, batch, loss_fn = resnet.build_resnet(2, depth=18, image_size=32)
    graph = bayplan.capture(model, batch, loss_fn)
    (node, *_) = (n for n in graph.nodes if n.op == "aten.convolution.default")
    assert node.source.split(":")[0].endswith("models/resnet.py")
    assert node.module == "conv1"


# Libraries.

LIBRARY = """\
def rounded(x):
    return x.ceil()


def call(function, *arguments):
    return function(*arguments)
"""


def test_line_of_a_library_gives_way_to_the_users_that_calls_it(install):
    library = install(LIBRARY)

    class Calls(nn.Linear):
        def forward(self, x):
            return library.rounded(super().forward(x))  # calls the library

    graph = bayplan.capture(Calls(4, 4), torch.randn(3, 4), loss_of)
    assert places(graph, "ceil", Phase.FORWARD) == [("", line_of("calls the library"))]


def test_step_that_a_library_starts_has_no_line_of_it(install):
    """So does a command line's parser; with no line of the user on the stack, none is named."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    batch = torch.randn(3, 4), torch.randn(3, 4)
    graph = install(LIBRARY).call(bayplan.capture, model, batch, nn.MSELoss())
    assert {node.source for node in graph.nodes} == {""}
    assert {"0", "1"} <= {node.module for node in graph.nodes}
