"""Folders of checkpoints: written whole or not at all, checked when read, the last few kept.

A checkpoint is written into `.step-00000050.…`, every file and the folder are synced, and only then
is it given its name, `step-00000050`. So a folder of that name is whole, however the run ended. It
may still be damaged later, by a disk or by hand: the manifest has the size and the digest of every
file, and `manifest.sha256` the manifest's own (`sha256sum -c` reads it). What does not agree is
passed over, with a word, and the checkpoint before it is taken.

Whoever writes holds a lock on the folder, so that what a killed run has left can be told from what
is being written, and removed.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bayplan.data import files
from bayplan.data.checkpoint import Checkpoint, SavedFile
from bayplan.data.errors import FileFault, UsageError
from bayplan.native import why_untrusted

__all__ = [
    "begin",
    "locked",
    "newest_whole",
    "open_plain",
    "publish",
    "read_manifest",
    "saved_steps",
    "sync_folder",
    "write_durably",
    "write_manifest",
]

MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
_REPLACED = ".replaced"  # what a checkpoint is called while another of its step takes its place
_NAME = re.compile(rf"step-([0-9]{{8,12}})|[.]step-([0-9]{{8,12}}){_REPLACED}")
_LOCK = ".lock"
_CHUNK_BYTES = 4 << 20
_MOST_MANIFEST_BYTES = 64 << 20  # in memory it takes ten times as much
_THREADS = 4


def saved_steps(root: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, the newest first; empty where there is no folder."""
    try:
        entries = sorted(root.iterdir())  # one that was being replaced before the one in its place
    except FileNotFoundError:
        return {}
    except OSError as fault:
        raise FileFault(f"cannot read {root}: {fault.strerror}") from fault
    matches = ((_NAME.fullmatch(entry.name), entry) for entry in entries)
    steps = {int(match[1] or match[2]): entry for match, entry in matches if match is not None}
    return dict(sorted(steps.items(), reverse=True))


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Be the only one that writes checkpoints into a folder; it is made if it is missing."""
    root.mkdir(parents=True, exist_ok=True)
    _refuse_untrusted(root, root.stat())
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run writes its checkpoints into {root}; give each run its own folder"
            ) from None
        except OSError:  # a file system that has no locks
            pass
        yield
    finally:
        os.close(descriptor)


def _refuse_untrusted(path: Path, status: os.stat_result) -> None:
    if why := why_untrusted(status):
        raise FileFault(
            f"{path} {why}, who could change what is trained; give a folder that only you can write"
        )


def begin(root: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; what killed runs have left is removed."""
    known = set(saved_steps(root).values())
    for entry in root.glob(".step-*"):
        if entry in known:  # that run had no time to put another in its place
            entry.rename(root / entry.name.removeprefix(".").removesuffix(_REPLACED))
            continue
        shutil.rmtree(entry, ignore_errors=True)
    folder = root / f".step-{step:08d}.{os.getpid()}"
    folder.mkdir()
    return folder


def publish(folder: Path, *, step: int, keep: int) -> Path:
    """Give a whole checkpoint its name, and remove all but the last ones up to it."""
    root = folder.parent
    sync_folder(folder)
    final = root / f"step-{step:08d}"
    replaced = root / f".{final.name}{_REPLACED}"
    if final.exists():  # of this step, by a run that was resumed from an earlier one
        final.rename(replaced)
    folder.rename(final)
    sync_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)
    earlier = [path for number, path in saved_steps(root).items() if number <= step]
    for path in earlier[keep:]:
        gone = root / f".{path.name}.old"
        path.rename(gone)  # first, so that no half of it has the name of a whole one
        shutil.rmtree(gone, ignore_errors=True)
    return final


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file, down to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(folder: Path, checkpoint: Checkpoint) -> None:
    content = files.encode(checkpoint)
    write_durably(folder / MANIFEST, content)
    digest = hashlib.sha256(content).hexdigest()
    write_durably(folder / _DIGEST, f"{digest}  {MANIFEST}\n".encode())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[int]:
    """A descriptor of a regular file; what a link points at, or a pipe, is not read.

    Raises:
        FileFault: there is none.
    """
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags)
    except OSError as fault:
        raise FileFault(f"cannot read {path}: {fault.strerror}") from fault
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileFault(f"{path} is not a regular file")
        _refuse_untrusted(path, status)
        yield descriptor
    except OSError as fault:
        raise FileFault(f"cannot read {path}: {fault.strerror}") from fault
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Checkpoint:
    """What a checkpoint says of itself, if its own digest agrees; its files are not looked at.

    Raises:
        FileFault: it is missing, damaged, or of another version.
    """
    manifest, known = (_content(folder / name) for name in (MANIFEST, _DIGEST))
    digest = hashlib.sha256(manifest).hexdigest()
    if known.decode(errors="replace").split() != [digest, MANIFEST]:
        raise FileFault(
            f"{folder / MANIFEST} is not what was written: {_DIGEST} has another digest"
        )
    return files.decode(manifest, Checkpoint, name=str(folder / MANIFEST))


def newest_whole(root: Path, tell: Callable[[str], object]) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint whose files are all as they were written; None if there is none at all.

    Each that is damaged is told of in one line.

    Raises:
        FileFault: there are some, and all are damaged.
    """
    faults = []
    for folder in saved_steps(root).values():
        try:
            _refuse_untrusted(folder, folder.stat())
            checkpoint = read_manifest(folder)
            with ThreadPoolExecutor(_THREADS) as pool:
                list(
                    pool.map(
                        lambda file, path=folder: _check(path / file.name, file), checkpoint.files
                    )
                )
        except FileFault as fault:
            faults.append(f"checkpoint {folder.name} is passed over: {fault}")
            tell(faults[-1])
        else:
            return folder, checkpoint
    if faults:
        raise FileFault(
            f"no checkpoint in {root} is whole; start anew in another folder, without it"
        )
    return None


def _content(path: Path) -> bytes:
    with open_plain(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > _MOST_MANIFEST_BYTES:
            raise FileFault(f"{path} has {size} bytes, at most {_MOST_MANIFEST_BYTES} may be")
        return os.pread(descriptor, size, 0)


def _check(path: Path, file: SavedFile) -> None:
    """Refuse a file that is not what was written."""
    with open_plain(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size != file.size_bytes:
            raise FileFault(f"{path} has {size} bytes, {file.size_bytes} were written")
        digest, offset = hashlib.sha256(), 0
        while chunk := os.pread(descriptor, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
    if digest.hexdigest() != file.sha256:
        raise FileFault(f"{path} is not what was written: its digest is another")
