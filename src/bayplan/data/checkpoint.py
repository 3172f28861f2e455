"""`Checkpoint`: what is in a saved training, file by file; the manifest of its folder.

Tensors lie in files that are laid out as safetensors: a header that other tools read, then numbers.
All else that a training is made of (hyperparameters, counters, where it is in its data) is JSON
here. So nothing is unpickled, and reading a file runs no code.
"""

import math
import re
from typing import Any, ClassVar

from bayplan.data.errors import CheckedStruct, check_at_least_1

__all__ = ["DTYPE_BYTES", "Checkpoint", "SavedFile", "SavedTensor", "is_strided_apart"]

# As safetensors calls them; the last is not among those that it knows.
DTYPE_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
    **{"C64": 8, "C128": 16},
}
_FILE = re.compile(r"[a-z]+-[0-9]{5}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 56  # zeros among the sizes left out: torch computes strides from the others
_MOST_GAPS = 16  # how much more memory a tensor may take than its elements


class SavedTensor(CheckedStruct, frozen=True, kw_only=True):
    """A tensor in a file, its elements in the order of its dimensions.

    Attributes:
        offset: where it begins, in bytes of the file.
        strides: those that it had, where they were others than those of this order.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}, known are {', '.join(DTYPE_BYTES)}")
        if len(self.shape) > _MOST_DIMENSIONS:
            raise ValueError(f"{len(self.shape)} dimensions, at most {_MOST_DIMENSIONS} may be")
        if math.prod(max(1, size) for size in self.shape) > _MOST_ELEMENTS:
            raise ValueError(f"shape is {self.shape}, which no memory holds")
        if self.strides is not None and not is_strided_apart(self.shape, self.strides):
            raise ValueError(f"strides {self.strides} do not keep a {self.shape} apart")

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def is_strided_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two elements share their place, and few places are left empty."""
    if len(shape) != len(strides):
        return False
    extent = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step < extent:
                return False
            extent += step * (size - 1)
    return extent <= _MOST_GAPS * max(1, math.prod(shape))


class SavedFile(CheckedStruct, frozen=True, kw_only=True):
    """A file with tensors, in the checkpoint's own folder."""

    name: str
    size_bytes: int
    sha256: str
    tensors: dict[str, SavedTensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _FILE.fullmatch(self.name):
            raise ValueError(f"name is {self.name!r}, must be like model-00000.safetensors")
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"sha256 is {self.sha256!r}, must be 64 hexadecimal digits")
        for name, tensor in self.tensors.items():
            end = tensor.offset + tensor.size_bytes
            if end > self.size_bytes:
                raise ValueError(
                    f"tensors[{name!r}] ends at byte {end} of a file of {self.size_bytes}"
                )


class Checkpoint(CheckedStruct, frozen=True, kw_only=True):
    """One training between two steps.

    Attributes:
        step: how many steps are done; some of their batches may be in flight (`in_flight`).
        plan: a digest of the plan's decisions, empty for one device; batches in flight continue
            only under the same plan.
        num_ranks: processes that saved it.
        files: tensors under the names `model.…`, `optimizer.…` and so on, each once.
        aliases: other names of tied weights, with the names that they are saved under.
        state: what is no tensor, in the form that `running/checkpoints/trees.py` describes.
        in_flight: the same for batches in flight under stale weights, by rank.
    """

    schema: str = "bayplan/checkpoint"
    version: int = 1
    step: int
    plan: str = ""
    torch_version: str = ""
    num_ranks: int = 1
    files: tuple[SavedFile, ...]
    aliases: dict[str, str] = {}
    state: Any = None
    in_flight: tuple[Any, ...] = ()

    upgrades: ClassVar[dict[int, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_1(num_ranks=self.num_ranks)
        files = [file.name for file in self.files]
        names = [name for file in self.files for name in file.tensors]
        for what, given in (("file", files), ("tensor", names)):
            if len(set(given)) != len(given):
                twice = next(name for name in given if given.count(name) > 1)
                raise ValueError(f"{what} {twice!r} is there twice")
        known = set(names)
        for name, target in self.aliases.items():
            if name in known or target not in known:
                raise ValueError(f"aliases[{name!r}] is {target!r}, which must be a tensor's name")

    @property
    def tensors(self) -> dict[str, tuple[SavedFile, SavedTensor]]:
        """All tensors by name, with their files."""
        found = {
            name: (file, tensor) for file in self.files for name, tensor in file.tensors.items()
        }
        return found | {name: found[target] for name, target in self.aliases.items()}
