"""The copy without memory: of whatever kind the originals are, sharing what they share."""

import logging
import threading
from collections import namedtuple

import pytest
import torch
from torch import nn

import bayplan
from bayplan.data.errors import BayplanError, CaptureError, UsageError
from bayplan.data.graph import Phase, StepGraph, StorageKind
from bayplan.step import TrainingStep
from bayplan.torch_compat import FakeTensor, FakeTensorMode, storage_key
from bayplan.tracing.fake import build_without_memory, fake_step, without_memory


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def build() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    return model, torch.randn(2, 3, 4, 4)


def capture_built() -> StepGraph:
    return bayplan.capture(*build(), total, optimizer=torch.optim.AdamW)


# Models that are not real.


def test_model_on_the_meta_device():
    with torch.device("meta"):
        model, batch = build()
    graph = bayplan.capture(model, batch, total, optimizer=torch.optim.AdamW)
    assert graph == capture_built()


def test_meta_model_with_a_real_batch():
    with torch.device("meta"):
        model, _ = build()
    _, batch = build()
    graph = bayplan.capture(model, batch, total, optimizer=torch.optim.AdamW)
    assert graph == capture_built()


def test_model_built_under_a_fake_mode():
    with FakeTensorMode():
        model, batch = build()
    graph = bayplan.capture(model, batch, total, optimizer=torch.optim.AdamW)
    assert graph == capture_built()


def test_fake_model_with_its_optimizer_and_plain_tensors():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.mask = torch.ones(4)

        def forward(self, x):
            return super().forward(x) * self.mask

    def captured() -> StepGraph:
        model = Masked()
        return bayplan.capture(
            model, torch.ones(2, 4), total, optimizer=torch.optim.AdamW(model.parameters())
        )

    with FakeTensorMode():
        graph = captured()
    assert graph == captured()


# What is shared stays shared.


def fakes_of(model: nn.Module, batch: object = None) -> TrainingStep:
    with without_memory():
        return fake_step(TrainingStep(model=model, batch=batch), None)


def key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def test_every_tensor_becomes_fake():
    model, batch = build()
    model.plain = torch.ones(3)
    fake = fakes_of(model, batch)
    tensors = [*fake.model.parameters(), *fake.model.buffers(), fake.model.plain, fake.batch]
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
    assert all(isinstance(parameter, nn.Parameter) for parameter in fake.model.parameters())


def test_geometry_and_flags_are_kept():
    model = nn.Linear(4, 6)
    model.weight.requires_grad_(False)
    batch = torch.randn(5, 8, dtype=torch.float64)[1:, ::2].t()
    fake = fakes_of(model, batch)
    assert not fake.model.weight.requires_grad
    assert fake.model.bias.requires_grad
    assert (fake.batch.shape, fake.batch.stride()) == (batch.shape, batch.stride())
    assert (fake.batch.storage_offset(), fake.batch.dtype) == (8, torch.float64)
    assert fake.batch.untyped_storage().nbytes() == batch.untyped_storage().nbytes()


def test_tied_parameter_stays_one_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fake = fakes_of(model)
    assert fake.model[1].weight is fake.model[0].weight
    assert key(fake.model[0].weight) != key(fake.model[0].bias)


def test_two_parameters_on_one_flat_buffer_share_its_storage():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("flat", torch.randn(24))
            self.weight = nn.Parameter(self.flat[:20].view(5, 4))
            self.bias = nn.Parameter(self.flat[20:])
            self.window = self.flat[3:7]

        def forward(self, x):
            return nn.functional.linear(x, self.weight).sum(1, keepdim=True) + self.bias

    fake = fakes_of(Flat()).model
    assert len({key(t) for t in (fake.flat, fake.weight, fake.bias, fake.window)}) == 1
    assert (fake.bias.storage_offset(), fake.window.storage_offset()) == (20, 3)
    graph = bayplan.capture(Flat(), torch.randn(3, 4), total)
    parameters = [s for s in graph.storages if s.kind is StorageKind.PARAMETER]
    assert [s.size_bytes for s in parameters] == [4 * 24]


def test_views_of_one_input_are_one_input():
    class Sum(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) + y

    whole = torch.randn(3, 8)
    graph = bayplan.capture(Sum(4, 4), (whole[:, :4], whole[:, 4:]), total)
    inputs = [s for s in graph.storages if s.kind is StorageKind.INPUT]
    assert [s.size_bytes for s in inputs] == [whole.nbytes]


def test_one_storage_seen_as_two_dtypes():
    bits = torch.randn(4)
    fake = fakes_of(nn.Linear(2, 2), (bits, bits.view(torch.int32))).batch
    assert key(fake[0]) == key(fake[1])
    assert [tensor.dtype for tensor in fake] == [torch.float32, torch.int32]


def test_batch_keeps_its_form():
    Pair = namedtuple("Pair", "left right")
    x = torch.ones(2)
    fake = fakes_of(nn.Linear(2, 2), {"pair": Pair(x, [x, 3]), "flag": True}).batch
    assert type(fake["pair"]) is Pair
    assert fake["pair"].right[0] is fake["pair"].left
    assert fake["pair"].right[1] == 3
    assert fake["flag"] is True


def test_non_leaf_tensor_that_a_model_remembers():
    class Remembering(nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model, x = Remembering(4, 4), torch.ones(2, 4)
    fresh = bayplan.capture(model, x, total)
    model(x)
    assert bayplan.capture(model, x, total) == fresh


# What cannot be copied.


@pytest.mark.parametrize("make", [threading.Lock, lambda: (n for n in ())])
def test_attribute_that_cannot_be_copied(make):
    model = nn.Linear(2, 2)
    model.extra = make()
    with pytest.raises(CaptureError, match=r"the model cannot be copied for capture: .*keep open"):
        bayplan.capture(model, torch.ones(2, 2), total)


def test_loss_that_cannot_be_copied():
    loss_fn = nn.MSELoss()
    loss_fn.lock = threading.Lock()
    batch = torch.ones(2, 2), torch.ones(2, 2)
    with pytest.raises(CaptureError, match="the loss cannot be copied"):
        bayplan.capture(nn.Linear(2, 2), batch, loss_fn)


def test_lazy_parameters_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(CaptureError, match=r"lazy parameters with no shape yet \(1.weight\)"):
        bayplan.capture(model, torch.ones(2, 2), total)
    model(torch.ones(2, 2))
    assert bayplan.capture(model, torch.ones(2, 2), total).num_parameters == 12


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripted_modules_are_refused_by_name():
    x = torch.ones(2, 2)
    model = nn.Sequential(nn.ReLU(), torch.jit.trace(nn.Linear(2, 2), x))
    with pytest.raises(CaptureError, match=r"1 is scripted .*capture the module it was made from"):
        bayplan.capture(model, x, total)


# Optimizers.


def make_two() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize("is_built", [True, False], ids=["optimizer", "function"])
def test_optimizer_of_another_model_is_refused_with_both_counts(is_built):
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer = other if is_built else lambda parameters: other
    expected = "holds 2 parameters, none of them among the 3 of the model"
    with pytest.raises(UsageError, match=expected):
        bayplan.capture(make_two(), torch.ones(2, 2), total, optimizer=optimizer)


def test_optimizer_may_leave_parameters_out_and_hold_others():
    model, other = make_two(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model[1].weight, *other.parameters()], lr=0.1)
    graph = bayplan.capture(model, torch.ones(2, 2), total, optimizer=optimizer)
    updated = {node.module for node in graph.nodes if node.op == "aten.add_.Tensor"}
    assert updated == {"1.weight"}


def test_optimizer_may_train_the_loss_alone():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output):
            return (output * self.scale).sum()

    loss_fn = Scaled()
    optimizer = torch.optim.SGD(loss_fn.parameters(), lr=0.1)
    model = make_two().requires_grad_(False)
    graph = bayplan.capture(model, torch.ones(2, 2), loss_fn, optimizer=optimizer)
    assert any(node.phase is Phase.UPDATE for node in graph.nodes)


def test_memory_beyond_the_elements_is_there_when_a_result_is_remembered():
    # torch remembers results of fake kernels without it: Longformer's pieces, which write into
    # parts of chunks, were other programs when they were traced again, and refused.
    sizes = []
    for _ in range(2):
        with without_memory():
            part = torch.empty(3, 8)[:, 3:]
            written = torch.slice_scatter(part, torch.empty(3, 1), 1, 0, 1)
            sizes.append(written.untyped_storage().nbytes())
    assert sizes[0] == sizes[1] == torch.empty(3, 8).nbytes


# Building without memory.


def test_builder_makes_fake_tensors():
    model, batch = build_without_memory(build)
    assert all(isinstance(tensor, FakeTensor) for tensor in [*model.parameters(), batch])


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.to("cpu"),
        lambda model: model.half(),
        lambda model: model.to(torch.bfloat16).to(memory_format=torch.channels_last),
    ],
)
def test_builder_that_converts_its_model_makes_fake_tensors(convert):
    """torch refused to convert modules of fake tensors, so the whole model was built for real."""

    def build_converted() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
        model[2].weight = model[0].weight
        return convert(model)

    model, plain = build_without_memory(build_converted), build_converted()
    assert all(isinstance(tensor, FakeTensor) for tensor in model.parameters())
    assert model[2].weight is model[0].weight
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


def test_builder_that_reads_values_builds_for_real():
    def build_by_value() -> nn.Module:
        rates = torch.linspace(0, 1, 5000)[[0, 1, 2]].tolist()  # too many to be known
        return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(2, 2))

    model = build_without_memory(build_by_value)
    assert [type(parameter) for parameter in model.parameters()] == [nn.Parameter] * 2
    assert not isinstance(model[3].weight, FakeTensor)


def test_builder_that_fails_is_explained():
    def build_wrongly() -> nn.Module:
        return nn.Linear(2, "two")

    with pytest.raises(CaptureError, match=r"test_fake.py:\d+ \(`return nn.Linear\(2, \"two\"\)`"):
        build_without_memory(build_wrongly)


def test_error_of_ours_in_a_builder_is_not_tried_twice():
    calls = []

    def build_badly() -> None:
        calls.append(1)
        raise UsageError("no such model")

    with pytest.raises(UsageError, match="no such model"):
        build_without_memory(build_badly)
    assert len(calls) == 1


def test_torch_does_not_log_what_we_explain(caplog, capfd):
    with pytest.raises(BayplanError), caplog.at_level(logging.DEBUG):
        bayplan.capture(nn.Linear(4, 4), torch.ones(2, 5), total)
    assert not caplog.records
    assert capfd.readouterr().err == ""
    assert not logging.getLogger(FakeTensorMode.__module__).disabled
