"""Fake grouped products have the shapes, dtypes and layouts of the real ones."""

import pytest
import torch

from bayplan import torch_compat
from bayplan.tracing.fake_products import correct_fake_products

GROUPED = torch_compat.GROUPED_PRODUCT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("left", "right", "has_groups"),
    [
        ((12, 16), (3, 16, 32), True),
        ((16, 32), (32, 16), True),
        ((3, 16, 32), (32, 48), True),
        ((3, 16, 32), (3, 32, 48), False),
    ],
)
def test_fake_grouped_product_is_like_the_real_one(dtype, left, right, has_groups):
    correct_fake_products()
    offsets = torch.tensor([4, 8, 12], dtype=torch.int32) if has_groups else None
    arguments = (torch.ones(left, dtype=dtype), torch.ones(right, dtype=dtype), offsets)
    real = GROUPED(*arguments)
    with torch_compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [None if each is None else mode.from_tensor(each) for each in arguments]
        fake = GROUPED(*fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_rows_of_the_result_are_padded_as_the_kernel_pads_them():
    correct_fake_products()
    left, right = torch.ones(6, 8), torch.ones(3, 6, 8).transpose(1, 2)
    offsets = torch.tensor([2, 4, 6], dtype=torch.int32)
    with torch_compat.FakeTensorMode(allow_non_fake_inputs=True):
        fake = GROUPED(left, right, offsets)
    assert fake.stride() == GROUPED(left, right, offsets).stride() == (8, 1)


def test_what_the_kernel_does_not_take_stays_refused():
    correct_fake_products()
    with (
        torch_compat.FakeTensorMode(),
        pytest.raises(RuntimeError, match="BF16"),
    ):
        GROUPED(torch.ones(4, 16).double(), torch.ones(1, 16, 16).double(), None)
