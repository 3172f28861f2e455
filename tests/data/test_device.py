import msgspec
import pytest

from bayplan.data.device import ChannelRate, ConvolutionKind, Figure, OpClass

replace = msgspec.structs.replace


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_figure_is_a_number_of_something(value):
    with pytest.raises(ValueError, match=rf"value is {value}, must be"):
        Figure(value, "data sheet")


def test_a_figure_has_a_source():
    with pytest.raises(ValueError, match="source is empty; say where the figure comes from"):
        Figure(1.0, "")


def test_float32_is_what_others_fall_back_to(kind):
    with pytest.raises(ValueError, match="flops_per_s has no float32"):
        replace(kind, flops_per_s={"bfloat16": Figure(1e14, "data sheet")})


def test_every_op_class_has_an_efficiency(kind):
    part = {k: v for k, v in kind.efficiency.items() if k not in (OpClass.VIEW, OpClass.GATHER)}
    with pytest.raises(ValueError, match=r"efficiency lacks gather, view$"):
        replace(kind, efficiency=part)


@pytest.mark.parametrize("share", [0.0, 1.01])
def test_an_efficiency_is_a_share(kind, share):
    shares = kind.efficiency | {OpClass.MATMUL: Figure(share, "measured")}
    with pytest.raises(ValueError, match=rf"efficiency of matmul is {share}, must be in \(0, 1\]"):
        replace(kind, efficiency=shares)


def test_the_allocator_rounds_to_at_least_a_byte(kind):
    with pytest.raises(ValueError, match="allocation_granularity_bytes must be at least 1"):
        replace(kind, allocation_granularity_bytes=0)


def test_half_the_rate_is_reached_with_half_the_channels():
    rate = ChannelRate(most=Figure(3.0, "guess"), half_channels=Figure(200.0, "guess"))
    assert rate.at(200) == 1.5
    assert rate.at(64) < rate.at(512) < 3.0
    assert ChannelRate(most=Figure(0.3, "guess")).at(3) == 0.3


def test_a_rate_is_more_than_nothing():
    with pytest.raises(ValueError, match=r"most is 0\.0, must be more than 0"):
        ChannelRate(most=Figure(0.0, "guess"))


def test_convolutions_are_told_apart_by_all_kinds_or_by_none(kind):
    rate = ChannelRate(most=Figure(2.0, "guess"))
    every = dict.fromkeys(ConvolutionKind, rate)
    assert replace(kind, convolutions=every).convolutions == every
    some = {one: rate for one in ConvolutionKind if one is not ConvolutionKind.FIRST}
    with pytest.raises(ValueError, match="convolutions lacks first; name all kinds or none"):
        replace(kind, convolutions=some)


@pytest.mark.parametrize("name", ["convolution_backward", "convolution_scale"])
def test_factors_on_convolutions_are_more_than_nothing(kind, name):
    with pytest.raises(ValueError, match=rf"{name} is 0\.0, must be more than 0"):
        replace(kind, **{name: Figure(0.0, "guess")})


@pytest.mark.parametrize("value", [1e-320, 1e31])
def test_a_figure_whose_quotients_would_overflow_is_refused(value):
    # A device file with such a bandwidth was read, and deriving times failed with an OverflowError.
    with pytest.raises(ValueError, match="must be 0, or from 1e-30 to 1e30"):
        Figure(value, "guess")
