"""Reserved memory over time: traces of real allocators, replayed by ours.

The sequence of requests is the trace's, and so is when a program emptied its cache. Which block
serves a request, what is split, and when the driver is asked for how much is decided by
`bayplan.simulating.allocator`. Where a new segment lies is the driver's choice: that is taken from
the trace, if the trace took one of that size at that moment.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_truth.rows import Found, Row
from gpu_truth.traces import Action, Event, Trace, read_trace

from bayplan.data.errors import BayplanError, FileFault
from bayplan.simulating.allocator import Block, CachingAllocator

__all__ = ["Replay", "found", "replay"]

TARGET_PCT = 1.0
_NUM_QUICK = 3
_FAR_ADDRESS = 1 << 62  # of segments that the trace does not have
_TAKEN = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_GIVEN_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


def found(folder: Path, *, is_quick: bool, on_progress: Any = print) -> Found:
    """Replay the traces in a folder of measurements; the smallest few for a quick look."""
    paths = [path for path in sorted(folder.glob("traces/*.json*")) if path.name != "index.json"]
    if is_quick:
        paths = sorted(paths, key=lambda path: path.stat().st_size)[:_NUM_QUICK]
    rows, unreadable = list[Row](), dict[str, str]()
    replays, far, told = list[Replay](), list[Replay](), list[Replay]()
    for path in paths:
        on_progress(f"replaying {path.name}")
        try:
            trace = read_trace(path)
            replays.append(replay(trace))
            far.append(replay(trace, are_addresses_told=False))
            told.append(replay(replace(trace, start=trace.told_start)))
        except BayplanError as fault:
            unreadable[path.name] = str(fault)
            continue
        rows += _rows(trace, replays[-1])
    worst_pct = _worst_pct(replays)
    claims = {
        "num_traces": len(replays),
        "num_allocations": sum(each.num_allocations for each in replays),
        "num_blocks_elsewhere": sum(each.num_elsewhere for each in replays),
        "num_other_segments": sum(each.num_other_segments for each in replays),
        "worst_reserved_error_pct": worst_pct,
        "target_pct": TARGET_PCT,
        "holds": abs(worst_pct) <= TARGET_PCT,
        "num_peaks_allocated_exact": sum(each.is_peak_exact for each in replays),
        "num_peaks_allocated_as_in_file": sum(row.reported == row.predicted for row in rows[2::3]),
        "num_traces_with_larger_blocks": sum(row.fitted for row in rows) // 3,
        "with_block_sizes_as_in_file": {
            "num_blocks_elsewhere": sum(each.num_elsewhere for each in told),
            "worst_reserved_error_pct": _worst_pct(told),
            "num_peaks_allocated_exact": sum(each.is_peak_exact for each in told),
        },
        "with_ascending_addresses": {"worst_reserved_error_pct": _worst_pct(far)},
        "unreadable": unreadable,
    }
    return Found(rows, claims)


def _worst_pct(replays: "list[Replay]") -> float:
    return max((each.worst_error_pct for each in replays), key=abs, default=0.0)


def _rows(trace: Trace, done: "Replay") -> Iterator[Row]:
    why = (
        f"blocks in use at the start have {trace.grown_bytes} bytes more than the file says: later"
        " allocations lie behind them"
    )
    seen = f"{done.num_elsewhere} of {done.num_allocations} blocks lie elsewhere"
    reserved_bytes = trace.peak_reserved_bytes or done.peak_reserved_bytes
    allocated_bytes = trace.peak_allocated_bytes or done.peak_allocated_bytes
    for quantity, reported, predicted in (
        ("reserved bytes at the worst moment", *done.worst),
        ("peak reserved bytes", reserved_bytes, done.predicted_peak_reserved_bytes),
        ("peak allocated bytes", allocated_bytes, done.predicted_peak_allocated_bytes),
    ):
        is_explained = bool(trace.grown_bytes) and done.is_peak_exact
        yield Row(
            source=f"{trace.source}: {trace.name}",
            model=trace.model,
            device=trace.device,
            quantity=quantity,
            reported=reported,
            predicted=predicted,
            explained=why if reported != predicted and is_explained else "",
            seen=seen if reported != predicted and not is_explained else "",
            fitted=bool(trace.grown_bytes),  # those sizes are from addresses of the same trace
        )


@dataclass
class Replay:
    """What the GPU did, and what our allocator did in its place.

    Attributes:
        worst: reserved bytes of the GPU and ours when they are furthest apart.
        num_elsewhere: blocks at another address than on the GPU.
        num_other_segments: segments at the end that differ in place, size or blocks.
    """

    worst: tuple[int, int] = (0, 0)
    peak_reserved_bytes: int = 0
    predicted_peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    predicted_peak_allocated_bytes: int = 0
    num_allocations: int = 0
    num_elsewhere: int = 0
    num_other_segments: int = 0

    @property
    def worst_error_pct(self) -> float:
        return _error_pct(*self.worst)

    @property
    def is_peak_exact(self) -> bool:
        return self.predicted_peak_allocated_bytes == self.peak_allocated_bytes


def replay(trace: Trace, *, are_addresses_told: bool = True) -> Replay:
    """Replay a trace.

    Args:
        are_addresses_told: new segments lie where the driver put them; else at ascending addresses.
    """
    return _Replaying(trace, are_addresses_told).run()


class _Replaying:
    def __init__(self, trace: Trace, are_addresses_told: bool) -> None:
        self._trace, self._are_addresses_told = trace, are_addresses_told
        self._offers: list[Event] = []  # segments that the GPU took for the request at hand
        self._far_address = _FAR_ADDRESS
        self._allocator = CachingAllocator(trace.settings, driver=self._address)
        self._blocks: dict[int, Block] = self._allocator.restore(trace.start)
        self._sizes = {address: block.size_bytes for address, block in self._blocks.items()}
        self._reserved_bytes = self._allocator.reserved_bytes
        self._allocated_bytes = self._allocator.allocated_bytes
        self._result = Replay()

    def run(self) -> Replay:
        self._compare()
        last = None
        for index, event in enumerate(self._trace.events):
            if event.action in _TAKEN:
                self._reserved_bytes += event.size_bytes
                self._offers.append(event)
            elif event.action in _GIVEN_BACK:
                self._reserved_bytes -= event.size_bytes
                if last not in _GIVEN_BACK:
                    self._allocator.empty_cache()
            else:
                place = f"{self._trace.name}: $.events[{index}]"
                if event.action is Action.ALLOC:
                    self._allocate(event, place)
                elif event.action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
                    self._free(event, place)
                self._compare()
            last = event.action
        return self._ended()

    def _address(self, size_bytes: int) -> int:
        """Where the driver puts a segment."""
        for offer in self._offers if self._are_addresses_told else ():
            if offer.action is Action.SEGMENT_MAP or offer.size_bytes == size_bytes:
                return offer.address
        address, self._far_address = self._far_address, self._far_address + size_bytes
        return address

    def _allocate(self, event: Event, place: str) -> None:
        if event.address in self._blocks:
            raise FileFault(f"{place} allocates what is in use")
        block = self._allocator.allocate(event.size_bytes, stream=event.stream)
        self._offers.clear()
        self._blocks[event.address], self._sizes[event.address] = block, event.block_bytes
        self._allocated_bytes += event.block_bytes
        self._result.num_allocations += 1
        self._result.num_elsewhere += block.address != event.address

    def _free(self, event: Event, place: str) -> None:
        """Either half of a free; the first may lie before the recording."""
        block = self._blocks.get(event.address)
        if block is None:
            raise FileFault(f"{place} frees what is not there")
        if event.address in self._sizes:
            self._allocated_bytes -= self._sizes.pop(event.address)
            self._allocator.request_free(block)
        if event.action is Action.FREE_COMPLETED:
            self._allocator.complete_free(self._blocks.pop(event.address))

    def _compare(self) -> None:
        result, reserved_bytes = self._result, self._reserved_bytes
        result.peak_reserved_bytes = max(result.peak_reserved_bytes, reserved_bytes)
        result.peak_allocated_bytes = max(result.peak_allocated_bytes, self._allocated_bytes)
        now = (reserved_bytes, self._allocator.reserved_bytes)
        if abs(_error_pct(*now)) >= abs(result.worst_error_pct):
            result.worst = now

    def _ended(self) -> Replay:
        self._compare()
        result = self._result
        result.predicted_peak_reserved_bytes = self._allocator.peak_reserved_bytes
        result.predicted_peak_allocated_bytes = self._allocator.peak_allocated_bytes
        result.num_other_segments = len(set(self._trace.end) ^ set(self._allocator.segments()))
        return result


def _error_pct(reported_bytes: int, predicted_bytes: int) -> float:
    return 100 * (predicted_bytes - reported_bytes) / max(reported_bytes, 1)
