"""The catalogue of devices and of clusters, by name."""

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from bayplan.data.cluster import Cluster
from bayplan.data.cluster_file import ClusterFile
from bayplan.data.device import DeviceKind
from bayplan.data.errors import FileFault, UsageError, did_you_mean
from bayplan.data.files import decode, read

__all__ = [
    "THIS_MACHINE",
    "cluster_names",
    "device_names",
    "expand",
    "kept_probe",
    "load_device",
    "read_cluster",
    "read_cluster_file",
]

THIS_MACHINE = "this-machine"
"""The name of what `bayplan cluster --probe` has measured here and kept."""

_DEVICES = files("bayplan.costing") / "devices"
_CLUSTERS = files("bayplan.costing") / "clusters"
_FILE_ENDINGS = (".yaml", ".yml", ".json")
_SEVERAL = re.compile(r"([0-9]{1,5})x(.+)")
_Noun = TypeVar("_Noun", DeviceKind, ClusterFile)


def device_names() -> tuple[str, ...]:
    return _names_in(_DEVICES)


def cluster_names() -> tuple[str, ...]:
    return _names_in(_CLUSTERS)


def _names_in(folder: Traversable) -> tuple[str, ...]:
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_device(name_or_path: str | Path) -> DeviceKind:
    """Read a device by its name in the catalogue, or from a file of the same form.

    A name wins over a file or folder that happens to be called the same; write `./v100` for that.

    Example:
        >>> load_device("v100").title
        'NVIDIA Tesla V100 SXM2 16 GB'
    """
    return _load(str(name_or_path), DeviceKind, _DEVICES, "device", device_names())


def read_cluster(name_or_path: str | Path) -> Cluster:
    """Read a cluster by its name in the catalogue, or from a file.

    A name may be of several: `64xdgx-h100` are 64 of these hosts, joined by their network cards. A
    name wins over a file that happens to be called the same; write `./titanv-8` for that.

    Example:
        >>> len(read_cluster("titanv-8").devices), len(read_cluster("64xdgx-h100").devices)
        (8, 512)
    """
    return expand(read_cluster_file(name_or_path), where=str(name_or_path))


def expand(file: ClusterFile, *, where: str) -> Cluster:
    """All of a cluster that was read; `where` is what an error calls it."""
    try:
        return file.cluster(_known_device)
    except ValueError as fault:
        raise FileFault(f"{where}: {fault}") from None


def read_cluster_file(name_or_path: str | Path) -> ClusterFile:
    """Read the same as it is written, to be shown or changed."""
    text = str(name_or_path)
    if (several := _SEVERAL.fullmatch(text)) and not Path(text).is_file():
        number = int(several[1])
        if number < 1:
            raise UsageError(f"{text} has no hosts; write 1x{several[2]} or more")
        try:
            return read_cluster_file(several[2]).times(number)
        except FileFault:
            raise
        except ValueError as fault:
            raise UsageError(f"{text}: {fault}") from None
    if text == THIS_MACHINE:
        if not kept_probe().exists():
            raise UsageError(
                "this machine was not probed yet; `bayplan cluster --probe` does it in some seconds"
            )
        return read(kept_probe(), ClusterFile)
    return _load(text, ClusterFile, _CLUSTERS, "cluster", (*cluster_names(), THIS_MACHINE))


def kept_probe() -> Path:
    """Where the last probe of this machine is kept."""
    from bayplan.devices.machine import cache_directory  # imports torch

    return cache_directory() / "clusters" / f"{THIS_MACHINE}.json"


def _load(
    text: str, noun: type[_Noun], folder: Traversable, what: str, known: tuple[str, ...]
) -> _Noun:
    """Read what a name in the catalogue, or else a path, stands for."""
    if text.lower() in _names_in(folder):
        file = folder / f"{text.lower()}.yaml"
        return decode(file.read_bytes(), noun, name=f"catalogue/{file.name}", is_yaml=True)
    if text.endswith(_FILE_ENDINGS) or Path(text).is_file():
        return read(text, noun)
    raise UsageError(
        f"no {what} {text!r} in the catalogue: {did_you_mean(text.lower(), known)}"
        f" (for any other {what}, give the path of a YAML file)"
    )


def _known_device(name: str) -> DeviceKind:
    """Names alone: a file may not make us read others."""
    if name.lower() not in device_names():
        raise FileFault(
            f"kind {name!r} is not in the catalogue of devices:"
            f" {did_you_mean(name.lower(), device_names())} (describe any other under `kinds`)"
        )
    return load_device(name)
