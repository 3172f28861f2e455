"""The malloc counter against blocks of known size, real kernels and many threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from bayplan.devices.malloc_counter import MallocCounter

MIB = 1 << 20
SLACK_BYTES = 4 * 1024
ROUNDING_BYTES = 4096 + 64  # one page when glibc maps the block, plus alignment

Close = Callable[..., None]
Maker = Callable[..., Path]
Loader = Callable[..., ctypes.CDLL]


@pytest.mark.parametrize("num_bytes", [100_000, MIB, 64 * MIB + 12])
@pytest.mark.parametrize("make", [torch.empty, numpy.empty], ids=["torch", "numpy"])
def test_array_counts_until_freed(
    counter: MallocCounter, make: Callable[..., object], num_bytes: int, assert_close: Close
) -> None:
    dtype = torch.uint8 if make is torch.empty else numpy.uint8
    before = counter.live_bytes
    block = make(num_bytes, dtype=dtype)
    assert_close(counter.live_bytes - before, num_bytes, above=ROUNDING_BYTES)
    del block
    assert_close(counter.live_bytes, before)


def test_peak_is_that_of_the_temporary(counter: MallocCounter, assert_close: Close) -> None:
    kept = torch.empty(8 * MIB, dtype=torch.uint8)
    counter.reset_peak()
    before = counter.live_bytes
    assert counter.peak_bytes - before < SLACK_BYTES
    del kept
    temporary = torch.empty(24 * MIB, dtype=torch.uint8)
    del temporary
    assert_close(counter.peak_bytes - before, 16 * MIB, above=ROUNDING_BYTES)
    assert_close(counter.live_bytes - before, -8 * MIB - ROUNDING_BYTES, above=ROUNDING_BYTES)


def test_older_block_counts_negative(
    cache_dir: Path, probe: ctypes.CDLL, assert_close: Close
) -> None:
    blocks = [probe.take(size) for size in (100, 10_000, 5 * MIB)]
    num_bytes = sum(map(probe.usable, blocks))
    with MallocCounter.attach(cache_dir) as counter:
        before = counter.live_bytes
        for block in blocks:
            probe.drop(block)
        assert_close(counter.live_bytes - before, -num_bytes)


def take_posix(probe: ctypes.CDLL, num_bytes: int) -> int | None:
    block = ctypes.c_void_p()
    assert probe.take_posix(ctypes.byref(block), 64, num_bytes) == 0
    return block.value


def test_every_function_counts(
    counter: MallocCounter, probe: ctypes.CDLL, assert_close: Close
) -> None:
    for take in (
        lambda: probe.take(3 * MIB),
        lambda: probe.take_cleared(3, MIB),
        lambda: probe.take_aligned(64, 3 * MIB),
        lambda: probe.take_memalign(64, 3 * MIB),
        lambda: take_posix(probe, 3 * MIB),
        lambda: probe.resize(None, 3 * MIB),
        lambda: probe.resize_array(None, 3, MIB),
    ):
        before = counter.live_bytes
        block = take()
        assert_close(counter.live_bytes - before, probe.usable(block))
        probe.drop(block)
        assert_close(counter.live_bytes, before)


def test_realloc_counts_the_difference(
    counter: MallocCounter, probe: ctypes.CDLL, assert_close: Close
) -> None:
    before = counter.live_bytes
    block = probe.take(MIB)
    for size in (8 * MIB, 2 * MIB, 300_000, 300_000):
        block = probe.resize(block, size)
        assert_close(counter.live_bytes - before, probe.usable(block))
    block = probe.resize_array(block, 5, MIB)
    assert_close(counter.live_bytes - before, probe.usable(block))
    assert probe.resize(block, 0) is None
    assert_close(counter.live_bytes, before)


def test_failed_calls_change_nothing(
    counter: MallocCounter, probe: ctypes.CDLL, assert_close: Close
) -> None:
    block = probe.take(MIB)
    before = counter.live_bytes
    unchanged = ctypes.c_void_p(123)
    assert probe.resize(block, 1 << 62) is None
    assert probe.resize_array(block, 1 << 40, 1 << 40) is None
    assert probe.take(1 << 62) is None
    assert probe.take_cleared(1 << 40, 1 << 40) is None
    assert probe.take_posix(ctypes.byref(unchanged), 3, 100) != 0
    assert probe.take_posix(ctypes.byref(unchanged), 64, 1 << 62) != 0
    probe.drop(None)
    assert_close(counter.live_bytes, before)
    probe.drop(block)


def test_errno_survives_counting(counter: MallocCounter, probe: ctypes.CDLL) -> None:
    counter.start_curve(minimum_bytes=1)
    assert probe.errno_after_take() == 77
    assert probe.errno_after_drop(probe.take(100)) == 77
    counter.stop_curve()


@pytest.fixture
def two_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", ["matmul", "conv2d"])
def test_threaded_kernels_do_not_drift(
    counter: MallocCounter, kind: str, assert_close: Close
) -> None:
    inputs = torch.randn(4, 8, 48, 48, requires_grad=True)
    weight = torch.randn(16, 8, 3, 3, requires_grad=True)
    matrix = torch.randn(300, 300, requires_grad=True)

    def step() -> None:
        if kind == "matmul":
            (matrix @ matrix).sum().backward()
        else:
            torch.nn.functional.conv2d(inputs, weight, padding=1).sum().backward()
        inputs.grad = weight.grad = matrix.grad = None

    for _ in range(3):
        step()
    before = counter.live_bytes
    for _ in range(20):
        step()
    assert_close(counter.live_bytes, before)


def test_threads_at_once_lose_nothing(
    counter: MallocCounter, probe: ctypes.CDLL, assert_close: Close
) -> None:
    def churn() -> None:  # ctypes lets go of the interpreter lock, so these overlap
        for size in range(1, 3000):
            probe.drop(probe.resize(probe.take(size), 2 * size))

    counter.start_curve(minimum_bytes=1, capacity=1000)
    threads = [threading.Thread(target=churn) for _ in range(4)]
    before = counter.live_bytes
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close(counter.live_bytes, before)
    times_ns = counter.read_curve().times_ns
    assert list(times_ns) == sorted(times_ns)


def test_scratch_inside_a_kernel_is_seen(counter: MallocCounter, assert_close: Close) -> None:
    inputs, weight = torch.randn(4, 32, 64, 64), torch.randn(32, 32, 3, 3)
    with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():  # unfolds the input
        torch.nn.functional.conv2d(inputs, weight)
        counter.reset_peak()
        before = counter.live_bytes
        output = torch.nn.functional.conv2d(inputs, weight)
    unfolded_bytes = 32 * 3 * 3 * 62 * 62 * 4
    assert counter.peak_bytes - before > output.nbytes + unfolded_bytes
    assert_close(counter.live_bytes - before, output.nbytes, above=ROUNDING_BYTES)


def test_training_does_not_drift(counter: MallocCounter) -> None:
    layers = (torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU())
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(16 * 30 * 30, 10))
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    lives, peaks = [], []
    for _ in range(8):
        counter.reset_peak()
        before = counter.live_bytes
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        lives.append(counter.live_bytes)
        peaks.append(counter.peak_bytes - before)
    assert max(lives[2:]) - min(lives[2:]) < SLACK_BYTES
    assert max(peaks[2:]) - min(peaks[2:]) < SLACK_BYTES
