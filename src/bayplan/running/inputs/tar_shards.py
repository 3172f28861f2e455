"""Images in tar files, as WebDataset has them: `0001.jpg` next to `0001.cls`.

A shard is read through once, header by header, for a table of where each image lies and what its
class is; the table is kept in the cache. From then on an image is one read at a known place, so
that shards need no state of their own to be shuffled or resumed. Nothing is ever extracted to disk.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.running.inputs.image_folder import unread

__all__ = ["TarShards"]

_IMAGES = ("jpg", "jpeg", "png", "webp")
_MOST_IMAGE_BYTES, _MOST_LABEL_BYTES = 256 << 20, 32
_ROW = numpy.dtype([("offset", "<i8"), ("size", "<i8"), ("label", "<i8")])


class TarShards:
    """The images of some shards, numbered shard by shard.

    Attributes:
        shards: how many images each has.
    """

    def __init__(self, paths: Sequence[Path], *, cache: Path) -> None:
        self._paths = tuple(paths)
        tables = [_table(path, cache) for path in self._paths]
        self.shards = tuple(map(len, tables))
        self._rows = numpy.concatenate(tables) if tables else numpy.empty(0, _ROW)
        self._ends = numpy.cumsum(self.shards)

    def __len__(self) -> int:
        return len(self._rows)

    def labels(self) -> numpy.ndarray:
        return self._rows["label"]

    def name(self, index: int) -> str:
        path, offset = self._place(index)
        try:
            with tarfile.open(path, mode="r:") as shard:
                name = next(each.name for each in shard if each.offset_data == offset)
        except (OSError, tarfile.TarError, StopIteration):
            name = f"the image at byte {offset}"
        return f"{name} in {path}"

    def content(self, index: int) -> bytes:
        path, offset = self._place(index)
        size = int(self._rows["size"][index])
        try:
            with path.open("rb") as shard:
                shard.seek(offset)
                content = shard.read(size)
        except OSError as fault:
            raise unread(path, fault) from None
        if len(content) != size:
            raise FileFault(f"{path} ends after {len(content)} of {size} bytes of an image")
        return content

    def _place(self, index: int) -> tuple[Path, int]:
        shard = int(numpy.searchsorted(self._ends, index, side="right"))
        return self._paths[shard], int(self._rows["offset"][index])


def _table(path: Path, cache: Path) -> numpy.ndarray:
    """Where the images of a shard are, from the cache if the shard is as it was."""
    try:
        state = path.stat()
    except OSError as fault:
        raise unread(path, fault) from None
    key = f"{path.absolute()} {state.st_size} {state.st_mtime_ns}"
    kept = cache / "shards" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.npy"
    try:
        table = numpy.load(kept, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        table = None
    if table is None or table.dtype != _ROW or table.ndim != 1:
        table = numpy.array(list(_rows(path, state.st_size)), dtype=_ROW)
        content = io.BytesIO()
        numpy.save(content, table, allow_pickle=False)
        files.write_bytes(kept, content.getvalue())
    return table


def _rows(path: Path, file_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Place, bytes and class of each sample: members that follow each other and share a key."""
    try:
        with tarfile.open(path, mode="r:") as shard:
            key, image, label = "", None, None
            for member in shard:
                if member.isdir():
                    continue
                if not member.isfile() or member.issparse():
                    raise FileFault(f"{member.name} in {path} is not a file but a link or a device")
                if member.offset_data + member.size > file_bytes:
                    raise FileFault(
                        f"{member.name} in {path} has {member.size} bytes, and the file ends before"
                    )
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if f"{folder}/{stem}" != key:
                    if key:
                        yield _row(path, key, image, label)
                    key, image, label = f"{folder}/{stem}", None, None
                if ending.lower() in _IMAGES:
                    image = member
                elif ending.lower() == "cls":
                    label = _label(path, shard, member)
            if key:
                yield _row(path, key, image, label)
    except tarfile.TarError as fault:
        raise FileFault(
            f"{path} is not a tar file that can be read at any position: {fault}; a compressed one"
            " has to"
            " be decompressed first"
        ) from None
    except OSError as fault:
        raise unread(path, fault) from None


def _row(
    path: Path, key: str, image: tarfile.TarInfo | None, label: int | None
) -> tuple[int, int, int]:
    name = key.removeprefix("/")
    if image is None:
        raise FileFault(f"{name} in {path} has no image (.jpg, .png or .webp)")
    if label is None:
        raise FileFault(
            f"{name} in {path} has no label: a file {name}.cls next to it that holds the number of"
            " its class"
        )
    if not 0 < image.size <= _MOST_IMAGE_BYTES:
        raise FileFault(
            f"{image.name} in {path} has {image.size} bytes; an image has 1 to {_MOST_IMAGE_BYTES}"
        )
    return image.offset_data, image.size, label


def _label(path: Path, shard: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    stream = shard.extractfile(member) if member.size <= _MOST_LABEL_BYTES else None
    text = b"" if stream is None else stream.read().strip()
    if not (text.isdigit() and len(text) <= 9):
        raise FileFault(f"{member.name} in {path} has no class number but {text[:20]!r}")
    return int(text)
