"""The shipped device descriptions, one YAML file per kind, and a user's own beside them."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from bayplan.data.device import DeviceKind
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.files import decode, read

__all__ = ["FILE_ENDINGS", "device_names", "load_device", "names_in"]

_FOLDER = files("bayplan.profiling") / "catalogue_data"
FILE_ENDINGS = (".yaml", ".yml", ".json")


def device_names() -> tuple[str, ...]:
    """Return the names in the catalogue, sorted.

    Example:
        >>> "titan-v" in device_names()
        True
    """
    return names_in(_FOLDER)


def names_in(folder: Traversable) -> tuple[str, ...]:
    """The names of all descriptions in a folder, sorted."""
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_device(name_or_path: str | Path) -> DeviceKind:
    """Read a device by its name in the catalogue, or from a file of the same form.

    A name wins over a file or folder that happens to be called the same; write `./v100` for that.

    Example:
        >>> load_device("v100").title
        'NVIDIA Tesla V100 SXM2 16 GB'
    """
    text = str(name_or_path)
    if text.lower() in device_names():
        file = _FOLDER / f"{text.lower()}.yaml"
        return decode(file.read_bytes(), DeviceKind, name=f"catalogue/{file.name}", is_yaml=True)
    if text.endswith(FILE_ENDINGS) or Path(text).is_file():
        return read(text, DeviceKind)
    raise UsageError(
        f"no device {text!r} in the catalogue: {did_you_mean(text.lower(), device_names())}"
        " (for any other device, give the path of a YAML file)"
    )
