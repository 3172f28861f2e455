"""Images in folders named after their classes: `train/cat/1.jpg`, `val/dog/7.jpg`."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy

from bayplan.data.errors import FileFault

__all__ = ["ImageFolder", "class_names", "unread"]

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def unread(path: Path | str, fault: OSError) -> FileFault:
    """What to raise for a file or folder that the system does not let us read."""
    return FileFault(f"cannot read {path}: {fault.strerror or fault}")


def class_names(folder: Path) -> list[str]:
    """The folders in a folder, in order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and _is_seen(entry))
    except OSError as fault:
        raise unread(folder, fault) from None


def _is_seen(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".")


class ImageFolder:
    """The images of all classes, numbered class by class in the order of their names.

    Attributes:
        shards: none; images may be read in any order.
    """

    shards: tuple[int, ...] = ()

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self._folder = os.fsencode(folder)
        names, labels = list[bytes](), list[int]()
        for label, name in enumerate(classes):
            found = sorted(_images_below(folder / name, folder))
            names += found
            labels += [label] * len(found)
        # Arrays, because workers would copy pages of objects whose reference counts they touch.
        self._names = numpy.array(names, dtype=bytes)
        self._labels = numpy.array(labels, dtype=numpy.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> numpy.ndarray:
        """The class of each image."""
        return self._labels

    def name(self, index: int) -> str:
        return os.fsdecode(os.path.join(self._folder, self._names[index]))

    def content(self, index: int) -> bytes:
        path = self.name(index)
        try:
            return Path(path).read_bytes()
        except OSError as fault:
            raise unread(path, fault) from None


def _images_below(folder: Path, root: Path) -> list[bytes]:
    def refuse(fault: OSError) -> None:
        raise unread(fault.filename or folder, fault)

    return [
        os.fsencode(os.path.relpath(os.path.join(place, name), root))
        for place, _, names in os.walk(folder, onerror=refuse, followlinks=True)
        for name in names
        if name.lower().endswith(_ENDINGS) and not name.startswith(".")
    ]
