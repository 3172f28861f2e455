"""`torch.distributed.checkpoint` reading and writing a folder of bayplan's: safetensors and JSON.

Its own writer for file systems keeps what it needs to know in `.metadata`, which is a pickle, and
its reader unpickles that before it looks at anything; objects that are no tensors go through
`torch.load` with weights_only=False. Its writer for safetensors needs a package more, keeps no
other state, and one rank's digest of nothing. Here metadata come from the manifest, and only
tensors are read. Whole tensors are written, each by one process, so planning needs no messages,
which would be pickles, too: `no_dist=True` on every rank.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bayplan.data.checkpoint import Checkpoint, SavedFile, SavedTensor
from bayplan.data.errors import FileFault, UsageError
from bayplan.running.checkpoints.folders import open_plain, read_manifest

__all__ = ["MODEL", "CheckpointReader", "CheckpointWriter", "dtype_of", "room_for"]

MODEL = "model."  # names of the model's tensors begin with it; in their file they are without
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64, "C128": torch.complex128},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT_BYTES = 8  # of where a file's numbers begin; between them safetensors has no gaps
_CHUNK_BYTES = 16 << 20

# We say no_dist=True on purpose, and nobody else needs to hear of it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def dtype_of(saved: SavedTensor) -> torch.dtype:
    return _DTYPES[saved.dtype]


def room_for(saved: SavedTensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Memory for a saved tensor, with the strides that it had."""
    dtype = _DTYPES[saved.dtype]
    if saved.strides is None:
        return torch.empty(saved.shape, dtype=dtype, device=device)
    return torch.empty_strided(saved.shape, saved.strides, dtype=dtype, device=device)


class _Whole:
    """What both ends have in common: nothing to plan."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a folder alone does not say that it is one of ours


class CheckpointWriter(_Whole, StorageWriter):
    """Writes one process's tensors: those of the model into a file, all others into another.

    Attributes:
        files: what was written.
    """

    def __init__(
        self, folder: Path, rank: int, strides: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self.folder, self._rank, self._strides = folder, rank, strides or {}
        self.files: tuple[SavedFile, ...] = ()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def storage_meta(self) -> StorageMeta | None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {item.index.fqn: item for item in plan.items}
        model = {name: item for name, item in items.items() if name.startswith(MODEL)}
        others = {name: item for name, item in items.items() if name not in model}
        files = [
            self._write(f"{kind}-{self._rank:05d}.safetensors", own, planner)
            for kind, own in (("model", model), ("state", others))
            if own
        ]
        self.files = tuple(files)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(items[name].index, tensor.size_bytes, (file.name, tensor))
                for file in self.files
                for name, tensor in file.tensors.items()
            ]
        )
        return done

    def _write(self, name: str, items: Mapping[str, WriteItem], planner: SavePlanner) -> SavedFile:
        tensors: dict[str, torch.Tensor] = {}
        for key, item in items.items():
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor), "only tensors are given"
            tensors[key] = tensor.contiguous()
        header, places = _layout(tensors, self._strides)
        digest = hashlib.sha256()
        position = 0
        with (self.folder / name).open("xb", buffering=0) as file:

            def put(content: bytes | memoryview) -> None:
                nonlocal position
                left = memoryview(content)
                digest.update(left)
                position += len(left)
                while len(left):
                    left = left[file.write(left) :]

            put(header)
            for tensor in tensors.values():
                content = tensor.reshape(-1).view(torch.uint8).numpy().data
                for begin in range(0, len(content), _CHUNK_BYTES):
                    put(content[begin : begin + _CHUNK_BYTES])
            os.fsync(file.fileno())
        return SavedFile(name=name, size_bytes=position, sha256=digest.hexdigest(), tensors=places)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The manifest is written when all ranks are done; see `saving.py`."""


def _layout(
    tensors: Mapping[str, torch.Tensor], strides: Mapping[str, tuple[int, ...]]
) -> tuple[bytes, dict[str, SavedTensor]]:
    """A safetensors header, and where each tensor lies."""
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise UsageError(f"{name} is of {tensor.dtype}, which a checkpoint cannot hold")
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps({name.removeprefix(MODEL): entry for name, entry in entries.items()})
    text += " " * (-(8 + len(text.encode())) % _ALIGNMENT_BYTES)
    header = len(text.encode()).to_bytes(8, "little") + text.encode()
    places = {
        name: SavedTensor(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=len(header) + entry["data_offsets"][0],
            strides=strides.get(name),
        )
        for name, entry in entries.items()
    }
    return header, places


class CheckpointReader(_Whole, StorageReader):
    """Reads a checkpoint's tensors into those of a state, for `torch.distributed.checkpoint.load`.

    The names are those of the whole model, whatever plan it was saved under, with `model.` before
    them. The manifest is checked against its digest; files are not, which `newest_whole` does.
    """

    def __init__(self, folder: Path | str, checkpoint: Checkpoint | None = None) -> None:
        self._folder = Path(folder)
        self._checkpoint = read_manifest(self._folder) if checkpoint is None else checkpoint
        self._tensors = self._checkpoint.tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[saved.dtype]),
                size=torch.Size(saved.shape),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size([0] * len(saved.shape)), sizes=torch.Size(saved.shape)
                    )
                ],
            )
            for name, (_, saved) in self._tensors.items()
        }
        return Metadata(state_dict_metadata=dict(described))

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            whole = self.tensor(item.storage_index.fqn)
            part = whole
            for dimension, (begin, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dimension, begin, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in the host's memory, in the order of its dimensions."""
        if name not in self._tensors:
            raise FileFault(f"{self._folder} has no tensor {name!r}")
        file, saved = self._tensors[name]
        content = bytearray(saved.size_bytes)
        with open_plain(self._folder / file.name) as descriptor:
            left, offset = memoryview(content), saved.offset
            while len(left):
                count = os.preadv(descriptor, [left[:_CHUNK_BYTES]], offset)
                if not count:
                    raise FileFault(f"{self._folder / file.name} ends within {name!r}")
                left, offset = left[count:], offset + count
        if not content:
            return torch.empty(saved.shape, dtype=_DTYPES[saved.dtype])
        numbers = torch.frombuffer(content, dtype=_DTYPES[saved.dtype])
        return numbers.view(saved.shape)
