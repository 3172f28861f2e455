"""Decisions of a step that is captured without memory come out as in plain training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bayplan
from bayplan import torch_answers, torch_compat
from bayplan.data.errors import CaptureError
from bayplan.tracing.fake import build_without_memory, without_memory
from bayplan.tracing.values import MOST_FLOATS, value_of


def known(make: Callable[[], torch.Tensor]) -> list | None:
    with without_memory():
        value = value_of(make())
    return None if value is None else value.tolist()


def test_numbers_from_factory_functions_and_constants_are_known():
    assert known(lambda: torch.arange(3) * 2 + 1) == [1, 3, 5]
    assert known(lambda: torch.tensor([1.5, 2.0]).floor()) == [1.0, 2.0]
    assert known(lambda: torch.full((2,), 7, dtype=torch.long)[1:]) == [7]


def test_memory_that_nobody_has_written_to_holds_zeros():
    """Targets of a batch that is only resized were whatever lay there, and no classes."""
    assert known(lambda: torch.empty(3, dtype=torch.long)) == [0, 0, 0]
    assert known(lambda: torch.arange(3).new_empty(2).fill_(4)) == [4, 4]


def test_large_floats_are_not_known():
    assert known(lambda: torch.zeros(MOST_FLOATS + 1)) is None
    assert known(lambda: torch.zeros(MOST_FLOATS)) is not None


def test_change_in_place_reaches_all_views():
    def make() -> torch.Tensor:
        whole = torch.zeros(4, dtype=torch.long)
        part = whole[1:3]
        part += 5
        whole[0] = 1
        return whole

    assert known(make) == [1, 5, 5, 0]


def test_real_tensor_that_is_written_to_stays_as_it_is():
    """A loss may hold a network of its own, whose buffers a capture changed for real."""
    calls = torch.zeros(3)
    with without_memory():
        calls[1:].add_(1)
        assert calls.sum().item() == 2
        calls.mul_(torch.ones(3))
        assert calls[2].item() == 1
    assert calls.tolist() == [0, 0, 0]


def test_what_is_written_from_unknown_values_is_unknown_in_every_view():
    def make() -> torch.Tensor:
        whole = torch.zeros(4)
        part = whole[1:3]
        whole.add_(torch.zeros(MOST_FLOATS + 1).sum())
        return part

    assert known(make) is None


def test_values_decide_sizes_and_branches():
    def make() -> torch.Tensor:
        mask = torch.tensor([True, False, True])
        assert bool(mask.any())
        assert int(mask.sum()) == 2
        assert mask.nonzero().flatten().tolist() == [0, 2]
        assert torch.equal(mask, mask.clone())
        large = torch.zeros(3, MOST_FLOATS)
        assert large[mask].shape == (2, MOST_FLOATS)
        assert large.masked_select(mask[:, None]).shape == (2 * MOST_FLOATS,)
        assert large[:, None, mask.nonzero()[:, 0]].shape == (3, 1, 2)
        return torch.bincount(torch.tensor([0, 2, 2]))

    assert known(make) == [1, 0, 2]


def test_random_decisions_leave_the_users_generator_alone():
    before = torch.get_rng_state()
    given = torch.Generator().manual_seed(3)
    given_before = given.get_state()
    first = known(lambda: torch.rand(2))
    assert first == known(lambda: torch.rand(2)), "each capture decides alike"
    assert all(0 <= number < 1 for number in first or ())
    assert known(lambda: torch.randint(5, (3,), generator=given)) is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(given.get_state(), given_before)


def test_unknown_value_is_still_refused_by_line():
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return x if x.isfinite().all() else x * 2

    with pytest.raises(CaptureError, match=r"test_values.py.*isfinite"):
        bayplan.capture(*build_without_memory(lambda: (Careful(), torch.zeros(128, 64), sum_of)))


def sum_of(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


class Masked(nn.Module):
    """Decides as models do: by a mask, by a label, by a counter, by chance, by who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("num_steps", torch.tensor(0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps.item() < 1:
            raise RuntimeError("not counted")
        if torch.rand([]) < 0.0:
            return x
        x = self.layer(x)
        if isinstance(x, torch._subclasses.FakeTensor):
            x = x.tan()
        if not mask.all():
            x = x * mask[..., None]
        return x[mask.any(-1)].sin()


@pytest.mark.parametrize("num_padded", [0, 2])
def test_captured_step_is_the_one_that_runs(num_padded):
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:, :num_padded] = False
    batch = (torch.randn(4, 6, 8), mask)
    graph = bayplan.capture(Masked(), batch, sum_of)
    forward = [node.op for node in graph.nodes]
    assert "aten.tan.default" not in forward
    assert "aten.sin.default" in forward
    assert ("aten.unsqueeze.default" in forward) == (num_padded > 0)
    bayplan.profile(Masked(), batch, sum_of, repeats=1, again=True)


def test_batch_made_without_memory_is_known():
    def build():
        ids = torch.randint(50, (2, 8))
        return Masked(), (torch.randn(2, 8, 8), torch.ones_like(ids).bool()), sum_of

    graph = bayplan.capture(*build_without_memory(build))
    assert "aten.unsqueeze.default" not in {node.op for node in graph.nodes}


def test_tensors_seem_fake_to_torch_only():
    real = torch._subclasses.FakeTensor
    with without_memory(), torch_answers.unnoticed_fakes():
        assert not isinstance(torch.zeros(1), torch._subclasses.FakeTensor)
        from torch._subclasses import FakeTensor

        assert FakeTensor is not real
    assert torch._subclasses.FakeTensor is real is torch_compat.FakeTensor


def test_installed_transformers_notices_no_fake():
    utils = pytest.importorskip("transformers.utils.import_utils")
    with without_memory():
        tensor = torch.zeros(1)
        assert not utils.is_tracing(tensor)
        assert not utils.is_fake_tensor(tensor)
    assert utils.is_fake_tensor(tensor)


# What is traced for `fit` and for `backend="bayplan"`.


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
            x = x * 3
        if not mask.all():
            x = x * mask[..., None]
        return x.sin()


def padded(num_padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:, :num_padded] = False
    return torch.randn(4, 6, 8), mask


@pytest.mark.usefixtures("own_planner_cache")
def test_planned_forward_takes_the_branches_of_plain_training():
    plain = Asking()
    planned = Asking()
    planned.load_state_dict(plain.state_dict())
    bayplan.fit(planned, padded(0), sum_of, memory="1MiB", time_limit_seconds=0.2)
    for num_padded in (0, 2, 0):  # the second is traced anew
        batch = padded(num_padded)
        expected, given = plain(*batch), planned(*batch)
        assert torch.equal(given, expected)
        plain.zero_grad()
        planned.zero_grad()
        expected.sum().backward()
        given.sum().backward()
        assert torch.equal(planned.layer.weight.grad, plain.layer.weight.grad)


@pytest.mark.usefixtures("own_planner_cache")
def test_only_our_backends_trace_as_eager():
    model, batch = Asking(), padded(0)
    expected = model(*batch)
    options: dict[str, Any] = {"memory": "1MiB"}
    assert torch.equal(torch.compile(model, backend="bayplan", options=options)(*batch), expected)
    torch.compiler.reset()
    others = torch.compile(model, backend="aot_eager")(*batch)
    assert torch.equal(others, (model.layer(batch[0]) * 3).sin())


class Overwriting(Asking):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.clone()
        mask.view(-1)[0] = False
        return self.layer(x) if mask.all() else self.layer(x) * 2


@pytest.mark.usefixtures("own_planner_cache")
def test_branch_on_what_was_changed_in_place_is_not_guessed():
    with pytest.raises(CaptureError, match="Data-dependent"):
        bayplan.fit(Overwriting(), padded(0), sum_of, memory="1MiB", fullgraph=True)


class DropsLayers(nn.Module):
    """Drops layers at random: `keeps` says which numbers keep one."""

    def __init__(self, keeps: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.keeps = keeps

    def forward(self, x):
        for layer in self.layers:
            if self.keeps(torch.rand([])):
                x = layer(x)
        return x + self.layers[0].bias


@pytest.mark.parametrize("keeps", [lambda number: number < 0.5, lambda number: number >= 0.5])
def test_the_step_that_keeps_all_layers_is_captured(keeps):
    """Layers that are dropped at random once made every figure that of one draw."""
    graph = bayplan.capture(DropsLayers(keeps), torch.ones(2, 8), lambda output: output.sum())
    assert sum(node.op == "aten.addmm.default" for node in graph.nodes) == 6


def test_random_numbers_that_decide_nothing_stay_as_they_come():
    with without_memory() as mode:
        drawn = []
        mode.go_fullest_way(lambda: drawn.append(torch.rand([]).item()))
        mode.draw_again()
        assert torch.rand([]).item() == drawn[0]
        assert 0 < drawn[0] < 0.999
