"""Gradients of one rank, with a group of one in place of several ranks."""

import pytest
import torch
from torch import distributed, nn

from bayplan.running.exchange.sums import SocketSums
from bayplan.running.ranks.gradients import GradientBucket, Gradients


@pytest.fixture(scope="module")
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.fixture
def parameters():
    return {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}


def test_pieces_are_added_up(parameters):
    gradients = Gradients(parameters, {})
    gradients.clear()
    gradients.add(["a", "b"], [torch.ones(2, 3), torch.ones(4)])
    gradients.add(["a"], [torch.full((2, 3), 2.0)])
    gradients.wait()
    assert parameters["a"].grad.tolist() == [[3.0] * 3] * 2
    assert parameters["b"].grad.tolist() == [1.0] * 4


def test_a_step_begins_without_gradients(parameters):
    gradients = Gradients(parameters, {})
    for number in (1.0, 5.0):
        gradients.clear()
        assert all(parameter.grad is None for parameter in parameters.values())
        gradients.add(["b"], [torch.full((4,), number)])
        gradients.wait()
        assert parameters["b"].grad.tolist() == [number] * 4
        assert parameters["a"].grad is None


def test_a_bucket_s_gradients_are_one_tensor_and_are_never_copied_out(parameters, group):
    gradients = Gradients(parameters, {0: GradientBucket(("b", "a"), SocketSums(group))})
    for number in (1.0, 5.0):
        gradients.clear()
        gradients.add(["a", "b"], [torch.full((2, 3), number), torch.full((4,), number)])
        gradients.add(["a"], [torch.ones(2, 3)])
        gradients.reduce(0)
        gradients.wait()
        assert parameters["a"].grad.tolist() == [[number + 1] * 3] * 2
        assert parameters["b"].grad.tolist() == [number] * 4
    storages = {one.grad.untyped_storage().data_ptr() for one in parameters.values()}
    assert len(storages) == 1


def test_a_rank_without_samples_of_a_bucket_takes_part_with_zeros(parameters, group):
    gradients = Gradients(parameters, {0: GradientBucket(("a", "b"), SocketSums(group))})
    gradients.clear()
    gradients.add(["a", "b"], [torch.ones(2, 3), torch.ones(4)])
    gradients.clear()
    gradients.add(["b"], [torch.ones(4)])
    gradients.reduce(0)
    gradients.wait()
    assert not parameters["a"].grad.any()
    assert parameters["b"].grad.tolist() == [1.0] * 4


def test_a_later_piece_does_not_change_the_gradient_that_was_given(parameters):
    gradients, first = Gradients(parameters, {}), torch.ones(4)
    gradients.clear()
    gradients.add(["b"], [first])
    gradients.wait()
    assert parameters["b"].grad is first  # taken over, for whoever made it has no use for it
