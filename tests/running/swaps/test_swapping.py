"""Swapping: activations leave and return, forgotten tokens free slots, failures lose nothing."""

import gc
import warnings
from pathlib import Path

import pytest
import torch

from bayplan.running.swaps.lanes import TierError
from bayplan.running.swaps.swapping import Swapper
from bayplan.running.swaps.tier import open_tier

SIZE_BYTES = 4096


@pytest.fixture
def store(tmp_path: Path):
    with open_tier(torch.device("cpu"), capacity_bytes=4 * SIZE_BYTES, directory=tmp_path) as store:
        yield store


@pytest.fixture
def swapper(store) -> Swapper:
    return Swapper(store)


def page(number: float) -> torch.Tensor:
    return torch.full((SIZE_BYTES // 4,), float(number))


def there(swapper: Swapper, tensor: torch.Tensor) -> torch.Tensor:
    return swapper.swap_away(swapper.swap_out(tensor), tensor)


def back(swapper: Swapper, token: torch.Tensor, *, is_last: bool = True) -> torch.Tensor:
    return swapper.swap_here(swapper.swap_back(token), token, is_last)


def test_tensor_comes_back_as_it_left(swapper, store):
    tensor = torch.randn(8, 16).t()
    token = there(swapper, tensor)
    assert token.numel() == 1
    assert store.used_bytes > 0
    again = back(swapper, token)
    assert again.data_ptr() != tensor.data_ptr()
    assert again.stride() == tensor.stride()
    assert torch.equal(again, tensor)
    assert store.used_bytes == 0


def test_several_are_away_at_once_and_return_in_any_order(swapper):
    tokens = [there(swapper, page(number)) for number in range(3)]
    for number in (1, 2, 0):
        assert torch.equal(back(swapper, tokens[number]), page(number))


def test_tensor_comes_back_as_often_as_planned(swapper, store):
    token = there(swapper, page(7))
    for _ in range(2):
        assert torch.equal(back(swapper, token, is_last=False), page(7))
        assert store.used_bytes == SIZE_BYTES
    assert torch.equal(back(swapper, token), page(7))
    assert store.used_bytes == 0


def test_tokens_of_a_step_without_backward_free_their_slots(swapper, store):
    for _ in range(10):  # more than there is room for
        token = there(swapper, page(1))
        assert store.used_bytes == SIZE_BYTES
        del token
        gc.collect()
        assert store.used_bytes == 0


def test_token_that_dies_while_its_copy_runs_frees_its_slot(swapper, store):
    token = swapper.swap_out(page(1))
    del token
    gc.collect()
    assert store.used_bytes == 0


def test_full_store_keeps_tensors_with_one_warning(swapper, store):
    with pytest.warns(RuntimeWarning, match="stays in memory") as caught:
        tokens = [there(swapper, page(number)) for number in range(7)]
    assert len(caught) == 1
    for number, token in enumerate(tokens):
        assert torch.equal(back(swapper, token), page(number))
    assert store.used_bytes == 0


def test_kept_tensor_is_forgotten_with_its_token(swapper, store):
    with pytest.warns(RuntimeWarning):
        tokens = [there(swapper, page(number)) for number in range(6)]
    assert swapper._kept
    del tokens
    gc.collect()
    assert not swapper._kept
    assert store.used_bytes == 0


def test_copy_out_that_fails_keeps_the_tensor(swapper, store, monkeypatch):
    good = there(swapper, page(1))

    def broken(ticket):
        plain_end_out(ticket)
        ticket.tensor = tensor
        raise TierError("the disk is gone")

    plain_end_out, tensor = store.end_out, page(2)
    monkeypatch.setattr(store, "end_out", broken)
    with pytest.warns(RuntimeWarning, match="the disk is gone"):
        bad = there(swapper, tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, not for every activation of every step
        worse = there(swapper, page(3))
    assert torch.equal(back(swapper, bad), page(2))
    assert worse.numel() == 1
    assert torch.equal(back(swapper, good), page(1))
