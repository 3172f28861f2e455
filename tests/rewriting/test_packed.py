"""The packing kernels: every way there and back gives the same bits, in the same memory format."""

import pytest
import torch

from bayplan.devices.meters import open_meter
from bayplan.rewriting import packed
from bayplan.torch_compat import FakeTensorMode

aten = torch.ops.aten

# Beyond one chunk, not a multiple of eight, empty, one element, and every kind of strides.
LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 5, 7, 9),
    "one chunk and a bit": lambda: torch.randn(2**18 + 5),
    "one element": lambda: torch.randn(1),
    "no dimensions": lambda: torch.randn(()),
    "empty": lambda: torch.randn(3, 0, 4),
    "channels last": lambda: torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "one channel, channels last": lambda: torch.randn(2, 5, 7, 1).permute(0, 3, 1, 2),
    "one row, channels last": lambda: torch.randn(2, 1, 7, 3).permute(0, 3, 1, 2),
    "channels last in 3d": lambda: torch.randn(2, 4, 5, 6, 3).permute(0, 4, 1, 2, 3),
    "transposed": lambda: torch.randn(6, 11).t(),
    "with gaps": lambda: torch.randn(6, 22)[:, ::2],
    "expanded": lambda: torch.randn(6, 1).expand(6, 11),
    "some channels of many": lambda: torch.randn(4, 9, 5, 3)[:, 2:7],
    "one sample's channels": lambda: torch.randn(1, 9, 5, 3)[:, 2:7],
    "some samples of many": lambda: torch.randn(6, 3, 8)[::2],
    "inside a larger storage": lambda: torch.randn(100)[13:63].view(5, 10),
}
ODD_VALUES = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45]


@pytest.fixture(params=[True, False], ids=["kernels of ours", "without a compiler"], autouse=True)
def has_compiler(request, monkeypatch) -> None:
    if not request.param:
        monkeypatch.setattr(packed, "_kernels", lambda: None)
    else:
        assert packed._kernels() is not None


@pytest.fixture(params=list(LAYOUTS))
def values(request) -> torch.Tensor:
    torch.manual_seed(0)
    return LAYOUTS[request.param]()


def with_odd_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry, with the values that rounding and comparing stumble over."""
    odd = torch.tensor(ODD_VALUES, dtype=tensor.dtype)
    storage = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.randn(storage).to(tensor.dtype)
    flat[::3] = odd.repeat(storage)[: len(flat[::3])]
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.stride() == other.stride()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    assert torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def test_bits_come_back_as_the_mask(values):
    mask = torch.empty_like(values, dtype=torch.bool).copy_(values > 0)
    bits = packed.pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.shape == ((mask.numel() + 7) // 8,)
    back = packed.unpack_bits(bits, mask.shape, mask.stride())
    assert torch.equal(back, mask)
    assert back.stride() == mask.stride()


def test_a_mask_with_overlaps_comes_back_without():
    mask = (torch.arange(6) % 2 == 0).unsqueeze(1).expand(6, 11)
    back = packed.unpack_bits(packed.pack_bits(mask), mask.shape, mask.stride())
    assert torch.equal(back, mask)
    assert back.is_contiguous()


@pytest.mark.parametrize("name", ["channels last", "transposed", "expanded", "with gaps"])
def test_bits_in_an_order_asked_for(name):
    values = LAYOUTS[name]()
    twin = values.contiguous()
    for one, stride in ((values, twin.stride()), (twin, values.stride())):
        for bits in (packed.pack_bits(one > 0, stride), packed.pack_positive(one, 0, stride)):
            assert torch.equal(packed.unpack_bits(bits, one.shape, stride), twin > 0)


def test_bits_are_those_of_threshold_backward(values):
    values = with_odd_values(values)
    gradient = torch.ones(values.shape)
    passed = aten.threshold_backward(gradient, values, 0).bool()
    bits = packed.pack_positive(values)
    assert torch.equal(packed.unpack_bits(bits, values.shape, values.stride()), passed)


@pytest.mark.parametrize("threshold", [0.5, -1.0, 0.3])  # the last is no number of any type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_other_thresholds(threshold, dtype):
    values = with_odd_values(torch.randn(1000).to(dtype))
    values[1::5] = threshold
    bits = packed.pack_positive(values, threshold)
    gradient = with_odd_values(torch.randn(1000).to(dtype))
    assert_same_bits(
        packed.threshold_backward_from_bits(gradient, bits, (1,)),
        aten.threshold_backward(gradient, values, threshold),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradient_from_bits_is_that_of_the_operator(values, dtype):
    values = with_odd_values(torch.empty_strided(values.shape, values.stride(), dtype=dtype))
    gradient = with_odd_values(values)
    bits = packed.pack_positive(values)
    ours = packed.threshold_backward_from_bits(gradient, bits, values.stride())
    assert_same_bits(ours, aten.threshold_backward(gradient, values, 0))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_gradient_in_another_memory_format(name):
    values = with_odd_values(LAYOUTS[name]())
    contiguous = with_odd_values(torch.randn(values.shape))
    for gradient, output in ((contiguous, values), (values, contiguous)):
        bits = packed.pack_positive(output)
        ours = packed.threshold_backward_from_bits(gradient, bits, output.stride())
        assert_same_bits(ours, aten.threshold_backward(gradient, output, 0))


@pytest.mark.parametrize("format_of_gradient", [torch.contiguous_format, torch.channels_last])
def test_gradient_can_be_overwritten(format_of_gradient):
    values = with_odd_values(LAYOUTS["channels last"]())
    gradient = torch.randn(values.shape).to(memory_format=format_of_gradient)
    expected = aten.threshold_backward(gradient, values, 0)
    result = packed.threshold_backward_from_bits(
        gradient, packed.pack_positive(values), values.stride(), grad_input=gradient
    )
    assert result is gradient
    assert torch.equal(result, expected)


def test_torch_packs_as_numpy_does():
    mask = torch.rand(1003) > 0.5
    bits = packed._packed_by_torch(mask)
    assert torch.equal(bits, packed.pack_bits(mask))
    assert torch.equal(packed._unpacked_by_torch(bits, 1003), mask.to(torch.uint8))


@pytest.mark.parametrize(
    ("num_positions", "dtype"),
    [
        (1, torch.uint8),
        (256, torch.uint8),
        (257, torch.uint16),
        (65536, torch.uint16),
        (65537, torch.int32),
        (2**31, torch.int32),
        (2**31 + 1, torch.int64),
    ],
)
def test_indices_get_the_smallest_type_that_holds_them(num_positions, dtype):
    assert packed.index_dtype(num_positions) is dtype
    indices = torch.tensor([0, num_positions // 2, num_positions - 1])
    small = packed.as_integers(indices, dtype)
    assert small.dtype is dtype
    assert torch.equal(packed.as_integers(small, torch.int64), indices)


def test_indices_keep_their_memory_format():
    indices = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = packed.as_integers(packed.as_integers(indices, torch.uint8), torch.int64)
    assert torch.equal(back, indices)
    assert back.stride() == indices.stride()


def test_tensors_without_data_give_such_tensors(values):
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(values)
        bits = packed.pack_positive(fake)
        mask = packed.unpack_bits(bits, fake.shape, fake.stride())
        gradient = packed.threshold_backward_from_bits(fake, bits, fake.stride())
    real_bits = packed.pack_positive(values)
    real_mask = packed.unpack_bits(real_bits, values.shape, values.stride())
    real = packed.threshold_backward_from_bits(values, real_bits, values.stride())
    for made, expected in ((bits, real_bits), (mask, real_mask), (gradient, real)):
        assert type(made) is type(fake)
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
        # Of dimensions of one element torch itself says other strides without data than with.
        assert _strides_that_matter(made) == _strides_that_matter(expected)


def _strides_that_matter(tensor: torch.Tensor) -> list[int]:
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def test_a_gradient_that_is_negative_by_a_mark_alone():
    values, numbers = torch.randn(2, 1000)
    gradient = torch.view_as_complex(torch.stack([numbers, numbers], -1)).conj().imag
    assert gradient.is_neg()
    ours = packed.threshold_backward_from_bits(gradient, packed.pack_positive(values), (1,))
    assert torch.equal(ours, aten.threshold_backward(-numbers, values, 0))
    dense = torch._neg_view(numbers)
    ours = packed.threshold_backward_from_bits(dense, packed.pack_positive(values), (1,))
    assert torch.equal(ours, aten.threshold_backward(-numbers, values, 0))


def test_parameters_are_packed_like_any_tensor():
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 1.0]))
    assert packed.pack_positive(weight).tolist() == [0b101]


def test_temporaries_are_small(tmp_path):
    values = torch.randn(2**22)
    gradient = torch.randn(2**22)
    bits = packed.pack_positive(values)
    kernels = {
        "pack": (lambda: packed.pack_positive(values), bits.nbytes),
        "unpack": (lambda: packed.unpack_bits(bits, (2**22,), (1,)), 2**22),
        "gradient": (
            lambda: packed.threshold_backward_from_bits(gradient, bits, (1,)),
            gradient.nbytes,
        ),
    }
    with open_meter(torch.device("cpu"), tmp_path) as meter:
        for name, (kernel, result_bytes) in kernels.items():
            meter.reset_peak()
            before = meter.live_bytes
            kernel()
            assert result_bytes <= meter.peak_bytes - before <= result_bytes + 2 * 2**20, name
