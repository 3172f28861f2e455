"""Swaps of the test accelerator: the bits of plain training, in the right order and beside kernels.

Copies are late, one half of each before the link's delay and one half after it. Each test runs in a
process that has the device registered (`own_process.py`).
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bay
import pytest
import torch
from planned_steps import DECISIONS, DEVICE, Space, are_same, made, planned, trained

from bayplan.running.swaps.lanes import FileLane, PinnedLane, StagedLane
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.running.swaps.tier import SwapStore, open_tier

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well


def space_of(lane: Any) -> type[Space]:
    class Chosen(Space):
        def open(self, size_bytes: int) -> SwapStore:
            where = {"directory": Path(os.environ["BAYPLAN_CACHE"])}
            options = where if issubclass(lane, FileLane) else {}
            return SwapStore(lane(self.device, capacity_bytes=size_bytes, **options))

    return Chosen


class NeverWaits(PinnedLane):
    """Brings back what is then read at once."""

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> Callable[[], None]:
        super().start_in(offset_bytes, target)
        return lambda: None


class StartsEarly(PinnedLane):
    """Takes out what has not been computed yet."""

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> Callable[[], None]:
        with self._stream:
            self._slot(offset_bytes, source).copy_(source, non_blocking=True)
            done = torch.Event(DEVICE)
            done.record(self._stream)
        self._under_way[done] = source
        return lambda: torch.accelerator.current_stream(0).wait_event(done)


class NeverWaitsForStages(StagedLane):
    def start_in(self, offset_bytes: int, target: torch.Tensor) -> Callable[[], None]:
        super().start_in(offset_bytes, target)
        return lambda: None


class StagesEarly(StagedLane):
    def _carry(self, transfer, extent, offset_bytes, begun) -> None:
        super()._carry(transfer, extent, offset_bytes, torch.Event(DEVICE))  # recorded nowhere


WRONG_LANES = {
    lane.__name__: lane for lane in (NeverWaits, StartsEarly, NeverWaitsForStages, StagesEarly)
}


@pytest.mark.parametrize("lane", WRONG_LANES)
def test_a_swap_in_the_wrong_order_has_other_bits(lane):
    plain, step = trained(made()), made()
    planned(step, DECISIONS["swap"], space_of(WRONG_LANES[lane]))
    assert not are_same(trained(step, is_slow=True), plain)


@pytest.mark.parametrize("is_staged", [False, True])
def test_copies_run_beside_kernels_and_have_the_same_bits(is_staged):
    """A link so slow that each copy ends long after the kernels that it should hide behind."""
    overlapped: list[bool] = []
    kind: Any = StagedLane if is_staged else PinnedLane

    class Watched(kind):
        def start_out(self, source: torch.Tensor, offset_bytes: int) -> Callable[[], None]:
            return partial(self._end, super().start_out(source, offset_bytes))

        def _end(self, wait: Callable[[], None]) -> None:
            torch.accelerator.current_stream(0).synchronize()  # all kernels before it are done
            overlapped.append(not self._stream.query())
            wait()

    plain, step = trained(made(0.3)), made(0.3)
    planned(step, DECISIONS["swap"], space_of(Watched))
    with bay.slow(bytes_per_second=2e5):
        step.loss_fn(step.model(step.batch[0]), step.batch[1]).backward()
    assert any(overlapped)
    again = made(0.3)
    planned(again, DECISIONS["swap"], space_of(kind))
    assert are_same(trained(again, is_slow=True), plain)


def test_a_host_that_pins_too_little_swaps_to_a_file(tmp_path):
    tensor = torch.arange(3 << 20, dtype=torch.int32, device=DEVICE)  # several stages
    with bay.pinned_cap(8 << 20):
        with pytest.warns(RuntimeWarning, match="cannot page-lock 16.0 MiB .* a file in"):
            store = open_tier(
                torch.device(DEVICE), capacity_bytes=16 << 20, directory=Path(tmp_path)
            )
        with store, bay.slow(copy_seconds=0.01):
            ticket = store.begin_out(tensor * 2)
            store.end_out(ticket)
            back = store.begin_in(ticket)
            store.end_in(ticket)
            assert back.equal(tensor * 2)
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize("pinned_bytes", [2**40, 1 << 20])
def test_the_speed_of_swaps_is_measured(tmp_path, pinned_bytes):
    with bay.pinned_cap(pinned_bytes), bay.slow(bytes_per_second=1e9):
        if pinned_bytes < 2**40:
            with pytest.warns(RuntimeWarning, match="a file in"):
                space = SwapSpace.measured(DEVICE, Path(tmp_path))
        else:
            space = SwapSpace.measured(DEVICE, Path(tmp_path))
    assert 0 < space.tier.out_bytes_per_second <= 1e9
    assert 0 < space.tier.in_bytes_per_second <= 1e9
