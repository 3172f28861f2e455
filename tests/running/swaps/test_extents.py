"""Extents: the same memory as the tensor, no byte more than from its first to its last element."""

import pytest
import torch

from bayplan.running.swaps.lanes import Layout, extent_of

BASE = torch.arange(60, dtype=torch.int32).reshape(6, 10)


@pytest.mark.parametrize(
    ("tensor", "num_elements"),
    [
        (BASE, 60),
        (BASE.t(), 60),
        (BASE[2:4], 20),
        (BASE[:, 3], 51),
        (BASE[1:3, 2:5], 13),
        (BASE[:1].expand(7, 10), 10),
        (BASE[0, 0], 1),
        (BASE[:0], 0),
        (BASE.unfold(1, 4, 2), 60),
    ],
)
def test_extent_covers_the_tensor_and_no_more(tensor, num_elements):
    extent = extent_of(tensor)
    assert extent.dtype == torch.uint8
    assert len(extent) == Layout.of(tensor).size_bytes == num_elements * 4
    if num_elements:
        assert extent.data_ptr() == tensor.data_ptr()
    new = Layout.of(tensor).allocate()
    assert (new.shape, new.stride(), new.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert new.untyped_storage().nbytes() == num_elements * 4
    extent_of(new).copy_(extent)
    assert torch.equal(new, tensor)


def test_extent_is_the_same_memory():
    tensor = torch.zeros(4, dtype=torch.uint8)
    extent_of(tensor[1:3]).fill_(7)
    assert tensor.tolist() == [0, 7, 7, 0]


def test_sparse_tensors_have_none():
    with pytest.raises(AssertionError, match="no single extent"):
        Layout.of(torch.eye(3).to_sparse())
