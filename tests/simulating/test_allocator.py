"""Each rule of the caching allocator on a case that can be checked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.simulating.allocator import CachingAllocator
from bayplan.simulating.allocator_settings import AllocatorSettings

KIB, MIB = 1 << 10, 1 << 20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def sizes(allocator):
    """Of segments in MiB, by address."""
    return [segment.size_bytes / MIB for segment in allocator.segments()]


@pytest.mark.parametrize(
    ("requested_bytes", "taken_bytes"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(requested_bytes, taken_bytes):
    block = CachingAllocator().allocate(requested_bytes)
    assert (block.size_bytes, block.requested_bytes) == (taken_bytes, requested_bytes)


@pytest.mark.parametrize(
    ("requested_bytes", "segment_mib"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)],
)
def test_a_segment_has_2_or_20_mib_or_the_size_of_a_large_request(requested_bytes, segment_mib):
    allocator = CachingAllocator()
    allocator.allocate(requested_bytes)
    assert sizes(allocator) == [segment_mib]
    assert allocator.reserved_bytes == segment_mib * MIB


def test_small_and_large_requests_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)
    assert sizes(allocator) == [20, 2]


def test_a_rest_is_split_off_if_it_has_512_bytes_in_the_small_pool():
    allocator = CachingAllocator()
    first, second = allocator.allocate(MIB), allocator.allocate(MIB - 512)
    assert (first.address, second.address, second.size_bytes) == (0, MIB, MIB - 512)
    assert allocator.allocate(512).address == 2 * MIB - 512
    assert sizes(allocator) == [2]


@pytest.mark.parametrize(("requested_mib", "block_mib"), [(19, 20), (18.5, 18.5)])
def test_a_rest_is_split_off_if_it_has_more_than_1_mib_in_the_large_pool(requested_mib, block_mib):
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    block = allocator.allocate(int(requested_mib * MIB))
    assert block.size_bytes == block_mib * MIB
    assert allocator.allocated_bytes == block_mib * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_of_equal_ones_the_lowest():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(mib * MIB) for mib in (40, 30, 34, 30)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(30 * MIB).address == 40 * MIB
    assert allocator.allocate(30 * MIB).address == 104 * MIB
    assert allocator.allocate(30 * MIB).address == 70 * MIB
    assert allocator.reserved_bytes == 134 * MIB


def test_a_freed_block_merges_with_both_neighbours():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert allocator.allocate(12 * MIB).address == 0
    assert sizes(allocator) == [20]


def test_free_memory_in_pieces_serves_no_large_request():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(5 * MIB)
    assert sizes(allocator) == [20, 20]
    assert allocator.reserved_bytes - allocator.allocated_bytes == 27 * MIB


def test_a_stream_does_not_take_the_blocks_of_another():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(4 * MIB))
    allocator.allocate(4 * MIB, stream=7)
    assert [segment.stream for segment in allocator.segments()] == [0, 7]


def test_a_block_that_another_stream_uses_is_free_when_that_stream_is_through():
    allocator = CachingAllocator()
    block = allocator.allocate(20 * MIB)
    allocator.record_stream(block, 0)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert allocator.allocate(20 * MIB).address == 20 * MIB
    allocator.synchronize(8)
    assert allocator.allocate(20 * MIB).address == 40 * MIB
    allocator.synchronize(7)
    assert allocator.allocate(20 * MIB).address == 0


def test_an_emptied_cache_keeps_segments_with_a_block_in_use():
    allocator = CachingAllocator()
    whole, part, kept = (allocator.allocate(mib * MIB) for mib in (30, 4, 4))
    allocator.free(whole)
    allocator.free(part)
    allocator.empty_cache()
    assert sizes(allocator) == [20]
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (20 * MIB, kept.size_bytes)
    assert allocator.peak_reserved_bytes == 50 * MIB


def test_cached_segments_go_back_before_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(60 * MIB)
    assert sizes(allocator) == [60]


def test_out_of_memory_tells_what_lies_free_in_pieces():
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    blocks = [allocator.allocate(4 * MIB) for _ in range(15)]
    for block in blocks[::2]:
        allocator.free(block)
    with pytest.raises(DoesNotFit, match=r"8\.0 MiB needs 20\.0 MiB more.* 32\.0 MiB of that"):
        allocator.allocate(8 * MIB)
    assert allocator.allocate(4 * MIB).address == 0


def test_blocks_above_the_split_size_are_kept_whole_for_requests_of_their_size():
    settings = AllocatorSettings(max_split_bytes=32 * MIB)
    allocator = CachingAllocator(settings)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(24 * MIB)
    assert sizes(allocator) == [64, 24]  # too small for an oversized block
    allocator.allocate(40 * MIB)
    assert sizes(allocator) == [64, 24, 40]  # more than 20 MiB below it
    assert allocator.allocate(60 * MIB).size_bytes == 64 * MIB


def test_oversized_blocks_go_back_first_and_only_as_many_as_needed():
    settings = AllocatorSettings(max_split_bytes=32 * MIB)
    allocator = CachingAllocator(settings, capacity_bytes=140 * MIB)
    for block in [allocator.allocate(mib * MIB) for mib in (40, 70, 24)]:
        allocator.free(block)
    allocator.allocate(48 * MIB)
    assert sizes(allocator) == [40, 24, 48]


def test_garbage_collection_gives_back_what_was_idle_longest():
    settings = AllocatorSettings(garbage_collection_threshold=0.5)
    allocator = CachingAllocator(settings, allowed_bytes=200 * MIB)
    old, young, used = (allocator.allocate(mib * MIB) for mib in (60, 58, 30))
    allocator.free(old)
    for _ in range(4):
        allocator.free(used)
        used = allocator.allocate(30 * MIB)
    allocator.free(young)
    allocator.allocate(62 * MIB)
    assert sizes(allocator) == [58, 30, 62]


def test_without_an_allowance_there_is_no_garbage_collection():
    settings = AllocatorSettings(garbage_collection_threshold=0.5)
    allocator = CachingAllocator(settings, capacity_bytes=200 * MIB)
    allocator.free(allocator.allocate(120 * MIB))
    allocator.allocate(60 * MIB, stream=1)
    assert allocator.reserved_bytes == 180 * MIB


def test_an_allowance_bounds_what_is_reserved():
    allocator = CachingAllocator(allowed_bytes=32 * MIB)
    allocator.allocate(20 * MIB)
    with pytest.raises(DoesNotFit, match=r"20\.0 MiB of 32\.0 MiB"):
        allocator.allocate(14 * MIB)


def test_an_expandable_segment_grows_page_by_page():
    allocator = CachingAllocator(EXPANDABLE)
    blocks = [allocator.allocate(mib * MIB) for mib in (15, 15, 15)]
    assert [block.address - blocks[0].address for block in blocks] == [0, 15 * MIB, 30 * MIB]
    assert sizes(allocator) == [60]
    allocator.allocate(KIB)
    assert sizes(allocator) == [60, 2]


def test_expandable_segments_lose_less_to_pieces():
    rigid, expandable = CachingAllocator(), CachingAllocator(EXPANDABLE)
    for allocator in (rigid, expandable):
        for mib in range(11, 41):
            allocator.free(allocator.allocate(mib * MIB))
    assert (rigid.reserved_bytes, expandable.reserved_bytes) == (
        sum(range(12, 41, 2)) * MIB,
        40 * MIB,
    )


def test_a_block_that_can_grow_is_the_last_choice():
    allocator = CachingAllocator(EXPANDABLE)
    hole, _, end = (allocator.allocate(mib * MIB) for mib in (30, 10, 5))
    allocator.free(hole)
    allocator.free(end)
    assert allocator.allocate(4 * MIB).address == hole.address


def test_pages_without_a_block_are_unmapped_and_mapped_again_at_the_lowest_place():
    allocator = CachingAllocator(EXPANDABLE)
    low, middle, high = (allocator.allocate(mib * MIB) for mib in (50, 20, 30))
    allocator.free(low)
    allocator.empty_cache()
    # 100 MiB were mapped; the pages 0 and 1 are free as a whole, and page 2 only by half.
    assert sizes(allocator) == [60]
    assert allocator.allocate(45 * MIB).address == low.address
    assert sizes(allocator) == [100]
    for block in (middle, high):
        allocator.free(block)
    assert allocator.reserved_bytes == 100 * MIB


def test_an_expandable_segment_without_a_block_is_gone():
    allocator = CachingAllocator(EXPANDABLE)
    allocator.free(allocator.allocate(50 * MIB))
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments()) == (0, ())
    allocator.allocate(50 * MIB)
    assert sizes(allocator) == [60]


def test_pages_of_another_pool_are_unmapped_before_memory_runs_out():
    allocator = CachingAllocator(EXPANDABLE, capacity_bytes=80 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(60 * MIB, stream=1)
    assert sizes(allocator) == [60]
    with pytest.raises(DoesNotFit):
        allocator.allocate(40 * MIB)


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE])
def test_a_restored_allocator_goes_on_as_the_one_it_was_taken_from(settings):
    first = CachingAllocator(settings)
    blocks = [first.allocate(mib * MIB) for mib in (30, 4, 6, 70, 5)] + [first.allocate(KIB)]
    for index in (0, 2, 3):
        first.free(blocks[index])
    first.empty_cache()
    second = CachingAllocator(settings)
    live = second.restore(first.segments())
    assert second.segments() == first.segments()
    assert (second.reserved_bytes, second.allocated_bytes, second.requested_bytes) == (
        first.reserved_bytes,
        first.allocated_bytes,
        first.requested_bytes,
    )
    assert sorted(live) == sorted(blocks[index].address for index in (1, 4, 5))
    for mib in (5, 9, 25):
        assert first.allocate(mib * MIB).address == second.allocate(mib * MIB).address


def test_settings_are_read_as_torch_reads_them():
    settings = AllocatorSettings.parse(
        "expandable_segments:True, max_split_size_mb:40,max_non_split_rounding_mb:30,"
        "garbage_collection_threshold:0.5,large_segment_size_mb:32,pinned_use_background_threads:True,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]"
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        large_segment_bytes=32 * MIB,
        max_split_bytes=40 * MIB,
        max_unsplit_rounding_bytes=30 * MIB,
        garbage_collection_threshold=0.5,
        power2_divisions=(8,) * 7 + (2, 4, 2, 4) + (1,) * 5,
    )
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings.parse("roundup_power2_divisions:4").power2_divisions == (4,) * 16


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("expandable_segments:yes", "cannot be 'yes'"),
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("backend:cudaMallocAsync", "is not simulated"),
        ("roundup_power2_divisions:3", "cannot be '3'"),
        ("roundup_power2_divisions:[64]", "cannot be"),
        ("garbage_collection_threshold:1.5", "below 1"),
        ("max_split_size_mb:many", "cannot be 'many'"),
        ("max_split_size_mb:0", "more than 0"),
        ("[[", "cannot read"),
    ],
)
def test_settings_that_cannot_be_understood_are_refused_by_name(text, fault):
    with pytest.raises(UsageError, match=fault):
        AllocatorSettings.parse(text)


def test_sizes_are_rounded_to_fractions_of_powers_of_two_if_so_configured():
    settings = AllocatorSettings.parse("roundup_power2_divisions:4")
    assert settings.rounded(2049) == 2560  # 2048, 2560, 3072, …
    assert settings.rounded(4096) == 4096
    assert settings.rounded(1200) == 1536  # no more than 4 x 512: as without
    assert settings.rounded(9 * MIB) == 10 * MIB


SETTINGS = st.sampled_from(
    [
        AllocatorSettings(),
        EXPANDABLE,
        AllocatorSettings(max_split_bytes=24 * MIB),
        AllocatorSettings(garbage_collection_threshold=0.6),
        AllocatorSettings(power2_divisions=(4,) * 16),
    ]
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["allocate", "allocate", "allocate", "free", "free", "lend", "empty", "sync"]
        ),
        st.one_of(st.integers(1, 3000), st.integers(1, 3 * MIB), st.integers(MIB, 50 * MIB)),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(SETTINGS, STEPS)
def test_blocks_never_overlap_and_no_byte_is_lost(settings, steps):
    allocator = CachingAllocator(settings, capacity_bytes=300 * MIB, allowed_bytes=280 * MIB)
    live = []
    for what, number, stream in steps:
        if what == "allocate":
            try:
                live.append(allocator.allocate(number, stream=stream))
            except DoesNotFit:
                assert allocator.reserved_bytes + settings.segment_bytes(number) > 200 * MIB
        elif what in ("free", "lend") and live:
            block = live.pop(number % len(live))
            if what == "lend":
                allocator.record_stream(block, 1 - stream)
            allocator.free(block)
        elif what == "empty":
            allocator.empty_cache()
        elif what == "sync":
            allocator.synchronize(stream)
        segments = allocator.segments()
        assert sum(segment.size_bytes for segment in segments) == allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes <= 280 * MIB
        assert sum(block.size_bytes for block in live) == allocator.allocated_bytes
        assert sum(block.requested_bytes for block in live) == allocator.requested_bytes
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
        end = 0
        for segment in segments:
            assert segment.address >= end
            end = segment.address
            for address, size_bytes, _ in segment.active:
                assert address >= end
                end = address + size_bytes
            assert end <= segment.address + segment.size_bytes
            end = segment.address + segment.size_bytes
        addresses = {address for segment in segments for address, *_ in segment.active}
        assert {block.address for block in live} <= addresses
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.allocated_bytes, allocator.segments()) == (0, 0, ())
