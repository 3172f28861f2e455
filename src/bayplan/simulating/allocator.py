"""The caching allocator that torch puts between tensors and a CUDA device, simulated.

A device runs out of *reserved* memory: the segments that the allocator took from the driver and
keeps for reuse. They follow from the sequence of allocations and frees alone, by the rules below.
`benchmarks/gpu_truth` holds them against traces of real GPUs.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from bayplan.data.errors import DoesNotFit
from bayplan.data.units import format_bytes, round_up
from bayplan.simulating.allocator_settings import (
    MAX_SMALL_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)

__all__ = ["Block", "CachingAllocator", "Pool", "Segment"]

# NOTE [ Rules of the caching allocator ]
# As in torch 2.1 to 2.13, c10/cuda/CUDACachingAllocator.cpp; private pools of CUDA graphs left out.
# 1. A request is rounded up to 512 bytes, or to a fraction of a power of two if so configured.
# 2. Up to 1 MiB it is served from the small pool, else from the large one. Every stream has its own
#    two pools, and a segment stays in its pool.
# 3. The smallest free block that is large enough is taken; of equal ones, that of lowest address.
# 4. The rest of it is split off if it has 512 bytes (small pool) or more than 1 MiB (large pool).
# 5. Without such a block the driver is asked for a segment: of 2 MiB for a small request, 20 MiB
#    for one below 10 MiB, else the request rounded up to 2 MiB.
# 6. A freed block merges with the free blocks beside it in its segment, at once. One that other
#    streams have used is freed when those are through with it.
# 7. If the driver has no more, all segments without a block in use go back to it, and it is asked
#    again; `empty_cache` of torch does the same.
# 8. Blocks of `max_split_bytes` or more are oversized: not split, given only to requests that are
#    oversized as well and little smaller, and given back to the driver before all others (7).
# 9. With a garbage collection threshold, old segments without a block in use go back before a new
#    one is taken, while more than that share of the allowed memory is reserved.
# 10. An expandable segment is a range of addresses to which pages are mapped as needed, of 2 MiB in
#    the small pool and 20 MiB in the large one, at the lowest place with room. Rests of 512 bytes
#    are split off in both pools. For best fit, a block before unmapped addresses is as large as it
#    may grow.

_RANGE_BYTES = 1 << 47  # of addresses for one expandable segment, never used up


@dataclass(eq=False, slots=True)
class Pool:
    """The blocks of one stream and size class that are not in use, ready for searching."""

    stream: int
    is_small: bool
    free: list[tuple[int, int, "Block"]] = field(default_factory=list)  # by size, then address
    unmapped: list[tuple[int, "Block"]] = field(default_factory=list)  # by address

    def add(self, block: "Block") -> None:
        if block.is_mapped:
            insort(self.free, (block.size_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: "Block") -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses that is in use, free or not yet mapped, between its neighbours.

    Attributes:
        requested_bytes: of the tensor in it; 0 while not in use.
        is_active: in use, or freed while other streams may still read it.
        origin: where its expandable segment begins, of which pages are counted; None in others.
        used_on: other streams that use it.
        idle_since: the number of searches in large pools when it became free.
    """

    pool: Pool
    address: int
    size_bytes: int
    requested_bytes: int = 0
    is_active: bool = False
    is_mapped: bool = True
    origin: int | None = None
    before: "Block | None" = None
    after: "Block | None" = None
    used_on: set[int] = field(default_factory=set)
    idle_since: int = 0

    @property
    def is_whole_segment(self) -> bool:
        return self.origin is None and self.before is None and self.after is None

    @property
    def growable_bytes(self) -> int:
        """Its size, and that of the unmapped addresses behind it (10)."""
        after = self.after
        return self.size_bytes + (after.size_bytes if after and not after.is_mapped else 0)

    def cut(self, size_bytes: int) -> "Block":
        """Keep the first bytes, return a block of the rest."""
        rest = Block(self.pool, self.address + size_bytes, self.size_bytes - size_bytes)
        rest.is_mapped, rest.origin = self.is_mapped, self.origin
        rest.before, rest.after, self.after = self, self.after, rest
        if rest.after is not None:
            rest.after.before = rest
        self.size_bytes = size_bytes
        return rest

    def absorb(self, other: "Block | None") -> None:
        """Take over the neighbour, if that is in no use either (6); this one is in no pool now."""
        if other is None or other.is_active or other.is_mapped != self.is_mapped:
            return
        self.pool.remove(other)
        self.size_bytes += other.size_bytes
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Memory taken from the driver, or a mapped part of an expandable segment.

    Attributes:
        active: address, size and requested bytes of each block in use, by address.
    """

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    active: tuple[tuple[int, int, int], ...]


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        allocated_bytes: of blocks in use, as `memory_allocated` of torch tells.
        requested_bytes: of the tensors in them.
        reserved_bytes: of all segments, as `memory_reserved` of torch tells.
        peak_allocated_bytes, peak_reserved_bytes: the largest so far.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(3 << 20)
        >>> allocator.allocated_bytes >> 20, allocator.reserved_bytes >> 20
        (3, 20)
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity_bytes: int | None = None,
        allowed_bytes: int | None = None,
        driver: Callable[[int], int] | None = None,
    ) -> None:
        """Begin with no segment.

        Args:
            settings: torch's own by default.
            capacity_bytes: what the driver has; None for enough.
            allowed_bytes: what `set_per_process_memory_fraction` of torch allows; without it
                there is no garbage collection.
            driver: the address of new memory by its size; ascending ones by default.
        """
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes, self.allowed_bytes = capacity_bytes, allowed_bytes
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._driver = driver or self._next_address
        self._end_address = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._active: set[Block] = set()
        self._pending: list[Block] = []
        self._num_searches = 0

    def allocate(self, requested_bytes: int, *, stream: int = 0) -> Block:
        """Serve a tensor.

        Raises:
            DoesNotFit: also after everything that is not in use went back to the driver.
        """
        assert requested_bytes > 0, "torch allocates nothing for empty tensors"
        size_bytes = self.settings.rounded(requested_bytes)
        pool = self._pool(stream, size_bytes <= MAX_SMALL_BYTES)
        block = self._cached(pool, size_bytes) or self._fresh(pool, size_bytes)
        if self._is_split(block, size_bytes):
            self._keep(block.cut(size_bytes))
        return self._use(block, requested_bytes)

    def record_stream(self, block: Block, stream: int) -> None:
        """Another stream uses a block (6), as `Tensor.record_stream` tells."""
        if stream != block.pool.stream:
            block.used_on.add(stream)

    def free(self, block: Block) -> None:
        """Drop a tensor; its block is free when the streams that used it are through (6)."""
        self.request_free(block)
        if block.used_on:
            self._pending.append(block)
        else:
            self.complete_free(block)

    def synchronize(self, stream: int | None = None) -> None:
        """A stream, or all of them, are through with what was dropped before."""
        for block in self._pending:
            block.used_on -= block.used_on if stream is None else {stream}
        done = [block for block in self._pending if not block.used_on]
        self._pending = [block for block in self._pending if block.used_on]
        for block in done:
            self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """The first half of `free`: the block counts as not allocated."""
        assert block.is_active, "freed twice"
        self.allocated_bytes -= block.size_bytes
        self.requested_bytes -= block.requested_bytes

    def complete_free(self, block: Block) -> None:
        """The second half of `free`: the block can be used again."""
        self._active.remove(block)
        block.is_active, block.requested_bytes = False, 0
        block.absorb(block.before)
        block.absorb(block.after)
        self._keep(block)

    def empty_cache(self) -> None:
        """Give back all that has no block in use (7)."""
        self.synchronize()
        for pool in self._pools.values():
            for *_, block in pool.free[:]:
                if block.origin is not None:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    def segments(self) -> tuple[Segment, ...]:
        """What is reserved now, by address."""
        firsts = [
            block
            for block in self._all_blocks()
            if block.is_mapped and (block.before is None or not block.before.is_mapped)
        ]
        return tuple(map(_segment_from, sorted(firsts, key=lambda block: block.address)))

    def restore(self, segments: Iterable[Segment]) -> dict[int, Block]:
        """Go on from segments of another allocator; returns the blocks in use by address."""
        blocks: dict[int, Block] = {}
        ends: dict[Pool, Block] = {}  # the unmapped addresses behind expandable segments
        for segment in sorted(segments, key=lambda segment: segment.address):
            rest: Block | None = self._restored(segment, ends)
            for address, size_bytes, requested_bytes in segment.active:
                assert rest is not None, "blocks in use lie in their segment"
                block, rest = rest, None
                if address > block.address:
                    gap, block = block, block.cut(address - block.address)
                    self._keep(gap)
                if size_bytes < block.size_bytes:
                    rest = block.cut(size_bytes)
                blocks[address] = self._use(block, requested_bytes)
            if rest is not None:
                self._keep(rest)
        for end in ends.values():
            end.pool.add(end)
        return blocks

    def _restored(self, segment: Segment, ends: dict[Pool, Block]) -> Block:
        """A segment as one block; mapped parts of one pool lie in one range of addresses."""
        pool, address = self._pool(segment.stream, segment.is_small), segment.address
        self._reserve(segment.size_bytes)
        if not segment.is_expandable:
            self._end_address = max(self._end_address, address + segment.size_bytes)
            return Block(pool, address, segment.size_bytes)
        block = ends.get(pool) or Block(
            pool, address, _RANGE_BYTES, is_mapped=False, origin=address
        )
        if address > block.address:
            gap, block = block, block.cut(address - block.address)
            pool.add(gap)
        ends[pool] = block.cut(segment.size_bytes)
        block.is_mapped = True
        return block

    def _pool(self, stream: int, is_small: bool) -> Pool:
        return self._pools.setdefault((stream, is_small), Pool(stream, is_small))

    def _all_blocks(self) -> Iterator[Block]:
        yield from self._active
        for pool in self._pools.values():
            for *_, block in pool.free:
                yield block

    def _use(self, block: Block, requested_bytes: int) -> Block:
        block.is_active, block.requested_bytes = True, requested_bytes
        self._active.add(block)
        self.allocated_bytes += block.size_bytes
        self.requested_bytes += requested_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def _keep(self, block: Block) -> None:
        block.idle_since = self._num_searches
        block.pool.add(block)

    def _is_split(self, block: Block, size_bytes: int) -> bool:
        rest_bytes = block.size_bytes - size_bytes
        if block.pool.is_small or self.settings.expandable_segments:
            return rest_bytes >= MIN_BLOCK_BYTES
        return rest_bytes > MAX_SMALL_BYTES and size_bytes < self.settings.max_split_bytes

    def _cached(self, pool: Pool, size_bytes: int) -> Block | None:
        """The best fit, taken out of its pool (3, 8, 10)."""
        self._num_searches += not pool.is_small
        free, index = pool.free, bisect_left(pool.free, (size_bytes,))
        if self.settings.expandable_segments:
            while (
                index + 1 < len(free)
                and free[index][2].origin is not None
                and free[index + 1][2].growable_bytes < free[index][2].growable_bytes
            ):
                index += 1
        else:
            while index < len(free) and free[index][2].origin is not None:
                index += 1
        if index == len(free):
            return None
        block, oversized_bytes = free[index][2], self.settings.max_split_bytes
        if size_bytes >= oversized_bytes:
            is_good = block.size_bytes < size_bytes + self.settings.max_unsplit_rounding_bytes
        else:
            is_good = block.size_bytes < oversized_bytes
        if is_good:
            del free[index]
        return block if is_good else None

    def _fresh(self, pool: Pool, size_bytes: int) -> Block:
        """A block of new memory, if need be after giving some back (5, 7, 8, 9)."""
        self._collect_garbage()
        block = self._new(pool, size_bytes)
        if block is None and self._release_oversized(pool, size_bytes):
            block = self._new(pool, size_bytes)
        if block is None:
            self.empty_cache()
            block = self._new(pool, size_bytes)
        if block is None:
            limits = (self.capacity_bytes, self.allowed_bytes)
            limit_bytes = min(each for each in limits if each is not None)
            raise DoesNotFit(
                f"the device is out of memory: a block of {format_bytes(size_bytes)} needs"
                f" {format_bytes(self.settings.segment_bytes(size_bytes))} more, reserved are"
                f" {format_bytes(self.reserved_bytes)} of {format_bytes(limit_bytes)}, and"
                f" {format_bytes(self.reserved_bytes - self.allocated_bytes)} of that lie free in"
                " pieces; the allocator setting expandable_segments:True leaves fewer pieces"
            )
        return block

    def _new(self, pool: Pool, size_bytes: int) -> Block | None:
        segment_bytes = self.settings.segment_bytes(size_bytes)
        allowed_bytes = math.inf if self.allowed_bytes is None else self.allowed_bytes
        if self.reserved_bytes + segment_bytes > allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expanded(pool, size_bytes)
        if not self._has(segment_bytes):
            return None
        self._reserve(segment_bytes)
        return Block(pool, self._driver(segment_bytes), segment_bytes)

    def _next_address(self, size_bytes: int) -> int:
        address, self._end_address = self._end_address, self._end_address + size_bytes
        return address

    def _has(self, size_bytes: int) -> bool:
        return (
            self.capacity_bytes is None or self.reserved_bytes + size_bytes <= self.capacity_bytes
        )

    def _reserve(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _release_oversized(self, pool: Pool, size_bytes: int) -> bool:
        """Give back the smallest oversized block that is enough, or several, largest first (8)."""
        if self.settings.max_split_bytes == math.inf:
            return False
        needed_bytes = max(size_bytes, self.settings.max_split_bytes)
        index = bisect_left(pool.free, (needed_bytes,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released_bytes = 0
        while released_bytes < needed_bytes and pool.free:
            largest = pool.free[-1][2]
            if largest.size_bytes < self.settings.max_split_bytes:
                break
            released_bytes += largest.size_bytes
            self._release(largest)
        return released_bytes >= needed_bytes

    def _collect_garbage(self) -> None:
        """Give back segments that were idle for longer than the mean, until it is enough (9)."""
        threshold = self.settings.garbage_collection_threshold
        if not threshold or self.allowed_bytes is None:
            return
        target_bytes = int(threshold * self.allowed_bytes)
        while self.reserved_bytes > target_bytes:
            idle = [
                block
                for pool in self._pools.values()
                if not pool.is_small
                for *_, block in pool.free
                if block.is_whole_segment
            ]
            if not idle:
                return
            mean = sum(block.idle_since for block in idle) / len(idle)
            for block in idle:
                if block.idle_since <= mean:
                    self._release(block)

    def _expanded(self, pool: Pool, size_bytes: int) -> Block | None:
        """The lowest free addresses that a block can have, mapped where they are not (10)."""
        block = self._expandable(pool, size_bytes)
        if not block.is_mapped and not self._map(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            after = block.after
            assert after is not None, "unmapped addresses end a segment"
            if not self._map(after, min(size_bytes - block.size_bytes, after.size_bytes)):
                return None
            block = after  # which has taken over the one before
        pool.remove(block)
        return block

    def _expandable(self, pool: Pool, size_bytes: int) -> Block:
        """Where free and unmapped addresses with enough room begin."""
        for _, block in pool.unmapped:
            if block.before is not None and not block.before.is_active:
                block = block.before
            room_bytes, behind = 0, block
            while room_bytes < size_bytes and behind is not None and not behind.is_active:
                room_bytes, behind = room_bytes + behind.size_bytes, behind.after
            if room_bytes >= size_bytes:
                return block
        address = self._driver(_RANGE_BYTES)
        block = Block(pool, address, _RANGE_BYTES, is_mapped=False, origin=address)
        pool.add(block)
        return block

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Map whole pages to the beginning of unmapped addresses, if there are any left."""
        size_bytes = round_up(size_bytes, self._page_bytes(block))
        if not self._has(size_bytes):
            return False
        block.pool.remove(block)
        if size_bytes < block.size_bytes:
            block.pool.add(block.cut(size_bytes))
        block.is_mapped = True
        self._reserve(size_bytes)
        block.absorb(block.before)
        block.absorb(block.after)
        self._keep(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that are wholly within a free block."""
        assert block.origin is not None, "an expandable segment has an origin"
        page_bytes, offset = self._page_bytes(block), block.address - block.origin
        begin = round_up(offset, page_bytes)
        end = (offset + block.size_bytes) // page_bytes * page_bytes
        if begin >= end:
            return
        block.pool.remove(block)
        if begin > offset:
            rest = block.cut(begin - offset)
            self._keep(block)
            block = rest
        if end - begin < block.size_bytes:
            self._keep(block.cut(end - begin))
        block.is_mapped = False
        self.reserved_bytes -= end - begin
        block.absorb(block.before)
        block.absorb(block.after)
        if block.before is not None or block.after is not None:
            block.pool.add(block)

    def _page_bytes(self, block: Block) -> int:
        return SMALL_SEGMENT_BYTES if block.pool.is_small else self.settings.large_segment_bytes


def _segment_from(first: Block) -> Segment:
    """The mapped blocks from this one on."""
    end, active, block = first.address, [], first
    while block is not None and block.is_mapped:
        end += block.size_bytes
        if block.is_active:
            active.append((block.address, block.size_bytes, block.requested_bytes))
        block = block.after
    return Segment(
        address=first.address,
        size_bytes=end - first.address,
        stream=first.pool.stream,
        is_small=first.pool.is_small,
        is_expandable=first.origin is not None,
        active=tuple(active),
    )
