"""The file lane where it can go wrong: no directory, no space, failing copies, killed processes.

All faults are real ones: a full memory filesystem (where mounting is allowed), the limit on a
file's size (which any user may lower), a file cut short, signals.
"""

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bayplan.running.swaps.lanes import FileLane, TierError, lies_in_memory
from bayplan.running.swaps.tier import SwapStore, TicketState

CPU = torch.device("cpu")
MIB = 2**20


def open_tier_in(directory: Path, capacity_bytes: int = 4 * MIB) -> SwapStore:
    return SwapStore(FileLane(CPU, capacity_bytes=capacity_bytes, directory=directory))


def noise(size_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)


@contextmanager
def file_size_limit(size_bytes: int):
    """Lower the limit that a file of this process may grow or be written to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda tmp_path: tmp_path / "missing", "No such file or directory"),
        (lambda tmp_path: Path(__file__), "Not a directory"),
        (lambda tmp_path: Path("/proc"), "No such file or directory|Permission denied"),
    ],
    ids=["missing", "file", "not writable"],
)
def test_directory_that_cannot_be_used_is_named(tmp_path, make, reason):
    directory = make(tmp_path)
    before = open_files()
    with pytest.raises(TierError, match=reason) as caught:
        open_tier_in(directory)
    assert str(directory) in str(caught.value)
    assert "--swap-dir" in str(caught.value)
    assert open_files() == before


def test_full_disk_says_needed_and_free_bytes(small_disk):
    before = open_files()
    with pytest.raises(TierError, match=r"needs 9\.0 MiB .* 8\.0 MiB are free") as caught:
        open_tier_in(small_disk, 9 * MIB)
    assert str(small_disk) in str(caught.value)
    assert "--swap-size" in str(caught.value)
    assert open_files() == before
    open_tier_in(small_disk, 8 * MIB).close()  # what was taken in vain is free again


def test_disk_that_fills_up_later_does_no_harm(small_disk):
    with open_tier_in(small_disk, 4 * MIB) as tier:
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "log").write_bytes(bytes(5 * MIB))
        tensor = noise(4 * MIB)
        ticket = tier.begin_out(tensor)
        tier.end_out(ticket)
        new = tier.begin_in(ticket)
        tier.end_in(ticket)
        assert torch.equal(new, tensor)


def test_space_beyond_the_limit_on_files_is_refused(tmp_path):
    with (
        file_size_limit(2 * MIB),
        pytest.raises(TierError, match=r"needs 4\.0 MiB .* are free there \(File too large\)"),
    ):
        open_tier_in(tmp_path)
    open_tier_in(tmp_path).close()


def test_failed_copy_out_keeps_the_tensor_and_frees_the_slot(tmp_path):
    with open_tier_in(tmp_path) as tier:
        tensor = noise(3 * MIB)
        wanted = tensor.clone()
        with file_size_limit(1 * MIB):  # a short write, then an error
            ticket = tier.begin_out(tensor)
            del tensor
            with pytest.raises(TierError, match=r"copy out of 3\.0 MiB.*File too large") as caught:
                tier.end_out(ticket)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EFBIG
        assert ticket.state is TicketState.DONE
        assert ticket.tensor is not None
        assert torch.equal(ticket.tensor, wanted)
        assert (tier.used_bytes, tier.num_out) == (0, 0)
        again = tier.begin_out(ticket.tensor)
        tier.end_out(again)
        new = tier.begin_in(again)
        tier.end_in(again)
        assert torch.equal(new, wanted)


def test_failed_copy_does_not_touch_the_next(tmp_path):
    with open_tier_in(tmp_path) as tier:
        first, second = noise(MIB), noise(MIB)
        with file_size_limit(MIB):
            good, bad = tier.begin_out(first), tier.begin_out(second)
            with pytest.raises(TierError):
                tier.end_out(bad)
            tier.end_out(good)
        assert bad.tensor is second
        new = tier.begin_in(good)
        tier.end_in(good)
        assert torch.equal(new, first)


def test_failed_copy_in_can_be_tried_again(tmp_path):
    with open_tier_in(tmp_path) as tier:
        tensor = noise(MIB)
        ticket = tier.begin_out(tensor)
        tier.end_out(ticket)
        file = tier._lane._file.fileno()
        os.ftruncate(file, MIB // 2)
        tier.begin_in(ticket)
        with pytest.raises(TierError, match=r"ended after 524288 of 1048576 bytes"):
            tier.end_in(ticket)
        assert (ticket.state, ticket.tensor) == (TicketState.OUTSIDE, None)
        os.pwrite(file, tensor.numpy().tobytes(), ticket.offset_bytes)
        new = tier.begin_in(ticket)
        tier.end_in(ticket)
        assert torch.equal(new, tensor)
        assert tier.used_bytes == 0


def test_short_writes_and_reads_go_on(tmp_path, monkeypatch):
    """Linux moves at most 2 GiB in one call; here it gets less to move, so it moves less."""
    calls = []

    def shortened(real):
        def move(file, buffers, offset):
            calls.append(real.__name__)
            return real(file, [buffers[0][:1000]], offset)

        return move

    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    with open_tier_in(tmp_path) as tier:
        tensor = noise(123_456)
        ticket = tier.begin_out(tensor)
        tier.end_out(ticket)
        new = tier.begin_in(ticket)
        tier.end_in(ticket)
        assert torch.equal(new, tensor)
    assert (calls.count("pwritev"), calls.count("preadv")) == (124, 124)


def test_copies_given_up_by_close_keep_their_tensors(tmp_path):
    tier = open_tier_in(tmp_path)
    gate = threading.Event()
    tier._lane._thread.submit(lambda: gate.wait(timeout=30))
    tensor = noise(MIB)
    ticket = tier.begin_out(tensor)
    closer = threading.Thread(target=tier.close)
    closer.start()
    assert tier._lane._thread._is_closing.wait(timeout=30)
    gate.set()
    closer.join(timeout=30)
    with pytest.raises(TierError, match="closed before the copy ran"):
        tier.end_out(ticket)
    assert ticket.tensor is tensor
    tier.close()


def test_close_gives_file_and_thread_back(tmp_path):
    before, num_threads = open_files(), threading.active_count()
    with open_tier_in(tmp_path) as tier:
        assert open_files() == before + 1
        assert (
            os.fstat(tier._lane._file.fileno()).st_blocks * 512 >= 4 * MIB
        )  # space is really taken
        assert list(tmp_path.iterdir()) == []
    assert (open_files(), threading.active_count()) == (before, num_threads)


def test_file_without_a_name_where_the_kernel_has_none(tmp_path, monkeypatch):
    """Without the flag's own bit the call fails as on a kernel that does not know it."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", True)  # remembered; put back after the test
    with open_tier_in(tmp_path) as tier:
        assert os.fstat(tier._lane._file.fileno()).st_nlink == 0
        assert list(tmp_path.iterdir()) == []
        ticket = tier.begin_out(torch.ones(10))
        tier.end_out(ticket)
        tier.drop(ticket)


def test_capacity_is_whole_pages(tmp_path):
    with open_tier_in(tmp_path, 4097) as tier:
        assert tier.capacity_bytes == 8192
    with open_tier_in(tmp_path, 0) as tier:
        tier.drop(tier.begin_out(torch.empty(0)))
        with pytest.raises(TierError, match="free of 0 B"):
            tier.begin_out(torch.ones(1))


def test_memory_filesystems_are_told(small_disk, tmp_path):
    assert lies_in_memory(small_disk)
    assert not lies_in_memory(Path("/proc"))


SWAP_AND_WAIT = """
import sys, time, torch
from pathlib import Path
from bayplan.running.swaps.tier import open_tier
with open_tier(torch.device("cpu"), capacity_bytes=2**20, directory=Path(sys.argv[1])) as tier:
    tier.end_out(tier.begin_out(torch.ones(1000)))
    tier._lane._thread.submit(lambda: time.sleep(float(sys.argv[2])))
    ticket = tier.begin_out(torch.ones(1000))
    print("waiting", flush=True)
    tier.end_out(ticket)
"""


@contextmanager
def waiting_process(directory: Path, *, seconds: float):
    """A process in the middle of `end_out`, whose lane sleeps for some seconds."""
    command = [sys.executable, "-c", SWAP_AND_WAIT, str(directory), str(seconds)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            yield process
        finally:
            process.kill()


def test_killed_process_leaves_nothing_behind(tmp_path):
    with waiting_process(tmp_path, seconds=3600) as process:
        assert list(tmp_path.iterdir()) == []
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_ends_the_process(tmp_path):
    with waiting_process(tmp_path, seconds=2) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_swap_file_that_others_can_write_is_refused(tmp_path, monkeypatch):
    # Some file systems give files modes of their own.
    made = tempfile.TemporaryFile

    def open_to_all(**options):
        file = made(**options)
        os.fchmod(file.fileno(), 0o666)
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", open_to_all)
    with pytest.raises(TierError, match="may be written by everybody, who could read and change"):
        FileLane(torch.device("cpu"), capacity_bytes=4096, directory=tmp_path)
