"""A captured step is the real one, node for node, though nothing ran and nothing was allocated."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import bayplan
from bayplan.data.graph import Phase, StepGraph, StorageKind


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def ops(graph: StepGraph, phase: Phase | None = None) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes if phase in (None, node.phase)]


class SmallCnn(nn.Module):
    """BatchNorm updates buffers, ReLU works in place, and a residual is added in place."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        x = self.relu(self.norm1(self.conv1(images)))
        y = self.norm2(self.conv2(x))
        y += x
        return self.head(self.relu(y).mean((2, 3)))


def images_and_classes() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8), torch.randint(4, (2,))


class TiedTransformer(nn.Module):
    """One layer between an embedding and a head that share their weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)))


def tokens_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (2, 5)), torch.randint(11, (2, 5))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# What a forward may do.


def test_batch_norm_in_place_relu_and_residual(same_as_real):
    graph = same_as_real(
        SmallCnn(), images_and_classes(), nn.CrossEntropyLoss(), optimizer=torch.optim.SGD
    )
    assert "relu_" in ops(graph, Phase.FORWARD)
    assert "native_batch_norm_backward" in ops(graph, Phase.BACKWARD)


def test_dropout(same_as_real):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    graph = same_as_real(model, torch.randn(3, 4), total)
    assert [node.op.split(".")[1] for node in graph.nodes if node.is_random] == ["bernoulli_"]


def test_transformer_with_tied_weights(same_as_real):
    same_as_real(TiedTransformer(), tokens_and_targets(), token_loss, optimizer=torch.optim.AdamW)


def test_views_slices_and_expansions(same_as_real):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            columns = x[:, 1:3].expand(4, -1, -1).transpose(1, 2).reshape(-1, 3)
            diagonal = self.weight.view(-1).as_strided((3,), (5,))
            return columns * diagonal + self.weight[2:5].t().sum() + self.weight[None].mean()

    same_as_real(Views(), torch.randn(3, 4), total)


def test_several_outputs_some_unused(same_as_real):
    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.ignored = nn.Linear(4, 5), nn.Linear(4, 3)
            self.never_called = nn.Linear(7, 7)

        def forward(self, x):
            y = self.used(x)
            return {"logits": y, "scores": torch.sigmoid(y), "extra": self.ignored(x)}

    graph = same_as_real(
        Outputs(),
        torch.randn(3, 4),
        lambda output: output["logits"].sum() + output["scores"].mean(),
        optimizer=torch.optim.Adam,
    )
    state_of = {s.name for s in graph.storages if s.kind is StorageKind.OPTIMIZER_STATE}
    assert state_of == {"used.weight", "used.bias"}


def test_in_place_operators_on_views(same_as_real):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x):
            y = self.linear(x)
            z = y * 2
            z[:, 1:3].mul_(3)
            z[0] = 1.0
            z[:, 4:].add_(y[:, :2])
            z.view(-1)[::2].zero_()
            return z

    same_as_real(InPlace(), torch.randn(3, 4), total, optimizer=torch.optim.Adam)


def test_custom_autograd_function(same_as_real):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)

        def forward(self, x):
            return self.second(Square.apply(self.first(x)))

    same_as_real(Custom(), torch.randn(3, 4), total)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_part_runs_again_in_backward(same_as_real, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5))
            self.head = nn.Linear(5, 5)

        def forward(self, x):
            return self.head(checkpoint(self.part, x, use_reentrant=use_reentrant))

    graph = same_as_real(Checkpointed(), torch.randn(3, 4, requires_grad=True), total)
    assert ops(graph, Phase.FORWARD).count("tanh") == 1
    assert ops(graph, Phase.BACKWARD).count("tanh") == 1


def test_module_used_twice_under_two_names(same_as_real):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            linear = nn.Linear(4, 4)
            self.first = nn.Sequential(linear, nn.ReLU(), linear)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    graph = same_as_real(Shared(), torch.randn(3, 4), total, optimizer=torch.optim.Adam)
    assert graph.num_parameters == 4 * 4 + 4


def test_recurrent_layers_and_attention(same_as_real):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x, _ = self.gru(x)
            return self.attention(x, x, x)[0]

    same_as_real(Recurrent(), torch.randn(2, 4, 8), total)


def test_random_numbers_and_constants_made_in_forward(same_as_real):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            scale = torch.tensor([0.5, 1.0, 2.0, 4.0])
            return self.linear(x + torch.randn_like(x)) * scale * torch.rand(1)

    graph = same_as_real(Noisy(), torch.randn(3, 4), total)
    assert sum(node.is_random for node in graph.nodes) == 2


# Precision, parameters, buffers.


@pytest.mark.parametrize("model", [SmallCnn, TiedTransformer])
def test_autocast_mixes_dtypes(same_as_real, model):
    is_cnn = model is SmallCnn
    graph = same_as_real(
        model(),
        images_and_classes() if is_cnn else tokens_and_targets(),
        nn.CrossEntropyLoss() if is_cnn else token_loss,
        optimizer=torch.optim.AdamW,
        autocast=torch.bfloat16,
    )
    assert {"float32", "bfloat16"} <= {value.dtype for value in graph.values}


def test_model_in_half_precision(same_as_real):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)).bfloat16()
    same_as_real(model, torch.randn(3, 4).bfloat16(), total, optimizer=torch.optim.Adam)


def test_frozen_parameters_have_no_gradient(same_as_real):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    graph = same_as_real(model, torch.randn(3, 4), total, optimizer=torch.optim.Adam)
    gradients = [s.size_bytes for s in graph.storages if s.kind is StorageKind.GRADIENT]
    assert sorted(gradients) == [4 * 2, 4 * 8, 4 * 8 * 2]


def test_tensors_held_as_plain_attributes(same_as_real):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 5)
            self.mask = torch.ones(5)
            self.parts = {"scale": [torch.rand(5)]}

        def forward(self, x):
            return self.linear(x) * self.mask * self.parts["scale"][0]

    graph = same_as_real(Plain(), torch.randn(3, 4), total)
    buffers = [s for s in graph.storages if s.kind is StorageKind.BUFFER]
    assert [s.size_bytes for s in buffers] == [20, 20]


# Batches and losses.


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x, y, *, scale=None):
        output = self.left(x) * self.right(y)
        return output if scale is None else output * scale


X, Y, SCALE, TARGET = (torch.randn(*shape) for shape in [(3, 4), (3, 4), (3, 1), (3, 5)])


@pytest.mark.parametrize(
    ("batch", "loss_fn"),
    [
        ({"x": X, "y": Y, "scale": SCALE}, total),
        (({"x": X, "y": Y, "scale": SCALE}, TARGET), functional.mse_loss),
        ((X, Y), total),
        ([X, Y], total),
        (((X, Y), TARGET), functional.mse_loss),
    ],
    ids=["dict", "dict and target", "tuple", "list", "tuple and target"],
)
def test_batches_of_every_form(same_as_real, batch, loss_fn):
    graph = same_as_real(TwoInputs(), batch, loss_fn)
    num_tensors = 2 + ("scale" in str(batch)) + (loss_fn is not total)
    assert sum(s.kind is StorageKind.INPUT for s in graph.storages) == num_tensors


def test_loss_with_tensors_of_its_own(same_as_real):
    batch = (torch.randn(3, 4), torch.randint(5, (3,)))
    loss_fn = nn.CrossEntropyLoss(weight=torch.rand(5))
    graph = same_as_real(nn.Linear(4, 5), batch, loss_fn)
    assert [s.name for s in graph.storages if s.kind is StorageKind.BUFFER] == ["loss.weight"]


def test_loss_with_a_tensor_from_outside(same_as_real):
    weight = torch.rand(5)
    batch = (torch.randn(3, 4), torch.randint(5, (3,)))
    same_as_real(
        nn.Linear(4, 5), batch, lambda y, target: functional.cross_entropy(y, target, weight)
    )


def test_model_that_returns_its_loss(same_as_real):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            y = self.linear(x)
            return {"loss": y.square().mean(), "logits": y}

    same_as_real(WithLoss(), torch.randn(3, 4))


# Optimizers.


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "num_states"),
    [
        (torch.optim.SGD, 0),
        (make_sgd, 1),
        (torch.optim.Adam, 3),
        (torch.optim.AdamW, 3),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=True), 3),
        (lambda parameters: torch.optim.Adam(parameters, fused=True), 3),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), 4),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "foreach", "fused", "amsgrad"],
)
@pytest.mark.parametrize("as_instance", [False, True], ids=["function", "instance"])
def test_optimizers(same_as_real, make, num_states, as_instance):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    optimizer = make(model.parameters()) if as_instance else make
    graph = same_as_real(model, torch.randn(3, 4), total, optimizer=optimizer)
    states = [s for s in graph.storages if s.kind is StorageKind.OPTIMIZER_STATE]
    assert len(states) == 4 * num_states
    assert {node.phase for node in graph.nodes} == set(Phase)


def test_without_optimizer_there_is_no_update(same_as_real):
    graph = same_as_real(nn.Linear(4, 2), torch.randn(3, 4), total)
    assert not ops(graph, Phase.UPDATE)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_optimizer_that_has_stepped_is_captured_as_a_fresh_one(make):
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())
    inputs = torch.randn(2, 4)

    def captured() -> str:
        graph = bayplan.capture(model, inputs, lambda output: output.sum(), optimizer=optimizer)
        return graph.fingerprint

    fresh = captured()
    model(inputs).sum().backward()
    optimizer.step()
    assert captured() == fresh
    assert optimizer.state[model.weight]["step"].item() == 1


def test_formulas_of_autograd_are_counted_with_their_edges():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    graph = bayplan.capture(model, torch.ones(2, 4), lambda y: y.sum())
    # sum <- tanh <- addmm <- bias, and weight through its transpose; the batch needs no gradient.
    assert (graph.num_formulas, graph.num_edges) == (6, 6)


def test_what_runs_without_gradients_is_not_recorded():
    class Settled(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                for _ in range(5):
                    x = super().forward(x).tanh()
            return super().forward(x)

    def recorded(model: nn.Module) -> int:
        return bayplan.capture(model, torch.ones(2, 4), lambda y: y.sum()).num_recorded

    assert recorded(Settled(4, 4)) == recorded(nn.Linear(4, 4)) > 0
