import pytest
import torch

from bayplan.running.ranks.starting import BatchMark, are_alike


def batch(*, first=0.0, last=0.0, size=4, dtype=torch.float32):
    inputs = torch.zeros(size, 3, dtype=dtype)
    inputs[0, 0], inputs[-1, -1] = first, last
    return [inputs, torch.zeros(size, dtype=torch.int64)]


@pytest.mark.parametrize(
    "other", [{"first": 1.0}, {"last": 1.0}, {"size": 5}, {"dtype": torch.float64}]
)
def test_another_batch_has_another_number(other):
    assert BatchMark.of(batch()) == BatchMark.of(batch())
    assert BatchMark.of(batch()).number != BatchMark.of(batch(**other)).number


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.ones(4, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(2, dtype=torch.complex64),
    ],
    ids=str,
)
def test_every_tensor_has_a_mark(tensor):
    assert BatchMark.of([tensor]) == BatchMark.of([tensor.clone()])


def test_the_sums_of_many_ranks_are_exact():
    marks = [BatchMark("", 2**20 - 1)] * 4096
    sums = sum(mark.beside(torch.zeros((), dtype=torch.float64)) for mark in marks)
    assert are_alike(sums, len(marks))
    sums += BatchMark("", 2**20 - 2).beside(torch.zeros((), dtype=torch.float64))
    assert not are_alike(sums, len(marks) + 1)
