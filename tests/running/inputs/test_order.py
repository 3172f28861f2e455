"""The order of samples: shuffled anew each epoch, and the same from any place on."""

import pytest

from bayplan.data.record import DataPosition
from bayplan.running.inputs.order import batch_indices, epoch_order, num_batches


def orders_of(**options):
    return [
        (each.epoch, each.samples)
        for each in batch_indices(23, 5, num_steps=12, **options)
        if each.is_training
    ]


@pytest.mark.parametrize("shards", [(), (9, 1, 13)])
def test_every_epoch_has_every_sample_once_in_another_order(shards):
    orders = [
        epoch_order(23, seed=seed, epoch=epoch, shards=shards).tolist()
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({*map(tuple, orders)}) == 3


def test_shards_are_read_nearly_in_order():
    """A window holds few shards, so that a disk or network reads them one after the other."""
    sizes = (5000,) * 8
    order = epoch_order(sum(sizes), seed=2, epoch=0, shards=sizes)
    for first in range(0, len(order), 4096):
        assert len({*(order[first : first + 4096] // 5000).tolist()}) <= 2


@pytest.mark.parametrize("shards", [(), (9, 1, 13)])
@pytest.mark.parametrize("steps_done", range(1, 12))
def test_a_run_goes_on_with_the_sample_that_was_next(shards, steps_done):
    whole = orders_of(position=DataPosition(seed=7), shards=shards)
    assert len(whole) == 12
    epoch, index = steps_done // 4, steps_done % 4 * 5  # four batches of five, three left out
    position = DataPosition(seed=7, epoch=epoch, index=index)
    rest = orders_of(position=position, shards=shards)
    assert rest[: 12 - steps_done] == whole[steps_done:]


def test_last_smaller_batch_is_left_out_in_training_and_kept_in_evaluation():
    made = list(batch_indices(23, 5, position=DataPosition(), num_steps=8, num_evaluated=7))
    training = [each for each in made if each.is_training]
    assert [len(each.samples) for each in training] == [5] * 8
    evaluated = [each for each in made if not each.is_training and each.epoch == 1]
    assert [each.samples for each in evaluated] == [(0, 1, 2, 3, 4), (5, 6)]
    assert [each.ends for each in evaluated] == [False, True]
    assert [each.ends for each in training] == [False, False, False, True] * 2


def test_an_epoch_that_does_not_end_is_not_evaluated():
    made = batch_indices(23, 5, position=DataPosition(), num_steps=6, num_evaluated=7)
    assert {each.epoch for each in made if not each.is_training} == {0}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_share_an_evaluation_and_all_hear_of_its_end(num_ranks):
    seen = []
    for rank in range(num_ranks):
        made = batch_indices(
            10, 5, position=DataPosition(), num_steps=2, num_evaluated=12, share=(rank, num_ranks)
        )
        own = [each for each in made if not each.is_training]
        assert [each.ends for each in own].count(True) == 1
        assert own[-1].ends
        seen += [sample for each in own for sample in each.samples]
    assert sorted(seen) == list(range(12))


def test_steps_of_epochs_are_counted_from_a_position():
    start = DataPosition()
    assert num_batches(23, 5, position=start, epochs=3) == 12
    assert num_batches(23, 5, position=DataPosition(epoch=1, index=10), epochs=3) == 6
    assert num_batches(23, 5, position=DataPosition(epoch=3), epochs=3) == 0
