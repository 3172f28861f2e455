"""Values as messages: what is packed comes out again, for any layout, dtype and part."""

import pytest
import torch

from bayplan.data.errors import CaptureError
from bayplan.running.ranks.transfers import Form, Parcel
from bayplan.tracing.stages.whole import Samples, layout_of

CPU = torch.device("cpu")
NUM_SAMPLES = 4


def bytes_of(message):
    """What travels: the other end may take the same bytes for something else."""
    return message.contiguous().reshape(-1).view(torch.uint8)


def form_of(value, *, dimension=0, outer=1, rows=1, name="value"):
    return Form.of(name, value, Samples(dimension, outer, rows, layout_of(value)))


def filled(*shape, dtype=torch.float32):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    return numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)


VALUES = {
    "samples first": (filled(4, 3, 2), {}),
    "samples second": (filled(3, 4, 2), {"dimension": 1}),
    "samples innermost": (filled(3, 4).T, {}),
    "channels last": (filled(4, 3, 5, 2).to(memory_format=torch.channels_last), {}),
    "several rows": (filled(12, 5), {"rows": 3}),
    "several rows, transposed": (filled(5, 12).T, {"rows": 3}),
    "spread": (filled(3 * 4, 5), {"outer": 3}),
    "spread, in the middle": (filled(2, 3 * 4 * 2, 5), {"dimension": 1, "outer": 3, "rows": 2}),
    "spread, transposed": (filled(5, 3 * 4, 2).permute(1, 2, 0), {"outer": 3}),
    "one number each": (filled(4), {}),
}


def samples_of(value, dimension=0, outer=1, rows=1):
    """The samples of a value one by one, the slow way."""
    apart = value.unflatten(dimension, (outer, NUM_SAMPLES, rows))
    return [apart.select(dimension + 1, at) for at in range(NUM_SAMPLES)]


@pytest.mark.parametrize(("value", "where"), VALUES.values(), ids=VALUES)
@pytest.mark.parametrize(("begin", "end"), [(0, 4), (1, 3), (3, 4)])
def test_samples_that_are_sent_arrive_in_their_places(value, where, begin, end):
    form = form_of(value, **where)
    message = bytes_of(Parcel((form,), begin, end).packed([value]))
    assert message.numel() == form.size_bytes(end - begin)
    room = form.empty(NUM_SAMPLES, CPU).zero_()
    assert room.shape == value.shape
    ((found, part),) = Parcel((form,), begin, end).unpacked(message)
    assert found is form
    form.part(room, begin, end).copy_(part)
    pairs = zip(samples_of(room, **where), samples_of(value, **where), strict=True)
    for at, (arrived, sent) in enumerate(pairs):
        assert torch.equal(arrived, sent if begin <= at < end else torch.zeros_like(sent))


@pytest.mark.parametrize(("value", "where"), VALUES.values(), ids=VALUES)
def test_room_lies_in_memory_as_the_value_does(value, where):
    room = form_of(value, **where).empty(NUM_SAMPLES, CPU)
    assert (room.shape, room.stride()) == (value.shape, value.stride())


@pytest.mark.parametrize(("value", "where"), VALUES.values(), ids=VALUES)
def test_a_part_that_is_joined_has_the_dimensions_of_a_value(value, where):
    form = form_of(value, **where)
    assert torch.equal(form.joined(form.part(value, 0, NUM_SAMPLES)), value)
    assert form.joined(form.part(value, 1, 3)).shape == form.empty(2, CPU).shape


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16, torch.complex64],
    ids=str,
)
def test_values_of_several_dtypes_share_a_message(dtype):
    values = [filled(4, 3, dtype=torch.bool), filled(4, 5, dtype=dtype), filled(2, 7)]
    forms = (
        form_of(values[0], name="mask"),
        form_of(values[1]),
        Form.of("same for all", values[2], None),
    )
    parcel = Parcel(forms, 1, 4)
    message = parcel.packed(values)
    assert message.numel() == parcel.offsets[-1]
    wanted = [values[0][1:4], values[1][1:4], values[2]]
    for (form, part), value in zip(parcel.unpacked(message), wanted, strict=True):
        assert form.dtype is value.dtype
        assert torch.equal(part, value)


def test_one_value_in_one_piece_of_memory_is_sent_and_received_without_a_copy():
    value = filled(4, 3)
    parcel = Parcel((form_of(value),), 1, 3)
    assert parcel.packed([value]).data_ptr() == value[1].data_ptr()
    landing = parcel.in_one_piece([value])
    assert landing.data_ptr() == value[1].data_ptr()
    assert torch.equal(landing, value[1:3])


def test_a_part_with_gaps_and_several_values_land_beside_and_are_copied():
    value = filled(3, 4)
    assert Parcel((form_of(value, dimension=1),), 1, 3).in_one_piece([value]) is None
    assert Parcel((form_of(value, dimension=1),), 0, 4).in_one_piece([value]) is not None
    two = (form_of(value), form_of(value, name="other"))
    assert Parcel(two, 0, 3).in_one_piece([value, value]) is None


def test_sender_and_receiver_agree_on_the_length_of_one_value():
    # gloo ends the process that receives more than it expects. Here only one end packs.
    piece, whole = filled(3, 5), filled(3, 1)
    sent = Parcel((form_of(piece, dimension=1),), 1, 2).packed([piece])
    landing = Parcel((form_of(whole, dimension=1),), 0, 1).in_one_piece([whole])
    assert bytes_of(sent).numel() == bytes_of(landing).numel() == 12


def test_a_value_that_lies_otherwise_than_it_was_traced_is_rearranged():
    form = form_of(filled(4, 3))
    value = filled(3, 4).T
    message = Parcel((form,), 0, 4).packed([value])
    assert torch.equal(message.view(torch.float32).view(4, 3), value)


REPEATED = {
    "along the last": (filled(4, 3, 1).expand(4, 3, 5), 12),
    "along the middle": (filled(4, 1, 3).expand(4, 5, 3), 12),
    "along two": (filled(4, 1, 1).expand(4, 5, 3), 4),
}


@pytest.mark.parametrize(("value", "num_sent"), REPEATED.values(), ids=REPEATED)
def test_what_repeats_itself_is_sent_once_and_arrives_with_the_strides_it_had(value, num_sent):
    form = form_of(value)
    parcel = Parcel((form,), 0, NUM_SAMPLES)
    message = bytes_of(parcel.packed([value]))
    assert message.numel() == 4 * num_sent == form.size_bytes(NUM_SAMPLES)
    room = form.empty(NUM_SAMPLES, CPU)
    bytes_of(parcel.in_one_piece([room])).copy_(message)
    arrived = form.as_traced(room)
    assert torch.equal(arrived, value)
    assert arrived.stride() == value.stride()


def test_what_is_the_same_for_all_samples_of_a_piece_may_differ_in_the_next_one():
    value = filled(1, 3, 2).expand(4, 3, 2)
    form = form_of(value)
    room = form.empty(NUM_SAMPLES, CPU)
    assert room.is_contiguous()
    for begin, end, factor in ((0, 1, 1.0), (1, 4, 2.0)):
        ((_, part),) = Parcel((form,), 0, end - begin).unpacked(
            bytes_of(Parcel((form,), begin, end).packed([value * factor]))
        )
        form.part(room, begin, end).copy_(part)
    assert torch.equal(form.as_traced(room), value * torch.tensor([1.0, 2, 2, 2]).view(4, 1, 1))


def test_samples_in_an_unknown_order_are_refused():
    value = filled(8, 3)
    with pytest.raises(
        CaptureError, match=r"dimension 0 of cat .* 2 rows for each, cannot be told"
    ):
        form_of(value, outer=None, rows=2, name="cat")
