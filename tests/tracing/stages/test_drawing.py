"""Dropout of pieces: the rows that plain training draws, whatever the split."""

from itertools import pairwise

import pytest
import torch

from bayplan.tracing.stages.drawing import Draw, Streams

NUM_SAMPLES = 6

DRAWS = {
    "samples first": Draw(0.3, (6, 5), (0, 1), 0),
    "samples second": Draw(0.3, (4, 6, 5), (0, 1, 2), 1),
    "samples innermost": Draw(0.3, (6, 5), (1, 0), 0),
    "several rows": Draw(0.3, (12, 5), (0, 1), 0, rows=2),
    "spread": Draw(0.3, (18, 5), (0, 1), 0, rows=1, outer=3),
}


def by_sample(draw, mask, num_samples):
    apart = mask.unflatten(draw.dimension, (draw.outer, num_samples, draw.rows))
    return apart.movedim(draw.dimension + 1, 0)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("bounds", [(0, 6), (0, 1, 6), (0, 2, 3, 6)])
def test_pieces_draw_what_the_whole_batch_does(draw, bounds):
    torch.manual_seed(0)
    whole = by_sample(draw, draw.whole_mask(), NUM_SAMPLES)
    for begin, end in pairwise(bounds):
        torch.manual_seed(0)
        shape = list(draw.shape)
        shape[draw.dimension] = shape[draw.dimension] * (end - begin) // NUM_SAMPLES
        mask = draw.dropped(torch.ones(shape), begin)[1]
        assert list(mask.shape) == shape
        assert torch.equal(by_sample(draw, mask, end - begin), whole[begin:end])


def test_the_whole_mask_is_the_one_that_plain_dropout_draws():
    values = torch.ones(5, 6).T
    torch.manual_seed(0)
    plain = torch.nn.functional.dropout(values, 0.3) != 0
    torch.manual_seed(0)
    assert torch.equal(Draw(0.3, (6, 5), (1, 0), 0).whole_mask(), plain)


def test_a_mask_that_is_the_same_for_all_samples_is_drawn_whole():
    torch.manual_seed(0)
    draw = Draw(0.5, (3, 4), (0, 1), None)
    assert draw.dropped(torch.ones(3, 4), 1)[1].shape == (3, 4)


def test_a_step_moves_the_generator_past_all_draws_at_once():
    draws = {"a": DRAWS["samples first"], "b": DRAWS["several rows"]}
    torch.manual_seed(0)
    wanted = [draw.whole_mask() for draw in draws.values()]
    after = torch.get_rng_state()
    torch.manual_seed(0)
    streams = Streams(draws)
    streams.begin_step()
    assert torch.equal(torch.get_rng_state(), after)
    streams.begin = 4
    for name, mask in zip(("b", "a"), reversed(wanted), strict=True):  # in any order
        ticket = streams.ticket(name)
        torch.set_rng_state(ticket[:-8])
        assert ticket[-8:].view(torch.int64).item() == 4
        assert torch.equal(draws[name].whole_mask(), mask)
