"""The malloc counter against blocks of known size, real kernels and its own failure modes.

`SLACK_BYTES` is what reading the counter and running Python may add by themselves: argument
blocks, a dictionary that grows, freed garbage. A counted block may exceed what was asked for by
`ROUNDING_BYTES`: one page when glibc maps it, plus alignment.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from bayplan.devices import malloc_counter
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable, compile_counter

MIB = 1 << 20
SLACK_BYTES = 4 * 1024
ROUNDING_BYTES = 4096 + 64

PROBE_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
void *take(size_t size) { return malloc(size); }
void *take_cleared(size_t n, size_t size) { return calloc(n, size); }
void *take_aligned(size_t align, size_t size) { return aligned_alloc(align, size); }
void *take_memalign(size_t align, size_t size) { return memalign(align, size); }
void *resize(void *block, size_t size) { return realloc(block, size); }
void *resize_array(void *block, size_t n, size_t size) { return reallocarray(block, n, size); }
int take_posix(void **block, size_t align, size_t size) {
    return posix_memalign(block, align, size);
}
void drop(void *block) { free(block); }
size_t usable(void *block) { return malloc_usable_size(block); }
void *open_by_name(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }
/* An entry of kind GLOB_DAT and a pointer in data: do they lead elsewhere than the loader says? */
static void *(*volatile pointer)(size_t) = pvalloc;
int num_redirected(void) {
    return ((void *)valloc != dlsym(RTLD_DEFAULT, "valloc")) +
           ((void *)pointer != dlsym(RTLD_DEFAULT, "pvalloc"));
}
int errno_after_drop(void *block) { errno = 77; free(block); return errno; }
int errno_after_take(void) { errno = 77; free(malloc(1 << 20)); return errno; }
"""


def compile_library(folder: Path, name: str, *flags: str) -> Path:
    source = folder / "probe.c"
    source.write_text(PROBE_SOURCE)
    library = folder / name
    command = ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "-o", str(library), str(source), "-ldl"], check=True)
    return library


def load_library(path: Path, handle: int | None = None) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), handle=handle)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for names, result, arguments in (
        ("take", pointer, [size]),
        ("take_cleared take_aligned take_memalign", pointer, [size, size]),
        ("resize", pointer, [pointer, size]),
        ("resize_array", pointer, [pointer, size, size]),
        ("take_posix", ctypes.c_int, [ctypes.POINTER(pointer), size, size]),
        ("drop", None, [pointer]),
        ("usable", size, [pointer]),
        ("errno_after_drop", ctypes.c_int, [pointer]),
        ("open_by_name", pointer, [ctypes.c_char_p]),
    ):
        for name in names.split():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counter")


@pytest.fixture(scope="session", params=["lazy", "now"])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Calls malloc by entries that are bound late (writable) or at once (RELRO)."""
    folder = tmp_path_factory.mktemp("probe")
    flags = [f"-Wl,-z,{request.param}", "-Wl,-z,relro"]
    return load_library(compile_library(folder, f"probe_{request.param}.so", *flags))


@pytest.fixture
def counter(cache_dir: Path) -> Iterator[MallocCounter]:
    with MallocCounter.attach(cache_dir) as counter:
        yield counter


def assert_close(measured: int, expected: int, *, above: int = 0) -> None:
    assert expected - SLACK_BYTES <= measured <= expected + above + SLACK_BYTES


@pytest.mark.parametrize("num_bytes", [100_000, MIB, 64 * MIB + 12])
@pytest.mark.parametrize("make", [torch.empty, numpy.empty], ids=["torch", "numpy"])
def test_array_counts_until_freed(
    counter: MallocCounter, make: Callable[..., object], num_bytes: int
) -> None:
    dtype = torch.uint8 if make is torch.empty else numpy.uint8
    before = counter.live_bytes
    block = make(num_bytes, dtype=dtype)
    assert_close(counter.live_bytes - before, num_bytes, above=ROUNDING_BYTES)
    del block
    assert_close(counter.live_bytes, before)


def test_peak_is_that_of_the_temporary(counter: MallocCounter) -> None:
    kept = torch.empty(8 * MIB, dtype=torch.uint8)
    counter.reset_peak()
    before = counter.live_bytes
    assert counter.peak_bytes - before < SLACK_BYTES
    del kept
    temporary = torch.empty(24 * MIB, dtype=torch.uint8)
    del temporary
    assert_close(counter.peak_bytes - before, 16 * MIB, above=ROUNDING_BYTES)
    assert_close(counter.live_bytes - before, -8 * MIB - ROUNDING_BYTES, above=ROUNDING_BYTES)


def test_older_block_counts_negative(cache_dir: Path, probe: ctypes.CDLL) -> None:
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


def test_every_function_counts(counter: MallocCounter, probe: ctypes.CDLL) -> None:
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


def test_realloc_counts_the_difference(counter: MallocCounter, probe: ctypes.CDLL) -> None:
    before = counter.live_bytes
    block = probe.take(MIB)
    for size in (8 * MIB, 2 * MIB, 300_000, 300_000):
        block = probe.resize(block, size)
        assert_close(counter.live_bytes - before, probe.usable(block))
    block = probe.resize_array(block, 5, MIB)
    assert_close(counter.live_bytes - before, probe.usable(block))
    assert probe.resize(block, 0) is None
    assert_close(counter.live_bytes, before)


def test_failed_calls_change_nothing(counter: MallocCounter, probe: ctypes.CDLL) -> None:
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
def test_threaded_kernels_do_not_drift(counter: MallocCounter, kind: str) -> None:
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


def test_threads_at_once_lose_nothing(counter: MallocCounter, probe: ctypes.CDLL) -> None:
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


def test_scratch_inside_a_kernel_is_seen(counter: MallocCounter) -> None:
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


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_later_library_counts(counter: MallocCounter, tmp_path: Path, binding: str) -> None:
    library = load_library(compile_library(tmp_path, f"late_{binding}.so", f"-Wl,-z,{binding}"))
    counter.start_curve(minimum_bytes=MIB)  # reading the counter would patch the library anyway
    block = library.take(3 * MIB)
    counter.stop_curve()
    assert len(counter.read_curve().times_ns) == 1
    before = counter.live_bytes
    library.drop(block)
    assert_close(counter.live_bytes - before, -3 * MIB - ROUNDING_BYTES, above=ROUNDING_BYTES)


def test_runpath_of_the_caller_still_holds(counter: MallocCounter, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    inner = compile_library(tmp_path / "inner", "libfound_by_runpath.so")
    outer = compile_library(tmp_path, "outer.so", "-Wl,--enable-new-dtags,-rpath,$ORIGIN/inner")
    handle = load_library(outer).open_by_name(inner.name.encode())
    assert handle is not None
    library = load_library(inner, handle)
    before = counter.live_bytes  # reading patches what was loaded by name
    block = library.take(3 * MIB)
    assert_close(counter.live_bytes - before, 3 * MIB, above=ROUNDING_BYTES)
    library.drop(block)


def test_curve_follows_blocks_in_order(counter: MallocCounter, probe: ctypes.CDLL) -> None:
    before, start_ns = counter.live_bytes, time.monotonic_ns()
    counter.start_curve(minimum_bytes=MIB)
    first, second = probe.take(2 * MIB), probe.take(4 * MIB)
    small = probe.take(MIB // 2)
    probe.drop(first)
    probe.drop(second)
    probe.drop(small)
    counter.stop_curve()
    probe.drop(probe.take(2 * MIB))
    curve = counter.read_curve()
    assert curve.num_dropped == 0
    assert len(curve.times_ns) == len(curve.live_bytes) == 4
    times_ns = [start_ns, *curve.times_ns, time.monotonic_ns()]
    assert times_ns == sorted(times_ns)
    expected = [2 * MIB, 6 * MIB, 4 * MIB + MIB // 2, MIB // 2]
    for live, value in zip(curve.live_bytes, expected, strict=True):
        assert_close(live - before, value, above=3 * ROUNDING_BYTES)


def test_full_curve_counts_what_it_drops(counter: MallocCounter, probe: ctypes.CDLL) -> None:
    counter.start_curve(capacity=5, minimum_bytes=MIB)
    for _ in range(10):
        probe.drop(probe.take(MIB))
    curve = counter.read_curve()
    assert len(curve.times_ns) == 5
    assert curve.num_dropped == 15
    counter.start_curve(capacity=100, minimum_bytes=MIB)
    assert counter.read_curve().num_dropped == 0
    assert len(counter.read_curve().times_ns) == 0


def test_curve_needs_room_and_an_attached_counter(cache_dir: Path, probe: ctypes.CDLL) -> None:
    with MallocCounter.attach(cache_dir) as counter:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            counter.start_curve(capacity=0)
        with pytest.raises(OSError, match="events"):
            counter.start_curve(capacity=1 << 61)
        counter.start_curve(minimum_bytes=MIB)
        probe.drop(probe.take(MIB))
    probe.drop(probe.take(MIB))
    assert len(counter.read_curve().times_ns) == 2  # still readable
    with pytest.raises(ValueError, match="detached"):
        counter.start_curve()


def test_nested_attach_shares_one_counter(cache_dir: Path, probe: ctypes.CDLL) -> None:
    with MallocCounter.attach(cache_dir) as outer:
        block = probe.take(2 * MIB)
        with MallocCounter.attach(cache_dir / "unused") as inner:
            assert_close(inner.live_bytes, outer.live_bytes)
            assert inner.live_bytes > MIB
        inner.detach()
        before = outer.live_bytes
        probe.drop(block)
        assert outer.live_bytes < before - MIB
    with MallocCounter.attach(cache_dir) as fresh:
        assert abs(fresh.live_bytes) < SLACK_BYTES


def test_lost_counter_detaches(cache_dir: Path, probe: ctypes.CDLL) -> None:
    library = MallocCounter.attach(cache_dir)._library
    before = library.counter_live()
    probe.drop(probe.take(MIB))
    assert library.counter_peak() == before


def test_detach_restores(cache_dir: Path, probe: ctypes.CDLL) -> None:
    assert probe.num_redirected() == 0
    with MallocCounter.attach(cache_dir) as counter:
        assert probe.num_redirected() == 2
        kept = probe.take(MIB)
    assert probe.num_redirected() == 0
    live, peak = counter.live_bytes, counter.peak_bytes
    block, tensor = probe.take(8 * MIB), torch.empty(8 * MIB)
    probe.drop(kept)
    probe.drop(block)
    del tensor
    assert (counter.live_bytes, counter.peak_bytes) == (live, peak)


def test_read_only_pages_stay_so(cache_dir: Path) -> None:
    def protections() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.split()[1] for line in lines if "libc.so" in line or "libc-" in line]

    before = protections()
    with MallocCounter.attach(cache_dir):
        assert protections() == before
    assert protections() == before


def test_attach_while_threads_run(cache_dir: Path, probe: ctypes.CDLL) -> None:
    is_done = threading.Event()

    def churn() -> None:
        while not is_done.is_set():
            probe.drop(probe.resize(probe.take(100), 5000))

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with MallocCounter.attach(cache_dir) as counter:
            counter.start_curve(minimum_bytes=1, capacity=100)
            assert counter.peak_bytes >= counter.live_bytes - 2 * 5100
    is_done.set()
    for thread in threads:
        thread.join()


def test_compiled_file_is_reused(cache_dir: Path) -> None:
    path = compile_counter(cache_dir)
    modified_ns = path.stat().st_mtime_ns
    assert compile_counter(cache_dir) == path
    assert path.stat().st_mtime_ns == modified_ns
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(malloc_counter, "_library", None)
    with pytest.raises(MeterUnavailable, match=r"no C compiler \(cc, gcc, clang\)"):
        MallocCounter.attach(tmp_path / "cache")


def test_failing_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(MeterUnavailable, match="no such header"):
        compile_counter(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(MeterUnavailable, match="cannot write"):
        compile_counter(compiler)


def test_other_platform_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc_counter, "_library", None)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MeterUnavailable, match="this is darwin"):
        MallocCounter.attach(tmp_path)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, bayplan.devices.malloc_counter; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
