"""Gradients of one rank, with a group of one in place of several ranks."""

import pytest
import torch
from torch import distributed, nn

from bayplan.running.collectives.bucket_sums import GradientBucket
from bayplan.running.collectives.sums import SocketSums
from bayplan.running.ranks.gradients import Gradients


@pytest.fixture(scope="module")
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.fixture
def parameters():
    return {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}


def begin(gradients, reduces=(), **num_pieces):
    gradients.begin_step(num_pieces, reduces)


def test_pieces_are_added_up(parameters):
    gradients = Gradients(parameters, {})
    begin(gradients, a=2, b=1)
    gradients.take("a", torch.ones(2, 3))
    gradients.take("b", torch.ones(4))
    gradients.take("a", torch.full((2, 3), 2.0))
    gradients.wait()
    assert parameters["a"].grad.tolist() == [[3.0] * 3] * 2
    assert parameters["b"].grad.tolist() == [1.0] * 4


def test_a_step_begins_without_gradients(parameters):
    gradients = Gradients(parameters, {})
    for number in (1.0, 5.0):
        begin(gradients, b=1)
        assert all(parameter.grad is None for parameter in parameters.values())
        gradients.taker(["a", "b"])(1, torch.full((4,), number))
        gradients.wait()
        assert parameters["b"].grad.tolist() == [number] * 4
        assert parameters["a"].grad is None


def test_a_bucket_s_gradients_are_one_tensor_and_are_never_copied_out(parameters, group):
    gradients = Gradients(parameters, {0: GradientBucket(("b", "a"), SocketSums(group))})
    for number in (1.0, 5.0):
        begin(gradients, [0], a=2, b=1)
        gradients.take("a", torch.full((2, 3), number))
        gradients.take("b", torch.full((4,), number))
        gradients.take("a", torch.ones(2, 3))
        gradients.reduce(0)
        gradients.wait()
        assert parameters["a"].grad.tolist() == [[number + 1] * 3] * 2
        assert parameters["b"].grad.tolist() == [number] * 4
    storages = {one.grad.untyped_storage().data_ptr() for one in parameters.values()}
    assert len(storages) == 1


def test_a_rank_without_samples_of_a_bucket_takes_part_with_zeros(parameters, group):
    gradients = Gradients(parameters, {0: GradientBucket(("a", "b"), SocketSums(group))})
    begin(gradients, [0], a=1, b=1)
    gradients.take("a", torch.ones(2, 3))
    gradients.take("b", torch.ones(4))
    gradients.wait()
    begin(gradients, [0], b=1)
    gradients.take("b", torch.ones(4))
    gradients.wait()
    assert not parameters["a"].grad.any()
    assert parameters["b"].grad.tolist() == [1.0] * 4


class Heard(SocketSums):
    """Notes which sums begin."""

    def __init__(self, group, name, begun):
        super().__init__(group)
        self.name, self.begun = name, begun

    def begin(self, numbers, hear=None, *, factor=1.0):
        self.begun.append(self.name)
        return super().begin(numbers, hear, factor=factor)


@pytest.fixture
def begun():
    return []


@pytest.fixture
def two_buckets(parameters, group, begun):
    buckets = {
        number: GradientBucket((name,), Heard(group, name, begun))
        for number, name in enumerate("ab")
    }
    return Gradients(parameters, buckets)


def test_a_sum_begins_with_the_last_gradient_of_its_bucket(two_buckets, begun):
    begin(two_buckets, [1, 0], a=2, b=1)
    two_buckets.take("a", torch.ones(2, 3))
    assert begun == []
    two_buckets.take("b", torch.ones(4))
    assert begun == ["b"]
    two_buckets.take("a", torch.ones(2, 3))
    assert begun == ["b", "a"]
    two_buckets.reduce(1)
    two_buckets.reduce(0)
    assert begun == ["b", "a"]  # once


def test_sums_begin_in_the_order_of_all_ranks(two_buckets, begun):
    begin(two_buckets, [1, 0], a=1, b=1)
    two_buckets.take("a", torch.ones(2, 3))
    assert begun == []
    two_buckets.take("b", torch.ones(4))
    assert begun == ["b", "a"]


def test_a_bucket_that_nothing_is_added_to_begins_when_its_turn_comes(two_buckets, begun):
    begin(two_buckets, [1, 0], a=1)
    two_buckets.reduce(1)
    assert begun == ["b"]
    two_buckets.take("a", torch.ones(2, 3))
    assert begun == ["b", "a"]


def test_the_first_gradient_is_taken_over(parameters):
    gradients, first = Gradients(parameters, {}), torch.ones(4)
    begin(gradients, b=1)
    gradients.take("b", first)
    gradients.wait()
    assert parameters["b"].grad is first  # whoever made it has no use for it
    assert gradients.keeps(first.view(2, 2))


def test_a_gradient_of_two_parameters_is_two_tensors(group):
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in "ab"}
    gradients = Gradients(parameters, {})
    begin(gradients, a=2, b=2)
    for both in (torch.ones(4), torch.full((4,), 2.0)):  # pieces
        gradients.take("a", both)
        gradients.take("b", both)
    gradients.wait()
    assert [one.grad.tolist() for one in parameters.values()] == [[3.0] * 4] * 2


def test_a_gradient_that_repeats_one_number_can_be_added_to(parameters):
    gradients = Gradients(parameters, {})
    begin(gradients, b=2)
    gradients.take("b", torch.ones(()).expand(4))
    gradients.take("b", torch.arange(4.0))
    gradients.wait()
    assert parameters["b"].grad.tolist() == [1.0, 2.0, 3.0, 4.0]
