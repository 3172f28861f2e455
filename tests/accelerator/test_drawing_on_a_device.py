"""Dropout of a split batch on a device whose numbers depend on how many are drawn at once.

Each test runs in a process that has the device registered (`own_process.py`).
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from device_here import DEVICE
from torch.nn import functional

from bayplan.data.errors import CaptureError
from bayplan.devices.device import device_of
from bayplan.rewriting.repeats import draw
from bayplan.tracing.stages import drawing
from bayplan.tracing.stages.drawing import Draw
from bayplan.tracing.stages.whole import layout_of

NUM_SAMPLES, SPLITS = 6, [(0, 6), (0, 1, 6), (0, 2, 3, 6)]
VALUES = {  # by name, values of the whole batch, the dimension of samples, and rows for each
    "samples first": (torch.randn(6, 50), 0, 1),
    "samples second": (torch.randn(4, 6, 5), 1, 1),
    "samples innermost": (torch.randn(5, 6).T, 0, 1),
    "several rows": (torch.randn(12, 5), 0, 2),
    "halves": (torch.randn(6, 50).bfloat16(), 0, 1),
}


def drawn_like(values, dimension, rows):
    where = {"where": values.device, "dtype": values.dtype}
    return Draw(0.3, tuple(values.shape), layout_of(values), dimension, rows, **where)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VALUES)
def test_pieces_drop_what_plain_training_drops_of_the_whole_batch(name):
    """Such a batch was refused: a part that is drawn alone has other numbers than in the whole."""
    values, dimension, rows = VALUES[name]
    values, own = values.to(DEVICE), device_of(DEVICE)
    torch.manual_seed(3)
    state = own.generator_state()
    plain = functional.dropout(values, 0.3)
    after = own.generator_state()
    one = drawn_like(values, dimension, rows)
    for bounds in SPLITS:
        parts = values.split([rows * (e - b) for b, e in pairwise(bounds)], dimension)
        wanted = plain.split([part.shape[dimension] for part in parts], dimension)
        for begin, part, expected in zip(bounds, parts, wanted, strict=False):
            own.set_generator_state(state)
            dropped, mask = one.dropped(part, begin)
            assert torch.equal(dropped, expected)
            assert torch.equal(mask, expected != 0)
            assert torch.equal(own.generator_state(), after)


def test_a_part_that_is_drawn_alone_has_other_numbers():
    """Or the test above would show nothing."""
    values = torch.ones(6, 50, device=DEVICE)
    torch.manual_seed(3)
    whole = functional.dropout(values, 0.5)
    torch.manual_seed(3)
    assert not torch.equal(functional.dropout(values[:3], 0.5), whole[:3])


@pytest.mark.gpu
def test_drawing_for_the_whole_batch_takes_what_plans_count():
    whole, num_samples = torch.ones(8, 1 << 18, device=DEVICE), 2
    own, part = device_of(DEVICE), whole[:num_samples].clone()
    one = drawn_like(whole, 0, 1)
    node = SimpleNamespace(target=draw, meta={drawing.DRAW: "dropout", "val": (part, part.bool())})
    counted = drawing.whole_draw_bytes(node, whole.shape[0] / num_samples)
    results = one.dropped(part, 0)  # what comes first may make the device keep memory of its own
    del results
    own.synchronize()
    own.reset_peak()
    before = own.live.allocated
    results = one.dropped(part, 0)
    own.synchronize()
    made_bytes = sum(result.nbytes for result in results)
    assert own.peak.allocated - before == counted + made_bytes


def test_dropout_of_a_part_of_a_tensor_is_refused_by_name():
    """Kernels give numbers to the elements of such a part in another order."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        values = torch.empty(6, 50, device=DEVICE)[:, 10:]
    source = SimpleNamespace(name="slice_1", meta={"val": values})
    with pytest.raises(CaptureError, match=r"slice_1 is a part of .*call\s+\.contiguous\(\)"):
        drawing._draw(0.5, source, None, NUM_SAMPLES)
