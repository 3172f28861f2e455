"""Attaching the malloc counter: what it finds, what it leaves behind, and where it cannot."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bayplan.devices import malloc_counter
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable

MIB = 1 << 20
SLACK_BYTES = 4 * 1024
ROUNDING_BYTES = 4096 + 64  # one page when glibc maps the block, plus alignment

Close = Callable[..., None]
Maker = Callable[..., Path]
Loader = Callable[..., ctypes.CDLL]


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_later_library_counts(
    counter: MallocCounter,
    tmp_path: Path,
    binding: str,
    assert_close: Close,
    compile_library: Maker,
    load_library: Loader,
) -> None:
    library = load_library(compile_library(tmp_path, f"late_{binding}.so", f"-Wl,-z,{binding}"))
    counter.start_curve(minimum_bytes=MIB)  # reading the counter would patch the library anyway
    block = library.take(3 * MIB)
    counter.stop_curve()
    assert len(counter.read_curve().times_ns) == 1
    before = counter.live_bytes
    library.drop(block)
    assert_close(counter.live_bytes - before, -3 * MIB - ROUNDING_BYTES, above=ROUNDING_BYTES)


def test_runpath_of_the_caller_still_holds(
    counter: MallocCounter,
    tmp_path: Path,
    assert_close: Close,
    compile_library: Maker,
    load_library: Loader,
) -> None:
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


def test_nested_attach_shares_one_counter(
    cache_dir: Path, probe: ctypes.CDLL, assert_close: Close
) -> None:
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
    monkeypatch.setattr(malloc_counter, "_library", None)
    with pytest.raises(MeterUnavailable, match="no such header"):
        MallocCounter.attach(tmp_path / "cache")


def test_other_platform_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc_counter, "_library", None)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MeterUnavailable, match="this is darwin"):
        MallocCounter.attach(tmp_path)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, bayplan.devices.malloc_counter; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code = (
        "import sys; from bayplan.devices.malloc_counter import MallocCounter\n"
        "with MallocCounter.attach(sys.argv[1]) as counter:\n"
        "    block = bytearray(1 << 20)\n"
        "    assert counter.live_bytes >= 1 << 20\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", code, str(tmp_path / "file" / "cache")]
    subprocess.run(command, check=True, env=environment)
    assert list(folder.iterdir()) == []
