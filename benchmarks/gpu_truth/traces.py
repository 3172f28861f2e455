"""Allocator traces of real GPUs, read and checked: what `replaying.py` replays.

A file is JSON of the format `cuda-allocator-trace/1`, gzipped: the events that torch's memory
history recorded, and the table of segments at the end. Files are untrusted: a fault is named with
its place, and nothing in them is run.

Most recordings begin in the middle of a program, and segments are known at the end only. What was
there at the start follows from undoing the events, last one first. Of a block that was in use then
and is no more at the end, the file guesses the size, mostly as the request rounded up; a later
allocation may show that it was larger.
"""

import gzip
import math
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bayplan.data.errors import BayplanError, FileFault
from bayplan.simulating.allocator import Segment
from bayplan.simulating.allocator_settings import SMALL_SEGMENT_BYTES, AllocatorSettings

__all__ = ["Action", "Event", "Trace", "read_trace", "trace_from"]

_FORMAT = "cuda-allocator-trace/1"
_MAX_FILE_BYTES = 1 << 30  # unzipped
_MAX_ADDRESS = 1 << 62
_LARGE_PAGE_BYTES = 10 * SMALL_SEGMENT_BYTES  # of expandable segments


class Action(StrEnum):
    """What torch's history tells apart."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    SNAPSHOT = "snapshot"
    OUT_OF_MEMORY = "oom"


class Event(NamedTuple):
    """One entry of the history; `block_bytes` is what an allocation took, 0 for others."""

    action: Action
    address: int
    size_bytes: int
    stream: int
    block_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recording on one device.

    Attributes:
        start, end: the segments before the first event and after the last.
        told_start: the former with the sizes of blocks as in the file.
        grown_bytes: how much larger than in the file the blocks at the start are, together.
        config, step: what ran, as far as the file tells.
        kind: "model" where that is enough to run it again.
        start_reserved_bytes, peak_requested_bytes, peak_allocated_bytes, peak_reserved_bytes: by
            the file; None where it does not tell.
    """

    name: str
    source: str
    model: str
    device: str
    settings: AllocatorSettings
    start: tuple[Segment, ...]
    told_start: tuple[Segment, ...]
    events: tuple[Event, ...]
    end: tuple[Segment, ...]
    grown_bytes: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_requested_bytes: int | None = None
    start_reserved_bytes: int | None = None
    kind: str = "model"
    config: dict[str, Any] = field(default_factory=dict)
    step: str = ""
    notes: str = ""


_Block = tuple[int, int, int, int]  # address, bytes, requested, state


class _Peaks(msgspec.Struct):
    """What those who made the file got by replaying it."""

    peak_allocated: int | None = None
    peak_reserved: int | None = None
    peak_requested: int | None = None
    start_reserved: int | None = None


class _File(msgspec.Struct):
    """The fields that a replay needs; others are left alone."""

    format: str
    id: str
    actions: list[str]
    events: list[list[int]]
    block_states: list[str]
    segments: list[tuple[int, int, int, int, int, int, str, bool, list[_Block]]]
    initial_live: list[tuple[int, int, int]]
    source: dict[str, Any] = {}
    config: dict[str, Any] = {}
    kind: str = "model"
    step: str = ""
    notes: str = ""
    gpu: str = ""
    allocator_settings: dict[str, Any] | None = None
    replay: _Peaks = msgspec.field(default_factory=_Peaks)


def read_trace(path: Path) -> Trace:
    """Read a trace from a `.json.gz` file, or from a `.json` one."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES + 1)
    except gzip.BadGzipFile as fault:
        raise FileFault(f"{path}: not a gzip file: {fault}") from None
    except (EOFError, zlib.error) as fault:
        raise FileFault(f"{path}: cut off or damaged: {fault}") from None
    except OSError as fault:
        raise FileFault(f"cannot read {path}: {fault.strerror}") from fault
    if len(content) > _MAX_FILE_BYTES:
        raise FileFault(f"{path}: more than {_MAX_FILE_BYTES} bytes when unzipped")
    return trace_from(content, name=str(path))


def trace_from(content: bytes, *, name: str) -> Trace:
    """Decode and check the JSON of a trace; `name` is what an error calls it."""
    try:
        file = msgspec.json.decode(content, type=_File)
        if file.format != _FORMAT:
            raise ValueError(f"format is {file.format!r}, expected {_FORMAT!r}")
        events = tuple(_events(file))
        end = _sorted(_end(file))
        pieces = _pieces_at_start(events, end)
        live = sorted((address, size, asked) for address, asked, size in file.initial_live)
        larger = _shown_sizes(live, pieces, events)
        return Trace(
            name=file.id,
            source=str(file.source.get("repo", "")),
            model=str(file.config.get("model", "")),
            device=file.gpu,
            settings=_settings(file.allocator_settings or {}),
            start=_sorted(_filled(pieces, live, larger)),
            told_start=_sorted(_filled(pieces, live, {})),
            events=events,
            end=end,
            grown_bytes=sum(larger.get(address, size) - size for address, size, _ in live),
            peak_allocated_bytes=file.replay.peak_allocated,
            peak_reserved_bytes=file.replay.peak_reserved,
            peak_requested_bytes=file.replay.peak_requested,
            start_reserved_bytes=file.replay.start_reserved,
            kind=file.kind,
            config=file.config,
            step=file.step,
            notes=file.notes,
        )
    except RecursionError:
        raise FileFault(f"{name}: nested too deeply to be a trace") from None
    except (msgspec.DecodeError, ValueError) as fault:
        raise FileFault(f"{name}: {fault}") from None


def _settings(told: dict[str, Any]) -> AllocatorSettings:
    """From the environment's text, which newer snapshots have, or from single fields."""
    text = told.get("PYTORCH_CUDA_ALLOC_CONF") or told.get("PYTORCH_ALLOC_CONF")
    try:
        if text:
            return AllocatorSettings.parse(str(text))
        threshold, split = told.get("garbage_collection_threshold"), told.get("max_split_size", -1)
        return AllocatorSettings(
            expandable_segments=bool(told.get("expandable_segments", False)),
            garbage_collection_threshold=float(threshold or 0),
            max_split_bytes=split if split > 0 else math.inf,
        )
    except (BayplanError, TypeError, ValueError) as fault:
        raise ValueError(f"$.allocator_settings: {fault}") from None


def _events(file: _File) -> Iterator[Event]:
    try:
        actions = [Action(word) for word in file.actions]
    except ValueError as fault:
        raise ValueError(f"$.actions: {fault}") from None
    for index, entry in enumerate(file.events):
        place = f"$.events[{index}]"
        if len(entry) < 4 or not 0 <= entry[0] < len(actions):
            raise ValueError(f"{place} is {entry}; expected action, address, bytes, stream, …")
        action, (address, size_bytes, stream) = actions[entry[0]], entry[1:4]
        if not (0 <= address < _MAX_ADDRESS and 0 <= size_bytes < _MAX_ADDRESS):
            raise ValueError(f"{place}: address {address} or bytes {size_bytes} out of range")
        block_bytes = 0
        if action is Action.ALLOC:
            block_bytes = entry[6] if len(entry) > 6 else 0
            if not 0 < size_bytes <= block_bytes < _MAX_ADDRESS:
                raise ValueError(f"{place}: {size_bytes} bytes in a block of {block_bytes}")
        yield Event(action, address, size_bytes, stream, block_bytes)


def _end(file: _File) -> Iterator[Segment]:
    """The table of segments, whose blocks must fill them."""
    for index, entry in enumerate(file.segments):
        address, total, *_, stream, pool, is_expandable, blocks = entry
        place, last, active = f"$.segments[{index}]", address, []
        if pool not in ("small", "large"):
            raise ValueError(f"{place}: pool is {pool!r}, expected 'small' or 'large'")
        for block_index, (begin, size_bytes, requested_bytes, state) in enumerate(blocks):
            if begin != last or size_bytes <= 0 or not 0 <= state < len(file.block_states):
                raise ValueError(f"{place}.blocks[{block_index}] does not begin where one ended")
            last += size_bytes
            if file.block_states[state] != "inactive":
                active.append((begin, size_bytes, requested_bytes))
        if not 0 <= address < last < _MAX_ADDRESS or last != address + total:
            raise ValueError(f"{place}: {total} bytes, but its blocks have {last - address}")
        yield Segment(
            address=address,
            size_bytes=total,
            stream=stream,
            is_small=pool == "small",
            is_expandable=is_expandable,
            active=tuple(active),
        )


def _sorted(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """By address; none may overlap."""
    ordered = tuple(sorted(segments, key=lambda segment: segment.address))
    for first, second in pairwise(ordered):
        if first.address + first.size_bytes > second.address:
            raise ValueError(f"$.segments overlap at {second.address}")
    return ordered


class _Piece(NamedTuple):
    """Memory from the driver: a segment, or mapped pages."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


def _pieces_at_start(events: tuple[Event, ...], end: tuple[Segment, ...]) -> list[_Piece]:
    """What was reserved before the first event, by address."""
    pieces = {
        each.address: _Piece(
            each.address, each.size_bytes, each.stream, each.is_small, each.is_expandable
        )
        for each in end
    }
    for index in range(len(events) - 1, -1, -1):
        action, address, size_bytes, stream, _ = events[index]
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            if not _take(pieces, events[index]):
                raise ValueError(f"$.events[{index}]: no such segment is there afterwards")
        elif action is Action.SEGMENT_FREE:
            is_small = size_bytes == SMALL_SEGMENT_BYTES
            pieces[address] = _Piece(address, size_bytes, stream, is_small, False)
        elif action is Action.SEGMENT_UNMAP:
            is_small = size_bytes % _LARGE_PAGE_BYTES > 0
            pieces[address] = _Piece(address, size_bytes, stream, is_small, True)
    return list(_joined(pieces))


def _take(pieces: dict[int, _Piece], event: Event) -> bool:
    """Undo that a segment was taken, or that pages of one were mapped."""
    if event.action is Action.SEGMENT_ALLOC:
        piece = pieces.pop(event.address, None)
        return piece is not None and piece.size_bytes == event.size_bytes
    begin, end = event.address, event.address + event.size_bytes
    around = next((p for p in pieces.values() if p.address <= begin and end <= p.end), None)
    if around is None or not around.is_expandable:
        return False
    del pieces[around.address]
    if around.address < begin:
        pieces[around.address] = around._replace(size_bytes=begin - around.address)
    if end < around.end:
        pieces[end] = around._replace(address=end, size_bytes=around.end - end)
    return True


def _joined(pieces: dict[int, _Piece]) -> Iterator[_Piece]:
    """By address, mapped pages in a row as one."""
    last: _Piece | None = None
    for _, piece in sorted(pieces.items()):
        is_joined = last is not None and last.is_expandable and last[2:] == piece[2:]
        if last is not None and is_joined and last.end == piece.address:
            last = last._replace(size_bytes=last.size_bytes + piece.size_bytes)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


_Live = tuple[int, int, int]  # address, block and requested bytes of a block in use


def _shown_sizes(
    live: list[_Live], pieces: list[_Piece], events: tuple[Event, ...]
) -> dict[int, int]:
    """The blocks in use at the start that are larger than told, by address.

    Free blocks beside each other are one, and an allocation begins where a free block does. So one
    that does not begin where the block in use before it ends shows that this one is larger.
    """
    begins = sorted(
        {piece.address for piece in pieces}
        | {event.address for event in events if event.action is Action.SEGMENT_ALLOC}
    )
    active = [address for address, *_ in live]
    sizes = {address: size_bytes for address, size_bytes, _ in live}
    next_live = dict(pairwise(active))
    larger: dict[int, int] = {}
    for action, address, *_ in events:
        index = bisect_right(active, address) - 1
        if action is Action.ALLOC:
            begin = begins[bisect_right(begins, address) - 1] if begins else address
            before = active[index] if index >= 0 else -1
            is_gap = begin <= before and before + sizes.get(before, address) < address
            if is_gap and next_live.get(before, address) >= address:
                larger[before] = sizes[before] = address - before
            active.insert(index + 1, address)
        elif action is Action.FREE_COMPLETED and index >= 0 and active[index] == address:
            del active[index]
            sizes.pop(address, None)
    return larger


def _filled(pieces: list[_Piece], live: list[_Live], larger: dict[int, int]) -> Iterator[Segment]:
    """The pieces with their blocks in use."""
    begins = [piece.address for piece in pieces]
    active: list[list[_Live]] = [[] for _ in pieces]
    for address, size_bytes, requested_bytes in live:
        size_bytes = larger.get(address, size_bytes)
        at, place = bisect_right(begins, address) - 1, f"$.initial_live, address {address}"
        if not 0 <= requested_bytes <= size_bytes or not size_bytes:
            raise ValueError(f"{place}: {requested_bytes} bytes in a block of {size_bytes}")
        if at < 0 or address + size_bytes > pieces[at].end:
            raise ValueError(f"{place} is in no segment")
        if active[at] and address < sum(active[at][-1][:2]):
            raise ValueError(f"{place} is inside another block")
        active[at].append((address, size_bytes, requested_bytes))
    for piece, blocks in zip(pieces, active, strict=True):
        yield Segment(**piece._asdict(), active=tuple(blocks))
