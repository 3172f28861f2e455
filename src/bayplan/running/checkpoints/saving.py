"""`Saver`: checkpoints written while training goes on, by one process or by all ranks together.

A step waits only until a copy of the state is made, in host memory; a thread does the rest. One
thing is written at a time: the next save waits for the last. Ranks write into one folder, which
they have to share, and tell each other by messages in the store that they met in, because a thread
has no collectives: rank 0 makes the folder, each rank writes its files and tells their digests,
rank 0 writes the manifest and gives the folder its name.

A save that fails (a full disk, above all) leaves the checkpoints before it alone, is told of in one
line, and training goes on.
"""

import contextlib
import mmap
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch.distributed import checkpoint as dcp

from bayplan.data.checkpoint import Checkpoint, SavedFile, is_strided_apart
from bayplan.data.errors import BayplanError, FileFault
from bayplan.running.checkpoints import folders
from bayplan.running.checkpoints.storage import CheckpointWriter
from bayplan.running.checkpoints.training_state import Saved, joined

__all__ = ["Alone", "Meeting", "Saver", "StoreMeeting"]

_ROUND_SECONDS = 0.02
_PATIENCE_SECONDS = 600.0  # for the other ranks to write their files
_ALIGNMENT_BYTES = 64


class Meeting(Protocol):
    """Where the processes that save together tell each other."""

    rank: int
    num_ranks: int

    def tell(self, key: str, content: str) -> None: ...

    def heard(self, key: str) -> str | None:
        """What was told under a key; None if nothing was yet."""

    def forget(self, key: str) -> None: ...


class Alone:
    """One process, which tells itself."""

    rank, num_ranks = 0, 1

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def tell(self, key: str, content: str) -> None:
        self._told[key] = content

    def heard(self, key: str) -> str | None:
        return self._told.get(key)

    def forget(self, key: str) -> None:
        self._told.pop(key, None)


class StoreMeeting:
    """Ranks, by the store of their process group; no call waits for another rank."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self.rank, self.num_ranks = store, rank, num_ranks

    def tell(self, key: str, content: str) -> None:
        self._store.set(key, content)

    def heard(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def forget(self, key: str) -> None:
        self._store.delete_key(key)


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written, or why it could not."""

    files: tuple[SavedFile, ...] = ()
    trees: dict[str, Any] = {}
    in_flight: Any = None
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A copy of one process's part of the state, to be written."""

    key: str
    step: int
    plan: str
    aliases: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]
    strides: Mapping[str, tuple[int, ...]]
    trees: Mapping[str, Any]
    in_flight: Any
    fault: str  # why there is no copy


_numbers = count()  # of savers; ranks make theirs in the same order


class Saver:
    """Writes the checkpoints of a folder.

    Args:
        root: where all of them are; ranks share it.
        keep: how many stay.
        tell: hears, on rank 0, of a checkpoint that could not be written.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int = 2,
        meeting: Meeting | None = None,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        if keep < 1:
            raise FileFault(f"{keep} checkpoints cannot be kept; keep 1 or more")
        self.root, self._keep, self._tell = root, keep, tell
        self._meeting = meeting or Alone()
        self._key = f"bayplan/checkpoints{next(_numbers)}"
        self._saves = count()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="bayplan-checkpoint")
        self._last: Future[Path] | None = None

    def save(
        self,
        saved: Saved,
        *,
        step: int,
        aliases: Mapping[str, str],
        plan: str = "",
        in_flight: Any = None,
    ) -> Future[Path]:
        """Begin to write; all ranks call it after the same step.

        The state may change as soon as this returns. The result is the checkpoint's folder, or a
        `FileFault`, the same on all ranks.
        """
        if self._last is not None:
            self._last.exception()
        tensors, strides, fault = {}, {}, ""
        try:
            tensors, strides = _staged(saved.tensors)
        except (OSError, MemoryError) as caught:  # no memory for the copy: training goes on
            fault = _cause(caught)
        job = _Job(
            key=f"{self._key}/{next(self._saves)}",
            step=step,
            plan=plan,
            aliases=dict(aliases),
            tensors=tensors,
            strides=strides,
            trees=saved.trees,
            in_flight=in_flight,
            fault=fault,
        )
        self._last = self._threads.submit(self._write, job)
        return self._last

    def wait(self) -> Path | None:
        """Wait for the last save; its folder, or None where none was begun or it failed."""
        if self._last is None or self._last.exception() is not None:
            return None
        return self._last.result()

    def _write(self, job: _Job) -> Path:
        if self._meeting.rank:
            return self._follow(job)
        fault = f"no checkpoint of step {job.step} in {self.root}"
        try:
            done = self._lead(job)
            fault = ""
            return done
        except Exception as caught:  # whatever it is, training goes on, and all ranks hear of it
            kept = next(iter(folders.saved_steps(self.root).values()), None)
            last = "there is none yet" if kept is None else f"the last one is {kept.name}"
            fault += f": {_cause(caught)}; {last}"
            self._tell(fault)
            raise FileFault(fault) from caught
        finally:
            self._meeting.tell(f"{job.key}/end", fault)
            for rank in range(1, self._meeting.num_ranks):
                self._meeting.forget(f"{job.key}/{rank}")

    def _lead(self, job: _Job) -> Path:
        """Make the folder, write, wait for the others, and give the folder its name."""
        with folders.locked(self.root):
            folder = folders.begin(self.root, job.step)
            try:
                self._meeting.tell(f"{job.key}/begin", folder.name)
                parts = [self._written(folder, job)]
                for rank in range(1, self._meeting.num_ranks):
                    told = self._wait_for(f"{job.key}/{rank}", f"rank {rank} has written nothing")
                    parts.append(msgspec.json.decode(told, type=_Part))
                for rank, part in enumerate(parts):
                    if part.fault:
                        where = f"rank {rank}: " if len(parts) > 1 else ""
                        raise FileFault(f"{where}{part.fault}")
                folders.write_manifest(folder, _manifest(job, parts))
                return folders.publish(folder, step=job.step, keep=self._keep)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def _follow(self, job: _Job) -> Path:
        """Write what rank 0 waits for."""
        end = f"{job.key}/end"
        name = self._wait_for(f"{job.key}/begin", "rank 0 has begun nothing", end)
        part = self._written(self.root / name, job) if name else _Part()
        self._meeting.tell(f"{job.key}/{self._meeting.rank}", msgspec.json.encode(part).decode())
        fault = self._wait_for(end, "rank 0 has not ended")
        if fault:
            raise FileFault(fault)
        return self.root / f"step-{job.step:08d}"

    def _written(self, folder: Path, job: _Job) -> _Part:
        if job.fault:
            return _Part(fault=job.fault)
        try:
            files: tuple[SavedFile, ...] = ()
            if job.tensors:
                writer = CheckpointWriter(folder, self._meeting.rank, job.strides)
                dcp.save(dict(job.tensors), storage_writer=writer, no_dist=True)
                files = writer.files
            return _Part(files=files, trees=dict(job.trees), in_flight=job.in_flight)
        except (OSError, BayplanError, dcp.CheckpointException) as fault:
            # Room for the others, and for the message of why.
            for kind in ("model", "state"):
                with contextlib.suppress(OSError):
                    (folder / f"{kind}-{self._meeting.rank:05d}.safetensors").unlink()
            return _Part(fault=_cause(fault))

    def _wait_for(self, key: str, what: str, instead: str = "") -> str:
        """What another rank tells; empty where it tells `instead`."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while (told := self._meeting.heard(key)) is None:
            if instead and self._meeting.heard(instead) is not None:
                return ""
            if time.monotonic() > end:
                raise FileFault(f"{what} for {_PATIENCE_SECONDS:.0f} s")
            time.sleep(_ROUND_SECONDS)
        return told


def _cause(fault: BaseException) -> str:
    """What went wrong inside a call of torch's, which wraps it."""
    if isinstance(fault, dcp.CheckpointException):
        causes = [cause for cause, _ in fault.failures.values()]
        return _cause(causes[0]) if causes else str(fault)
    if isinstance(fault, BayplanError):
        return str(fault)
    words = fault.strerror if isinstance(fault, OSError) else None
    return words or f"{type(fault).__name__}: {fault}"


def _manifest(job: _Job, parts: list[_Part]) -> Checkpoint:
    in_flight = tuple([part.in_flight for part in parts])
    return Checkpoint(
        step=job.step,
        plan=job.plan,
        torch_version=torch.__version__.split("+")[0],
        num_ranks=len(parts),
        files=tuple([file for part in parts for file in part.files]),
        aliases=dict(job.aliases),
        state=joined(part.trees for part in parts),
        in_flight=() if job.in_flight is None else in_flight,
    )


def _staged(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    """Copies in host memory, in the order of their dimensions, and the strides they had.

    In pages of their own, which no allocator's count of a training has, and which go back at once.
    """
    sizes = {name: -(-tensor.nbytes // _ALIGNMENT_BYTES) for name, tensor in tensors.items()}
    total_bytes = sum(sizes.values()) * _ALIGNMENT_BYTES
    strides = {
        name: tensor.stride()
        for name, tensor in tensors.items()
        if not tensor.is_contiguous() and is_strided_apart(tuple(tensor.shape), tensor.stride())
    }
    if not total_bytes:
        return {name: tensor.cpu() for name, tensor in tensors.items()}, strides
    pages = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(pages, dtype=torch.uint8)
    staged: dict[str, torch.Tensor] = {}
    offset = 0
    for name, tensor in tensors.items():
        place = room[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged[name] = place.copy_(tensor.detach())
        offset += sizes[name] * _ALIGNMENT_BYTES
    return staged, strides
